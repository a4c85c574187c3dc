"""Several API processes that listen on one socket."""

import socket
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from routed_experts.server import LISTENS
from routed_experts.server.inprocess.patching import replace_once
from routed_experts.server.vllm_api import APIServerProcessManager


def close_port_after_the_last() -> None:
    """Has the first process close the port as soon as no API process listens any more.

    It keeps their socket open until the engine has ended, and so may the engine: new clients would wait, and then be
    reset. Not earlier, because a process that listens on a closed port logs tracebacks. Needed until vLLM closes it.
    """
    replace_once(APIServerProcessManager, "__init__", _start)


def _start(start: Any, manager: Any, **arguments: Any) -> None:
    none_listens, listens = Pipe(duplex=False)
    setattr(arguments["args"], LISTENS, listens)  # each API process gets a copy
    start(manager, **arguments)
    listens.close()
    delattr(arguments["args"], LISTENS)
    Thread(target=_close_port, args=(none_listens, arguments["sock"]), name="close-port", daemon=True).start()


def _close_port(none_listens: Connection, listening: socket.socket) -> None:
    none_listens.poll(None)  # until every process has closed its copy, or ended
    with suppress(OSError):  # nobody has listened yet
        listening.shutdown(socket.SHUT_RDWR)  # unlike `close`, for all that hold it
