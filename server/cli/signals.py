"""The signals that stop `routed-experts serve`."""

import os
import signal
import sys
import threading
from multiprocessing import resource_tracker

ENDED_AT_ONCE = 130
"""Exit status after a second Ctrl-C, as shells have it for SIGINT."""


def stop_on_signals() -> None:
    """From now on SIGTERM and Ctrl-C stop the server with exit status 0, and a second Ctrl-C ends it at once.

    A terminal sends Ctrl-C's SIGINT to all processes in its foreground group. vLLM's workers end there in the middle of
    a step, and its engine refuses requests that the API process still has. So SIGINT stays blocked here, and in all
    processes that are started from here, which inherit it; a thread waits for it and sends SIGTERM to this process
    alone. Until vLLM's workers leave signals to the engine.

    Call it before anything starts a thread: SIGINT is blocked in threads that are started later only.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until vLLM has handlers of its own
    resource_tracker.ensure_running()  # which unblocks SIGINT in the process that starts it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=_wait_for_ctrl_c, name="ctrl-c", daemon=True).start()


def _wait_for_ctrl_c() -> None:
    signal.sigwait({signal.SIGINT})
    os.kill(os.getpid(), signal.SIGTERM)
    signal.sigwait({signal.SIGINT})
    import psutil  # type: ignore[import-untyped]  # only needed here

    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(ENDED_AT_ONCE)
