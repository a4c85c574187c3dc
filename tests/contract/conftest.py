"""What engines in this process leave behind, put back as it was."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="session")
def modules_are_no_garbage() -> None:
    """What was imported by now: a collection that looks through all of it takes longer than most
    tests."""
    gc.freeze()


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    """Asynchronous scheduling."""
    return bool(request.param)
