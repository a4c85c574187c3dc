"""What the capture costs on one GPU, with the shape of Qwen3-30B-A3B and weights that nobody has to
download.

Two engines run in turns on the same GPU: that takes one of 140 GB (an H200), or fewer `--layers` on
a smaller one. With `--sequence-parallel`, on the same four.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tqdm import tqdm

from bench.http_server import free_port
from bench.http_table import commit_and_device, described
from bench.shapes import ENGINE_SHAPES, kv_bytes
from routed_experts.server.cli.console import say

Run = dict[str, float]


@dataclass(frozen=True)
class Case:
    """One load."""

    name: str
    size: int
    prompt_len: int
    new_tokens: int
    long: int = 0  # length of one more prompt that arrives among the decoding requests; 0 for none
    again: bool = False  # whether the same prompts come in every run
    turns: int = 1  # of each conversation
    new_rows: bool = False  # whether a turn asks for the rows that the turns before did not bring


@dataclass
class Host:
    """A running `bench.engine_host`."""

    variant: str
    process: subprocess.Popen[str]
    info: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, variant: str, engine: dict[str, Any], device: str, log: Path) -> "Host":
        command = [sys.executable, "-m", "bench.engine_host", "--variant", variant]
        command += ["--device", device, "--engine", json.dumps(engine)]
        with log.open("w") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True
            )
        host = cls(variant, process)
        say(f"Starting the engine of {variant}; its log is {log}.")
        host.info = host._read(log)["info"]
        return host

    def run(self, case: Case, routing: bool, steered: int = 0) -> Run:
        """One load; `routing` says whether its requests ask for rows, `steered` how many say which
        experts they take."""
        assert self.process.stdin is not None
        body = {key: value for key, value in asdict(case).items() if key != "name"}
        self.process.stdin.write(
            json.dumps({**body, "routing": routing, "steered": steered}) + "\n"
        )
        self.process.stdin.flush()
        return self._read(None)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def _read(self, log: Path | None) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"the engine of variant {self.variant} ended" + (f": see {log}" if log else "")
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


CASES = [
    Case("batch 256", 256, 128, 256),
    Case("64 + one of 16k", 64, 128, 256, long=16000),
    Case("batch 64", 64, 128, 256),
    Case("batch 1", 1, 128, 256),
    Case("64 of 1k", 64, 1024, 1024),
    # next to nothing but prefill: what a step of 8,192 prompt tokens costs
    Case("prompts", 2048, 128, 2),
]

CONVERSATIONS = [
    Case("128 of 50 turns", 128, 8, 8, turns=50),
    Case("128 of 50 turns, new rows", 128, 8, 8, turns=50, new_rows=True),
]
"""Run if they are named: their KV needs 13 GB in each engine."""

RELOADS = [Case("64 prompts of 2k again", 64, 2048, 16, again=True)]
"""With a KV cache for a quarter of them: all are loaded again from where they were offloaded."""

SLOTS = 98304
"""Tokens that the KV cache holds: as many as batch 256 needs at once."""

SEQUENCE_PARALLEL = {
    "tensor_parallel_size": 2,
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
}
"""With vLLM's default backend for all-to-all, each tensor-parallel rank routes a part of the
tokens."""


class Line(NamedTuple):
    """A line of the table."""

    name: str
    host: Host
    routing: bool = False  # whether its requests ask for rows
    steered: int = 0  # how many say which experts they take


OURS = [("captured, not asked for", False), ("returned to every request", True)]


def at_once(*starts: Callable[[], Host]) -> list[Host]:
    """The hosts, started at the same time: a start is mostly waiting."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda start: start(), starts))


def interleave(
    hosts: list[Host],
    lines: list[Line],
    cases: list[Case],
    repeats: int,
    results: dict[str, dict[str, list[Run]]],
    save: Path,
) -> None:
    """Runs every line of every case `repeats` times, in turns, after a warm-up."""
    for case in cases:
        short = replace(case, turns=2) if case.turns > 1 else replace(case, new_tokens=32)
        for host in hosts:
            host.run(case if case.long else short, routing=False)
        with tqdm(total=repeats * len(lines), desc=case.name, unit=" runs", disable=None) as bar:
            for repeat in range(repeats):
                order = lines if repeat % 2 == 0 else lines[::-1]
                for line in order:
                    runs = results.setdefault(case.name, {}).setdefault(line.name, [])
                    runs.append(line.host.run(case, line.routing, line.steered))
                    bar.update()
        save.write_text(json.dumps(results))


