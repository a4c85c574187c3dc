"""The signals that stop `routed-experts serve`, and those that end its other commands."""

import atexit
import gc
import os
import signal
import sys
import threading
from multiprocessing import resource_tracker
from typing import NoReturn

ENDED_AT_ONCE = 130
"""Exit status after a second Ctrl-C: the one of shells for SIGINT."""


class EndedError(KeyboardInterrupt):
    """A signal ends a command. `status` is its exit status: the one of shells for the signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


def end_on_signals() -> None:
    """Makes SIGTERM and SIGHUP end a command as Ctrl-C does: it removes its unfinished files. What
    is ignored stays so, as SIGHUP under `nohup`."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, _frame: object) -> NoReturn:
    raise EndedError(number)


def stop_on_signals() -> None:
    """Makes SIGTERM and Ctrl-C stop the server with exit status 0. A second Ctrl-C kills all its
    processes.

    A terminal sends SIGINT to all processes in its foreground group. vLLM's workers would exit in
    the middle of a step, while the API process still has requests. So this function blocks SIGINT,
    child processes inherit that, and a thread waits for SIGINT and sends SIGTERM to this process
    only. Can go when vLLM's workers leave signals to the engine.

    Call it before any thread starts: threads that already run do not block SIGINT.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until vLLM installs its handlers
    resource_tracker.ensure_running()  # starting it unblocks SIGINT, so start it first
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # else the interpreter visits every object of vLLM as it ends, which takes seconds
    atexit.register(gc.freeze)
    threading.Thread(target=_wait_for_ctrl_c, name="ctrl-c", daemon=True).start()


def _wait_for_ctrl_c() -> None:
    signal.sigwait({signal.SIGINT})
    os.kill(os.getpid(), signal.SIGTERM)
    signal.sigwait({signal.SIGINT})
    import psutil  # type: ignore[import-untyped]  # only needed here

    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(ENDED_AT_ONCE)
