"""A mixed load with aborts for as long as you like, and whether the server is afterwards what it was before.

Every kind of request takes turns at random: streamed and not, all forms, several choices, histograms, bad ones, clients
that leave. Memory is that of all of the server's processes; that of its worker, where it has a process of its own, is
also said apart, because PyTorch's grows on a CPU until it has met all sizes of batches, with and without the capture.
"""

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from tqdm import tqdm

from bench.http_server import MODEL_NAME, start
from bench.http_table import commit_and_device, described
from bench.shapes import TINY, write_model
from routed_experts.server.cli.console import say

COUNTERS = ("routed_experts_requests_tracked", "routed_experts_feeds_open", "vllm:num_requests_running")
WARM_UP = 0.25  # of the time, whose memory does not count: pools and caches fill
FLAGS = ["--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]


@dataclass
class Soak:
    """What was seen.

    Attributes:
        answers: requests by what became of them.
        samples: seconds, bytes, descriptors, threads, bytes of the worker alone; of all processes.
        counters: what must be zero at the end.
    """

    answers: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[float, int, int, int, int]] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)

    def slope(self, with_worker: bool = True) -> float:
        """Growth of memory in MiB a minute, by least squares, after the warm-up."""
        seconds, memory, _, _, worker = (np.array(column, dtype=float) for column in zip(*self.samples, strict=True))
        if not with_worker:
            memory -= worker
        late = seconds >= seconds[-1] * WARM_UP
        return float(np.polyfit(seconds[late] / 60, memory[late] / 2**20, 1)[0])

    def growth(self) -> tuple[int, int]:
        """Descriptors and threads at the end, less those at rest after the warm-up."""
        before, after = self.samples[0], self.samples[-1]
        return after[2] - before[2], after[3] - before[3]


def run(url: str, pid: int, model: str, seconds: float, clients: int = 8) -> Soak:
    """Loads the server whose API process is `pid`."""
    leader = psutil.Process(pid)
    processes = [leader, *leader.children(recursive=True)]
    soak, end = Soak(), threading.Event()
    say(f"Warming up for {seconds * WARM_UP:.0f} seconds.")
    _load(url, model, soak, time.monotonic() + seconds * WARM_UP, end, clients)
    _wait_until_idle(url, soak)
    soak.answers.clear()
    began = time.monotonic()
    soak.samples.append(_sample(processes, 0.0))
    sampler = threading.Thread(target=_keep_sampling, args=(processes, soak, began, end, seconds * (1 - WARM_UP)))
    sampler.start()
    _load(url, model, soak, began + seconds * (1 - WARM_UP), end, clients)
    _wait_until_idle(url, soak)
    end.set()
    sampler.join()
    soak.samples.append(_sample(processes, time.monotonic() - began))
    return soak


def _load(url: str, model: str, soak: Soak, until: float, end: threading.Event, clients: int) -> None:
    def client(seed: int) -> None:
        dice = random.Random(seed)
        # A server closes a connection after 5 seconds without a request, and may do so as the next one comes.
        limits = httpx.Limits(keepalive_expiry=2)
        with httpx.Client(base_url=url, timeout=120, verify=False, limits=limits) as opened:
            while time.monotonic() < until and not end.is_set():
                try:
                    what = _one(opened, model, dice)
                except httpx.HTTPError as error:
                    what = type(error).__name__
                soak.answers[what] += 1

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _one(client: httpx.Client, model: str, dice: random.Random) -> str:
    """Sends one request; returns what became of it."""
    body: dict[str, Any] = {"model": model, "max_tokens": dice.choice((1, 4, 20)), "ignore_eos": True}
    body |= {"n": dice.choice((1, 1, 3)), "temperature": 1, "return_routed_experts": dice.random() < 0.9}
    if body["return_routed_experts"]:
        body["routed_experts_format"] = dice.choice(("object", "npy", "raw", "list"))
        body["routed_experts_layout"] = dice.choice(("split", "joined"))
        body["routed_experts_histogram"] = dice.random() < 0.2
    # Half of the prompts begin as others did.
    body["prompt"] = [dice.randrange(33, 90)] * 2 + [40] * dice.choice((1, 30, 300))
    if dice.random() < 0.1:
        body["routed_experts_dtype"] = "int9"
    headers = {"Accept": dice.choice(("*/*", "application/msgpack"))}
    if dice.random() < 0.5:
        response = client.post("/v1/completions", json=body, headers=headers)
        response.read()
        return str(response.status_code)
    leaves_after = dice.choice((0, 1, 5, 10_000))
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for index, _ in enumerate(response.iter_lines()):
            if index >= leaves_after:
                return "left"
    return str(response.status_code)


def _sample(processes: list[psutil.Process], at: float) -> tuple[float, int, int, int, int]:
    memory = [process.memory_info().rss for process in processes]
    worker = sum(
        size for size, process in zip(memory, processes, strict=True) if "VLLM::Worker" in process.cmdline()[0]
    )
    files = sum(process.num_fds() for process in processes)
    return at, sum(memory), files, sum(process.num_threads() for process in processes), worker


def _keep_sampling(
    processes: list[psutil.Process], soak: Soak, began: float, end: threading.Event, seconds: float
) -> None:
    every_second = iter(partial(end.wait, 1.0), True)
    for _ in tqdm(every_second, total=round(seconds), desc="load", unit=" s", disable=None):
        soak.samples.append(_sample(processes, time.monotonic() - began))


def _wait_until_idle(url: str, soak: Soak) -> None:
    for _ in range(1200):
        text = httpx.get(f"{url}/metrics", timeout=60, verify=False).text
        soak.counters = {name: _metric(text, name) for name in COUNTERS}
        if not any(soak.counters.values()):
            return
        time.sleep(0.1)


def _metric(text: str, name: str) -> float:
    lines = (line for line in text.splitlines() if line.startswith((name + "{", name + " ")))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--clients", type=int, default=8)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    folder = Path(tempfile.mkdtemp())
    write_model(folder / "model", {**TINY, "num_hidden_layers": args.layers})
    server = start("ours", folder / "model", [*FLAGS, "--kv-cache-memory-bytes", "67108864"], folder / "log", 1, None)
    try:
        server.wait_until_healthy()
        url = f"http://127.0.0.1:{server.port}"
        soak = run(url, server.process.pid, MODEL_NAME, 60 * args.minutes, args.clients)
    finally:
        server.stop()
    about = commit_and_device("cpu", None)
    files, threads = soak.growth()
    first, last = (sample[1] / 2**20 for sample in (soak.samples[0], soak.samples[-1]))
    print(f"{args.minutes:g} minutes, {described(about)}.")
    print(f"Answers: {dict(soak.answers)}.")
    print(f"Memory: {first:.0f} MiB, at the end {last:.0f} MiB; slope {soak.slope():+.2f} MiB a minute, ")
    print(f"of which {soak.slope(with_worker=False):+.2f} not in the worker.")
    print(f"Descriptors {files:+d}, threads {threads:+d}. Counters at the end: {soak.counters}.")
    if any(soak.counters.values()) or not soak.answers["200"] or soak.answers["500"]:
        raise SystemExit("something is left, or went wrong")


if __name__ == "__main__":
    main()
