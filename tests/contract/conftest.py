"""What engines in this process leave behind, put back as it was."""

import gc
from collections.abc import Iterator

import pytest
from vllm.envs import disable_envs_cache


@pytest.fixture(autouse=True, scope="session")
def modules_are_no_garbage() -> None:
    """What was imported by now: a collection that looks through all of it takes longer than most tests."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def variables_are_read_again() -> Iterator[None]:
    """An engine core keeps vLLM's environment variables as they were at its start, for the whole process."""
    yield
    disable_envs_cache()


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    """Asynchronous scheduling."""
    return bool(request.param)
