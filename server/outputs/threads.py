"""Threads apart from those that all routes share: for calls of a bucket, which may take half a minute
each when it is gone, and for what a client makes long."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """As `ThreadPoolExecutor`, but a process can end while its threads wait for a bucket: Python
    waits at its end for all threads of an executor, and for all that was submitted to it."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._threads: list[Thread] = []
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]]
        self._jobs = SimpleQueue()
        self._unfinished: set[Future[Any]] = set()
        self._is_closed = False
        self._lock = Lock()

    def submit(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """Runs `function` in a thread, when one is free. Raises `RuntimeError` after `close`."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name}: the process ends")
            self._unfinished.add(future)
            if len(self._threads) < self._most:
                self._threads.append(Thread(target=self._work, name=self._name, daemon=True))
                self._threads[-1].start()
        future.add_done_callback(self._unfinished.discard)
        self._jobs.put((future, function, args))
        return future

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """As `submit`, for the event loop. What is cancelled before it began does not run."""
        return await asyncio.wrap_future(self.submit(function, *args))

    def _work(self) -> None:
        while True:
            future, function, args = self._jobs.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except BaseException as error:  # noqa: BLE001 raised where the result is waited for
                    future.set_exception(error)
            # else it would be held until the next comes
            del future, function, args

    def close(self, seconds: float) -> int:
        """Waits at most so long for all that was submitted, and gives up the rest. Returns how many
        that is."""
        with self._lock:
            self._is_closed = True
            unfinished = [*self._unfinished]
        _, left = wait(unfinished, seconds)
        for future in left:
            future.cancel()
        return len(left)
