"""Several API processes that listen on one socket, around engines that only the first process has
started."""

import socket
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any

from routed_experts.server.inprocess.patching import replace_once
from routed_experts.server.shared import SHARED, Shared, close_for_all, ends_of_engines
from routed_experts.server.vllm_api import APIServerProcessManager


def share_with_api_processes() -> None:
    """Has the last API process that listens close the port, or the first process in place of those
    that were killed, and tells API processes if an engine dies.

    vLLM keeps their socket open until the engine has ended, and so may the engine: new clients
    would wait, and then be reset. When an engine dies, it gives them 5 seconds to end, and they do
    not know why: running requests would wait, and then be cut off. Needed until vLLM closes the
    port, and tells its API processes of engines.
    """
    replace_once(APIServerProcessManager, "__init__", _start)


def _start(start: Any, manager: Any, **arguments: Any) -> None:
    none_listens, listens = Pipe(duplex=False)
    none_may_close, may_close = Pipe(duplex=False)
    engines_live, alive = Pipe(duplex=False)
    ends = ends_of_engines()
    shared = Shared(arguments["sock"].dup(), listens, none_listens, may_close, engines_live)
    setattr(arguments["args"], SHARED, shared)  # each API process gets a copy
    start(manager, **arguments)
    delattr(arguments["args"], SHARED)
    shared.forget()
    _in_thread("close-port", _close_port, none_may_close, arguments["sock"])
    if ends:
        _in_thread("engines-live", _tell_of_death, ends, alive)
    else:  # nobody can tell; and at its end, this pipe would say that an engine has died
        manager.routed_experts_alive = alive


def _in_thread(name: str, target: Any, *args: Any) -> None:
    Thread(target=target, args=args, name=name, daemon=True).start()


def _close_port(none_may_close: Connection, listening: socket.socket) -> None:
    """For processes that were killed. Otherwise the last one has closed it: if this process did so
    beside it, it would get connections that it cannot answer."""
    none_may_close.poll(None)
    for connection in close_for_all(listening):
        connection.close()


def _tell_of_death(ends: list[int], alive: Connection) -> None:
    wait(ends)
    alive.close()
