"""Several API processes that listen on one socket."""

import socket
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from routed_experts.server import DRAINED
from routed_experts.server.inprocess.patching import replace_once
from routed_experts.server.vllm_api import APIServerProcessManager


def close_port_after_the_last() -> None:
    """Has the first process close the port as soon as no API process has requests to finish.

    It holds their socket until the engine has ended, and so may the engine: new clients would wait for nobody, and then
    be reset. Until vLLM closes it.
    """
    replace_once(APIServerProcessManager, "__init__", _start)


def _start(start: Any, manager: Any, **arguments: Any) -> None:
    all_drained, drained = Pipe(duplex=False)
    setattr(arguments["args"], DRAINED, drained)  # each API process gets a copy
    start(manager, **arguments)
    drained.close()
    delattr(arguments["args"], DRAINED)
    Thread(target=_close_port, args=(all_drained, arguments["sock"]), name="close-port", daemon=True).start()


def _close_port(all_drained: Connection, listening: socket.socket) -> None:
    all_drained.poll(None)  # until every process has closed its copy, or ended
    with suppress(OSError):  # nobody has listened yet
        listening.shutdown(socket.SHUT_RDWR)  # unlike `close`, for all that hold it
