"""Reads the files in a request's body, in a process of its own: a parser holds the interpreter for
seconds, and leaves memory in pieces.

    python -m routed_experts.server.page.reader_process ANSWER < BODY

`ANSWER` is the descriptor of a file, which gets the lines of `page_lines`, or a message if the exit
status is `REFUSED`. Standard output says nothing: the process ends when its other end is closed.
"""

import os
import resource
import select
import signal
import sys
from contextlib import suppress
from threading import Thread
from typing import IO, NoReturn

from routed_experts.server.page import MAX_BYTES, read_saved

MEMORY_BYTES = 2 << 30
"""Of addresses. Bodies of the most bytes take up to 723 MiB."""
CPU_S = 60
"""Bodies of the most bytes take up to 6 s."""
_MORE_CPU_S = 10  # to say that there was too little
_NICE = 10
_FIRST_TO_KILL = "1000"  # the highest score
TOO_MUCH_MEMORY = (
    "These files take too much memory to be read at once: open them with routed-experts view."
)
TOO_LONG = "These files take too long to be read at once: open them with routed-experts view."


MAX_ANSWER_BYTES = 3 * MAX_BYTES
"""A letter of two bytes takes six, as answers are ASCII."""
TOO_LARGE_ANSWER = (
    "The responses in these files take too many bytes to be sent at once: "
    "open them with routed-experts view."
)
REFUSED = 3


class RefusalError(Exception):
    """What a client hears."""


class CpuTimeError(Exception):
    """The process has used its time."""


def main() -> None:
    give_way()
    limit(resource.RLIMIT_AS, MEMORY_BYTES, MEMORY_BYTES)
    signal.signal(signal.SIGXCPU, _end_reading)
    limit(resource.RLIMIT_CPU, CPU_S, CPU_S + _MORE_CPU_S)
    Thread(target=_end_with_server, daemon=True).start()
    with open(int(sys.argv[1]), "wb") as answer:
        try:
            write_answer(sys.stdin.buffer.read(), answer)
            answer.flush()
            return
        except RefusalError as error:
            message = str(error)
        except MemoryError:
            message = TOO_MUCH_MEMORY
        except CpuTimeError:
            message = TOO_LONG
        answer.seek(0)
        answer.truncate()
        answer.write(message.encode())
    sys.exit(REFUSED)


def write_answer(body: bytes, answer: IO[bytes]) -> None:
    try:
        lines = read_saved(body)
    except ValueError as error:
        raise RefusalError(str(error)) from None
    num_bytes = 0
    for line in lines:
        content = line.encode()
        num_bytes += len(content)
        if num_bytes > MAX_ANSWER_BYTES:
            raise RefusalError(TOO_LARGE_ANSWER)
        answer.write(content)


def give_way() -> None:
    """Has the system slow down or kill this process rather than the server and its engine."""
    with suppress(OSError):
        os.nice(_NICE)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_FIRST_TO_KILL)


def limit(what: int, soft: int, hard: int) -> None:
    """Sets a limit of this process, unless it has a lower one."""
    _, allowed = resource.getrlimit(what)
    if allowed == resource.RLIM_INFINITY or hard <= allowed:
        resource.setrlimit(what, (soft, hard))


def _end_reading(*_: object) -> NoReturn:
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    raise CpuTimeError


def _end_with_server() -> None:
    """Ends this process once the other end of its standard output is closed, as when the server was
    killed."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # of errors and of the end, one always hears
    poll.poll()
    os._exit(1)


if __name__ == "__main__":
    main()
