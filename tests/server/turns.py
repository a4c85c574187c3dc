"""Whether others get their turn."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class Turns:
    """How many another task has had."""

    count: int = 0


@asynccontextmanager
async def another_task() -> AsyncIterator[Turns]:
    """Another task, which takes every turn that it gets while the body runs."""
    turns = Turns()

    async def take() -> None:
        while True:
            turns.count += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(take())
    try:
        yield turns
    finally:
        task.cancel()
