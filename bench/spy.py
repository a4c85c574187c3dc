"""What the event loop of an API process spends a token's CPU time on, by package and by function.

`bench.http --spy PY_SPY` has py-spy (a program; `pip install py-spy`) sample the API process in one
more run of each line. Samples say which share of the time is whose; the time itself is the CPU time
of the runs without it.

    python -m bench.spy OUT    prints the tables of that benchmark's folder
"""

import argparse
import json
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

_PACKAGES = "vllm|uvicorn|starlette|fastapi|pydantic|prometheus_[a-z_]*|asyncio"
_OURS = "routed_experts"
_OUR_ROOMS = r"\((?:server|capture|protocol)/"
"""How py-spy shortens paths of ours in a checkout, where no folder has the package's name."""
_EVENT_LOOP = "Runner.run"  # is in the stack of each of its samples
_RATE = "200"  # samples a second
_NUM_FUNCTIONS = 12


@contextmanager
def recorded(program: str, pid: int, file: Path) -> Iterator[None]:
    """Samples a process meanwhile."""
    command = [program, "record", "--pid", str(pid), "--rate", _RATE]
    command += ["--format", "raw", "--output", str(file)]
    spy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        spy.send_signal(signal.SIGINT)
        spy.wait(60)


def file_of(folder: Path, case: str, mode: str, variant: str) -> Path:
    return folder / f"spy-{case}-{mode}-{re.sub('[^a-z_]+', '-', variant)}.txt"


def shares(file: Path) -> tuple[Counter[str], Counter[str]]:
    """Samples of the event loop, by package and by function of ours. A function outside of the
    packages counts for that of them which called it."""
    packages: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for line in file.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        if _EVENT_LOOP not in stack:
            continue
        frames = stack.split(";")
        named = (match for frame in reversed(frames) if (match := _package_of(frame)))
        packages[next(named, "others")] += int(count)
        if _package_of(frames[-1]) == _OURS:
            functions[frames[-1].partition(" ")[0]] += int(count)
    return packages, functions


def _package_of(frame: str) -> str:
    """The package of a frame, `function (path:line)`; empty for one that is not listed."""
    if f"/{_OURS}/" in frame or f"({_OURS}/" in frame or re.search(_OUR_ROOMS, frame):
        return _OURS
    found = re.search(rf"[(/]({_PACKAGES})/", frame)
    return found.group(1) if found else ""


def tables(folder: Path) -> str:
    """Markdown, for each case: µs of CPU a token."""
    microseconds: dict[tuple[str, str, str], list[float]] = {}
    for line in (folder / "results.jsonl").read_text().splitlines():
        run = json.loads(line)
        key = run["case"], run["mode"], run["variant"]
        microseconds.setdefault(key, []).append(run["cpu_us"])
    blocks = []
    for (case, mode, variant), times in microseconds.items():
        packages, functions = shares(file_of(folder, case, mode, variant))
        scale = median(times) / packages.total()
        rows = [
            f"{case}, {mode}, {variant}: {median(times):.1f} µs, {packages.total()} samples",
            "",
        ]
        rows += ["| package or function of ours | µs a token |", "| --- | --- |"]
        counted = [*packages.most_common(), *functions.most_common(_NUM_FUNCTIONS)]
        rows += [f"| {name} | {scale * count:.1f} |" for name, count in counted]
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="where bench.http --spy wrote to")
    print(tables(parser.parse_args().out))


if __name__ == "__main__":
    main()
