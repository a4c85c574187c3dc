"""What the first process shares with each of several API processes: its port, and whether its
engines live."""

import ctypes
import multiprocessing
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

SHARED = "routed_experts_shared"
"""Attribute of the arguments of one of several API processes: its `Shared`."""
ENGINE_DIED = "routed_experts_engine_died"
"""Attribute of the arguments of a server's only API process once its engine has died."""


@dataclass
class Shared:
    """Each API process has a copy."""

    listening: socket.socket  # of all of them
    # These are ends of pipes. A process closes the first and the third; the second and the fourth
    # are for reading, and come to their end (EOF) when the other end is closed everywhere.
    listens: Connection  # closed by a process when it no longer listens
    none_listens: Connection  # ends once every process has closed `listens`, or is gone
    may_close: Connection  # closed by a process when it has left the port to others, or closed it
    engines_live: Connection  # ends once an engine has died, or the first process

    def stop_listening(self) -> list[socket.socket]:
        """Tells the others that this process no longer listens. The last one closes the port for
        all, and gets the connections that nobody has accepted.

        Not earlier: a process that listens on a closed port logs tracebacks. Not later: clients
        would wait for somebody to accept their connection, and then be reset.
        """
        self.listens.close()
        connections = close_for_all(self.listening) if self.none_listens.poll() else []
        self.may_close.close()
        return connections

    def forget(self) -> None:
        """Closes the copy of the first process, once each API process has its own."""
        self.listening.close()
        self.listens.close()
        self.may_close.close()
        self.engines_live.close()


_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; the module `socket` has no name for it
_BPF_RETURN = 0x06  # linux/bpf_common.h: BPF_RET | BPF_K, with the number of bytes to keep


def close_for_all(listening: socket.socket) -> list[socket.socket]:
    """Closes a port for all processes that hold it, unlike `close`. Returns the connections that
    nobody has accepted: the system would reset them."""
    connections = []
    with suppress(OSError):  # it is closed already
        _let_nobody_in(listening)
    with suppress(OSError):  # nobody has listened yet, or it is closed, or nobody waits
        listening.setblocking(False)
        while True:
            connections.append(listening.accept()[0])
    with suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)
    return connections


def _let_nobody_in(listening: socket.socket) -> None:
    """Has the system drop packets of new clients. They try again after a second, and learn then
    that the port is closed.

    A client that came between the last `accept` and `shutdown` would be reset. Between the two,
    this thread may wait milliseconds for another one.
    """
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))  # linux/filter.h: sock_fprog
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def ends_of_engines() -> list[int]:
    """For each engine that this process has started, a file descriptor that is readable once the
    engine has ended.

    Engines that Ray started, or another node, are not among them.
    """
    children = multiprocessing.active_children()
    return [_end_of(child) for child in children if child.name.startswith("EngineCore")]


def _end_of(child: BaseProcess) -> int:
    """A descriptor of its own, as `multiprocessing` closes the child's."""
    if child.pid is not None:
        with suppress(OSError, AttributeError):  # before Linux 5.3, or forbidden in a container
            return os.pidfd_open(child.pid)
    # Workers that the engine forked hold this one, too: it may be readable only when they have
    # ended.
    return os.dup(child.sentinel)
