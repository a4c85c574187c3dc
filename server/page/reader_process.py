"""Reads the files in a request's body, in a process of its own: a parser holds the interpreter for
seconds, and leaves memory in pieces.

    python -m routed_experts.server.page.reader_process < BODY

Standard output gets a first line of JSON, `{}` or `{"error": str}` if the body cannot be read, and
then the lines of `page_lines`. The process ends when nobody reads them.
"""

import json
import os
import resource
import select
import signal
import sys
from threading import Thread
from typing import NoReturn

from routed_experts.server.page import read_saved

MEMORY_BYTES = 2 << 30
"""Of addresses. Bodies of the most bytes take up to 723 MiB."""
CPU_S = 60
"""Bodies of the most bytes take up to 6 s."""
_MORE_CPU_S = 10  # to say that there was too little
TOO_MUCH_MEMORY = (
    "These files take too much memory to be read at once: open them with routed-experts view."
)
TOO_LONG = "These files take too long to be read at once: open them with routed-experts view."


class CpuTimeError(Exception):
    """The process has used its time."""


def main() -> None:
    limit(resource.RLIMIT_AS, MEMORY_BYTES, MEMORY_BYTES)
    signal.signal(signal.SIGXCPU, _end_reading)
    limit(resource.RLIMIT_CPU, CPU_S, CPU_S + _MORE_CPU_S)
    Thread(target=_end_with_reader, daemon=True).start()
    output = sys.stdout.buffer
    try:
        lines = read_saved(sys.stdin.buffer.read())
    except ValueError as error:
        head = {"error": str(error)}
    except MemoryError:
        head = {"error": TOO_MUCH_MEMORY}
    except CpuTimeError:
        head = {"error": TOO_LONG}
    else:
        head = {}
    output.write(json.dumps(head).encode() + b"\n")
    output.flush()
    if head:
        return
    last = None
    try:
        for line in lines:
            output.write(line.encode())
    except MemoryError:
        last = TOO_MUCH_MEMORY
    except CpuTimeError:
        last = TOO_LONG
    if last:
        output.write(json.dumps({"error": {"message": last}}).encode() + b"\n")


def limit(what: int, soft: int, hard: int) -> None:
    """Sets a limit of this process, unless it has a lower one."""
    _, allowed = resource.getrlimit(what)
    if allowed == resource.RLIM_INFINITY or hard <= allowed:
        resource.setrlimit(what, (soft, hard))


def _end_reading(*_: object) -> NoReturn:
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    raise CpuTimeError


def _end_with_reader() -> None:
    """Ends this process once the other end of its standard output is closed, as when the server was
    killed."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # of errors and of the end, one always hears
    poll.poll()
    os._exit(1)


if __name__ == "__main__":
    main()
