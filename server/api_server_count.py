"""How many API processes a server needs, and how many its host has cores for."""

import os
from contextlib import suppress
from pathlib import Path

STREAMS_PER_PROCESS = 256
"""With rows beside each token a stream takes 60 to 140 µs of an API process's CPU a token, and a
step of so many streams 20 to 25 ms on an H100 or H200 (docs/performance.md)."""

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def needed_for(requests_at_once: int) -> int:
    """The API processes that stream so many requests with rows without being the limit."""
    return -(-requests_at_once // STREAMS_PER_PROCESS)


def api_server_count(requests_at_once: int, cores: int, engine_processes: int, least: int) -> int:
    """The number of a server's API processes where nobody says it.

    Each engine core and each worker of this host keeps a core busy; an API process needs one of
    the others. There are at least `least`, which is what vLLM would start.
    """
    free = cores - engine_processes
    return max(least, min(needed_for(requests_at_once), free))


def usable_cores(quota: Path = _CPU_QUOTA) -> int:
    """The cores that this process may use; in a container, as many as its limit allows.

    From Python 3.13 on, `os.process_cpu_count` counts them too, but knows of no limit.
    """
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no cgroup v2, or "max": no limit
        microseconds, period = map(int, quota.read_text().split())
        cores = min(cores, max(microseconds // period, 1))
    return cores
