"""The torture test, short: by hand it runs for thousands of requests (see `tests.e2e.torture`)."""

import os
from pathlib import Path

import pytest

from tests.e2e.torture import PROFILES, torture

pytestmark = pytest.mark.e2e

REQUESTS = int(os.environ.get("TORTURE_REQUESTS", "100"))


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_torture(tiny_model: Path, tmp_path: Path, profile: str) -> None:
    report = torture(tiny_model, tmp_path / "log", profile, REQUESTS)
    print(report.table())
    assert report.problems() == []
