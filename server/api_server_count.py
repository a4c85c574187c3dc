"""How many API processes a server needs, and how many its host has cores for."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

STREAMS_PER_PROCESS = 256
"""With rows beside each token a stream takes 60 to 140 µs of an API process's CPU a token, and a
step of so many streams 20 to 25 ms on an H100 or H200 (docs/performance.md)."""

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


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


def usable_cores(cgroups: Path = _CGROUPS, own_cgroups: Path = _OWN_CGROUPS) -> int:
    """The cores that this process may use; in a container, as many as its limit allows.

    From Python 3.13 on, `os.process_cpu_count` counts them too, but knows of no limit.
    """
    limits = [_limit_of(folder) for folder in _cpu_cgroups(cgroups, own_cgroups)]
    return int(max(min([len(os.sched_getaffinity(0)), *limits]), 1))


def _cpu_cgroups(cgroups: Path, own_cgroups: Path) -> Iterator[Path]:
    """The folders of this process's cgroups that may limit its CPU time, and of those above them:
    each of them limits what is below it.

    A container may see the host's path of its cgroup, below which it has no folders; its own
    limit is in the uppermost one then.
    """
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:  # no cgroups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        is_version_2 = not controllers
        if is_version_2:
            mount = cgroups
        elif "cpu" in controllers.split(","):
            mount = cgroups / "cpu"  # also where "cpu,cpuacct" is mounted
        else:
            continue
        # ".." stands for what is outside the namespace
        folder = mount.joinpath(*(part for part in Path(path).parts if part not in ("/", "..")))
        yield from (folder, *folder.parents[: len(folder.parts) - len(mount.parts)])


def _limit_of(folder: Path) -> float:
    """The cores that a cgroup of version 2 or 1 may use."""
    with suppress(OSError, ValueError):  # no such file, or "max"
        quota, period = map(int, (folder / "cpu.max").read_text().split())
        return quota // period
    with suppress(OSError, ValueError):
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        if quota > 0:  # -1: no limit
            return quota // period
    return math.inf
