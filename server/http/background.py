"""What runs beside requests. If it fails, that is logged, and the server goes on."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from routed_experts.server.vllm_api import get_logger

logger = get_logger(__name__)

_running: set[asyncio.Task[None]] = set()  # asyncio may drop a task that nothing refers to


def start(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Runs `work` in the event loop. The log calls it `name` if it fails."""
    task = asyncio.create_task(_logged(name, work))
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


def repeat(name: str, seconds: float, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    """Runs `work` now, and again so many seconds after it has ended or failed, as long as the
    server lives."""

    async def again_and_again() -> None:
        while True:
            await _logged(name, work())
            await asyncio.sleep(seconds)

    return start(name, again_and_again())


async def _logged(name: str, work: Awaitable[None]) -> None:
    try:
        await work
    except Exception:
        logger.exception("%s failed; the server goes on.", name)
