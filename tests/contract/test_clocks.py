"""What `make check` finds in tests that depend on how fast a machine is."""

from pathlib import Path

import pytest

from tests import clocks
from tests.clocks import found_in


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("time.sleep(0.1)", "a sleep"),
        ("await asyncio.sleep(seconds)", "a sleep"),
        ("began = time.monotonic()", "a clock"),
        ("assert time.process_time() - began < 2", "a clock"),
        ("assert before < time.time()", "a time, compared"),
        ("done.wait(10)", "a limit of 10 seconds"),
        ("wait_until(is_there, 'it is not', 20)", "a limit of 20 seconds"),
        ("process.communicate(timeout=0.5)", "a limit of 0.5 seconds"),
        ("time.sleep(0.1)  # clock: the kernel's", None),
        ("while not done:\n        time.sleep(0.1)", None),
        ("await asyncio.sleep(0)", None),
        ("now = time.time()", None),
        ("done.wait(60)", None),
        ("','.join(names)", None),
    ],
)
def test_what_depends_on_a_clock_is_found(line: str, what: str | None) -> None:
    text = f"async def test() -> None:\n    {line}\n"
    assert [found for _, found in found_in(text)] == ([what] if what else [])
    assert [*found_in(f"@pytest.mark.long\n{text}")] == []


def test_all_of_tests_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clocks, "ROOT", tmp_path)
    names = ["tests/gpu/test_one.py", "tests/one.py", "tests/server/deeper/one.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("time.sleep(1)\n")
    assert clocks.main() == 1
    assert capsys.readouterr().out.splitlines() == [f"{name}:1: a sleep" for name in names]
