"""The torture test, short: by hand it runs for thousands of requests (see `tests.e2e.torture`).

`tests/e2e/test_completions.py` has the profile of asynchronous scheduling, on the server that it shares.
"""

from pathlib import Path

import pytest

from tests.e2e.torture import REQUESTS, torture

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("profile", ["ngram", "offload"])
def test_torture(tiny_model: Path, tmp_path: Path, profile: str) -> None:
    report = torture(tiny_model, tmp_path / "log", profile, REQUESTS)
    print(report.table())
    assert report.problems() == []
