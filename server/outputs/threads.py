"""Threads apart from those that all routes share: for calls of a bucket, which may take half a minute
each when it is gone, and for what a client makes long."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Threads(ThreadPoolExecutor):
    """As many as its first argument says, at most."""

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """As `submit`, for the event loop. What is cancelled before it began does not run."""
        return await asyncio.wrap_future(self.submit(function, *args))