def table(results: dict[str, dict[str, list[Run]]], baseline: dict[str, str]) -> str:
    """Markdown: medians, and their ratios to the baseline that ran in the same turns.

    The noise is a row of its own: the runs of the baseline in even turns against those in odd ones.
    """
    figures = {"tokens_per_s": "tokens/s", "first_token_ms": "first token ms", "tpot_ms": "TPOT ms"}
    figures["itl_p99_ms"] = "ITL p99 ms"
    head = f"| case | variant | {' | to off | '.join(figures.values())} | to off | ITL max ms |"
    rows = [head, "| --- " * (head.count("|") - 1) + "|"]
    for case, variants in results.items():
        lines = [(name, runs, variants[baseline[name]]) for name, runs in variants.items()]
        lines.append(("off: even turns to odd", variants["off"][::2], variants["off"][1::2]))
        for name, runs, base in lines:
            cells = [case, name]
            for key in figures:
                value, reference = (
                    median(run[key] for run in runs),
                    median(run[key] for run in base),
                )
                ratio = "" if runs is base else f"{100 * (value / reference - 1):+.2f} %"
                cells += [f"{value:.1f}" if value >= 100 else f"{value:.2f}", ratio]
            cells.append(f"{median(run['itl_max_ms'] for run in runs):.1f}")
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def engine_options(model: Path, kv_cache_bytes: int) -> dict[str, Any]:
    return {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 20480,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        # only checked against what is free; the KV cache has a size of its own
        "gpu_memory_utilization": 0.4,
        "kv_cache_memory_bytes": kv_cache_bytes,
        "disable_log_stats": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", choices=sorted(ENGINE_SHAPES), default="qwen3-30b-a3b")
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="tensor 2 x data 2 with expert parallelism"
    )
    parser.add_argument("--skip-peer", action="store_true", help="without vLLM's own capture")
    parser.add_argument(
        "--input",
        action="store_true",
        help="only the flag --enable-routed-experts-input, off against on, with the capture in both",
    )
    parser.add_argument(
        "--offload", action="store_true", help="only a mix of reloads of KV that was offloaded"
    )
    every = {case.name: case for case in (*CASES, *CONVERSATIONS)}
    usual = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=every, default=usual, metavar="CASE")
    parser.add_argument("--layers", type=int, default=None, help="fewer for a rehearsal")
    parser.add_argument(
        "--logs", type=Path, default=None, help="folder for the engines' logs and the raw results"
    )
    args = parser.parse_args()
    logs = args.logs or Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    model = logs / "model"
    model.mkdir(exist_ok=True)
    config = dict(ENGINE_SHAPES[args.shape])
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(config))
    cases = RELOADS if args.offload else [every[name] for name in args.cases]
    slots = SLOTS // 3 if args.offload else SLOTS
    talks = [case for case in cases if case in CONVERSATIONS]
    slots = max(
        slots,
        *(case.size * case.turns * (case.prompt_len + case.new_tokens) * 5 // 4 for case in talks),
        0,
    )
    options = engine_options(model, kv_bytes(config) * slots)
    if args.sequence_parallel:
        options |= SEQUENCE_PARALLEL
    if args.offload:
        options |= {"kv_offloading_size": 16, "max_model_len": 4096}

    def start(variant: str) -> Host:
        own: dict[str, Any] = (
            {"data_parallel_rpc_port": free_port()} if args.sequence_parallel else {}
        )
        return Host.start(variant, options | own, "cuda", logs / f"{variant}.log")

    results: dict[str, Any] = {}
    save = logs / "results.json"
    if args.input:
        off, on = at_once(partial(start, "ours"), partial(start, "input"))
        lines = [
            Line("off", off),
            Line("off, again", off),
            Line("on, used by nobody", on),
            Line("on, one request steers", on, steered=1),
            Line("on, all requests steer", on, steered=max(case.size for case in cases)),
        ]
        interleave([off, on], lines, cases, args.repeats, results, save)
        for host in (off, on):
            host.stop()
        report(results, args, on)
        return
    off, ours = at_once(partial(start, "off"), partial(start, "ours"))
    lines = [Line("off", off), *(Line(name, ours, routing) for name, routing in OURS)]
    interleave([off, ours], lines, cases, args.repeats, results, save)
    ours.stop()
    report(results, args, ours)
    if args.skip_peer or args.offload or args.sequence_parallel:
        off.stop()
        return
    peer = start("vllm")
    lines = [Line("off, beside vLLM's own", off), Line("vLLM's own", peer, routing=True)]
    interleave([off, peer], lines, cases, args.repeats, results, save)
    for host in (off, peer):
        host.stop()
    report(results, args, ours)


def report(results: dict[str, Any], args: argparse.Namespace, ours: Host) -> None:
    """Prints the table, what it was measured on, and the memory that the capture takes."""
    beside = "off, beside vLLM's own"
    baseline = {name: "off" for case in results.values() for name in case}
    baseline |= {beside: beside, "vLLM's own": beside}
    conditions, layers = described(commit_and_device("cuda", None)), ours.info["num_layers"]
    print(f"\n{conditions}, {args.repeats} repeats, {args.shape}, {layers} MoE layers\n")
    print(table(results, baseline))
    print(f"\nours: {ours.info}", flush=True)


if __name__ == "__main__":
    main()
