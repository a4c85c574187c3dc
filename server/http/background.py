"""What runs beside requests. If it fails, that is logged, and the server goes on."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from routed_experts.server.vllm_api import get_logger

logger = get_logger(__name__)

_running: set[asyncio.Task[None]] = set()  # asyncio may drop a task that nothing refers to


def start(what: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Runs `work` in the event loop. `what` names it in the log if it fails."""
    task = asyncio.create_task(_logged(what, work))
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


def repeat(what: str, seconds: float, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    """Runs `work` now, and again so many seconds after it has ended or failed, as long as the
    server lives."""
    return start(what, _again_and_again(what, seconds, work))


async def _logged(what: str, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        logger.exception("%s failed; the server goes on without it.", what)


async def _again_and_again(what: str, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    has_failed = False
    while True:
        try:
            await work()
            has_failed = False
        except Exception:
            if not has_failed:  # the first of several in a row
                logger.exception("%s failed; the server tries again every %g s.", what, seconds)
            has_failed = True
        await asyncio.sleep(seconds)
