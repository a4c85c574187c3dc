"""Each benchmark says what it does and which options it has."""

from pathlib import Path

import pytest

from tests.command_lines import module_parser

pytestmark = pytest.mark.release

BENCH = Path(__file__).resolve().parents[2] / "bench"
COMMANDS = sorted(path.stem for path in BENCH.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        module_parser(f"bench.{name}", "--help")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("usage:")
    assert len(said.splitlines()) > 4, "a sentence on what it measures"


def test_those_that_make_calls() -> None:
    assert {"cpu", "gpu", "http", "soak", "streamed_token", "scheduler", "offloading"} < set(COMMANDS)
