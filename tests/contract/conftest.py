"""What tests of engines in this process share."""

import pytest


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    """Asynchronous scheduling."""
    return bool(request.param)
