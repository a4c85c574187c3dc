"""What the capture costs on one GPU, with the shape of Qwen3-30B-A3B and weights that nobody has to
download.

Two engines run in turns on the same GPU: that takes one of 140 GB (an H200), or fewer `--layers` on
a smaller one. With `--sequence-parallel`, on the same four. With `--conversations`, three engines:
24 layers at most on an H200.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tqdm import tqdm

from bench.http_server import free_port
from bench.http_table import commit_and_device, described
from bench.shapes import ENGINE_SHAPES, TINY, kv_bytes
from routed_experts.server.cli.console import say

Run = dict[str, float]

SHAPES = {**ENGINE_SHAPES, "tiny": TINY}


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

    @property
    def slots(self) -> int:
        """Tokens of KV cache that hold all of its conversations."""
        return self.size * self.turns * (self.prompt_len + self.new_tokens)


class Line(NamedTuple):
    """A line of the table."""

    name: str
    variant: str  # whose engine it runs on
    routing: bool = False  # whether its requests ask for rows
    new_rows: bool = False  # whether a turn asks for the rows that the turns before did not bring
    steered: int = 0  # how many requests say which experts they take
    steps: bool = False  # whether its requests ask for steps too


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

    def run(self, case: Case, line: Line) -> Run:
        """One load, with the requests of a line."""
        assert self.process.stdin is not None
        body = {key: value for key, value in asdict(case).items() if key != "name"}
        asked: dict[str, Any] = line._asdict()
        del asked["name"], asked["variant"]
        self.process.stdin.write(json.dumps({**body, **asked}) + "\n")
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
    Case("64 of 25 turns", 64, 8, 8, turns=25),
    Case("4 of 3 turns", 4, 8, 8, turns=3),  # for a rehearsal
]
"""Run by `--conversations`. With 48 layers, the KV of the first needs 13 GB in each engine."""

RELOADS = [Case("64 prompts of 2k again", 64, 2048, 16, again=True)]
"""With a KV cache for a quarter of them: all are loaded again from where they were offloaded."""

RECOMPUTATIONS = [Case("batch 64", 64, 128, 256), Case("batch 128", 128, 128, 256)]
"""With a KV cache for 85 of these requests: in the second, some are preempted."""

SLOTS = 98304
"""Tokens that the KV cache holds: as many as batch 256 needs at once."""

SEQUENCE_PARALLEL = {
    "tensor_parallel_size": 2,
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
}
"""With vLLM's default backend for all-to-all, each tensor-parallel rank routes a part of the
tokens."""


OFF = Line("off", "off")
CAPTURED = Line("captured, not asked for", "ours")
RETURNED = Line("returned to every request", "ours", routing=True)
WITH_STEPS = Line("returned with steps", "ours", routing=True, steps=True)
PEER = Line("vLLM's own", "vllm", routing=True)
OFF_BESIDE_PEER = Line("off, beside vLLM's own", "off")
IN_CONVERSATIONS = [
    OFF,
    CAPTURED,
    Line("new rows", "ours", routing=True, new_rows=True),
    Line("all rows", "ours", routing=True),
    PEER,
]
IN_RECOMPUTATION = [
    Line("off", "off", routing=True),
    Line("off, again", "off", routing=True),
    Line("input on", "input", routing=True),
    Line("replay on recomputation", "recompute", routing=True),
]
"""The capture is in all."""


def interleave(
    hosts: dict[str, Host],
    lines: list[Line],
    cases: list[Case],
    repeats: int,
    results: dict[str, dict[str, list[Run]]],
    save: Path,
) -> None:
    """Runs every line of every case `repeats` times, in turns, after a warm-up."""
    for case in cases:
        for variant, host in hosts.items():
            host.run(warm_up_of(case), Line("warm-up", variant))
        with tqdm(total=repeats * len(lines), desc=case.name, unit=" runs", disable=None) as bar:
            for repeat in range(repeats):
                order = lines if repeat % 2 == 0 else lines[::-1]
                for line in order:
                    runs = results.setdefault(case.name, {}).setdefault(line.name, [])
                    runs.append(hosts[line.variant].run(case, line))
                    bar.update()
                    save.write_text(json.dumps(results))


def warm_up_of(case: Case) -> Case:
    """What a case's kernels are compiled for. Conversations come out of step after a few turns: from
    then on, steps have the prompts of some beside the tokens of others."""
    if case.long:
        return case
    if case.turns > 1:
        return replace(case, turns=min(case.turns, 6))
    return replace(case, new_tokens=32)


FIGURES = {
    "tokens_per_s": "tokens/s",
    "first_token_ms": "first token ms",
    "tpot_ms": "TPOT ms",
    "itl_p99_ms": "ITL p99 ms",
}


def table(results: dict[str, dict[str, list[Run]]]) -> str:
    """Markdown: medians, and their ratios to the baseline that ran in the same turns.

    The noise is a row of its own: the runs of the baseline in even turns against those in odd ones.
    """
    head = f"| case | variant | {' | to off | '.join(FIGURES.values())} | to off | ITL max ms |"
    rows = [head, "| --- " * (head.count("|") - 1) + "|"]
    for case, variants in results.items():
        off = variants[OFF.name]
        beside_peer = variants.get(OFF_BESIDE_PEER.name, off)
        for name, runs in variants.items():
            is_of_peers_turns = name in (OFF_BESIDE_PEER.name, PEER.name)
            rows.append(row_of(case, name, runs, beside_peer if is_of_peers_turns else off))
        if len(off) > 1:
            rows.append(row_of(case, "off: even turns to odd", off[::2], off[1::2]))
    return "\n".join(rows)


def row_of(case: str, name: str, runs: list[Run], base: list[Run]) -> str:
    """A row of the table: the medians of `runs`, and their ratios to those of `base`, if that is
    another."""
    cells = [case, name]
    for key in FIGURES:
        value = median(run[key] for run in runs)
        reference = median(run[key] for run in base)
        ratio = "" if runs is base else f"{100 * (value / reference - 1):+.2f} %"
        cells += [f"{value:.1f}" if value >= 100 else f"{value:.2f}", ratio]
    cells.append(f"{median(run['itl_max_ms'] for run in runs):.1f}")
    return "| " + " | ".join(cells) + " |"


def engine_options(model: Path, config: dict[str, Any], cases: list[Case]) -> dict[str, Any]:
    """Those that all engines have; the KV cache holds every case at once."""
    slots = max(SLOTS, *(case.slots * 5 // 4 for case in cases if case.turns > 1), 0)
    options = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": config["torch_dtype"],
        "max_model_len": 20480,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        # only checked against what is free; the KV cache has a size of its own
        "gpu_memory_utilization": 0.4,
        "kv_cache_memory_bytes": kv_bytes(config) * slots,
        "disable_log_stats": True,
    }
    if config["torch_dtype"] == "float32":
        options |= {"enforce_eager": True, "distributed_executor_backend": "uni"}
    return options


class Bench:
    """The engines of a run, and what came of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._logs: Path = args.logs or Path(tempfile.mkdtemp())
        self._cases: list[Case] = args.cases
        model = self._logs / "model"
        model.mkdir(parents=True, exist_ok=True)
        config = dict(SHAPES[args.shape])
        config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
        (model / "config.json").write_text(json.dumps(config))
        self._options = engine_options(model, config, self._cases)
        if args.sequence_parallel:
            self._options |= SEQUENCE_PARALLEL
        if args.conversations:  # fewer graphs to capture: three engines start at once
            self._options["max_num_seqs"] = max(case.size for case in self._cases)
        if args.offload or args.recompute:
            num_bytes = kv_bytes(config) * (SLOTS // 3)
            self._options |= {"kv_cache_memory_bytes": num_bytes}
        if args.offload:
            self._options |= {"kv_offloading_size": 16, "max_model_len": 4096}
        self._results: dict[str, dict[str, list[Run]]] = {}

    def run(self) -> None:
        """Prints a table of the lines that the arguments ask for."""
        if self._args.input:
            steers_all = max(case.size for case in self._cases)
            lines = [
                OFF,
                Line("off, again", "off"),
                Line("on, used by nobody", "input"),
                Line("on, one request steers", "input", steered=1),
                Line("on, all requests steer", "input", steered=steers_all),
            ]
            # The capture is in both.
            hosts = self._at_once("ours", "input")
            self._finish({"off": hosts["ours"], "input": hosts["input"]}, lines, hosts["input"])
        elif self._args.recompute:
            hosts = self._at_once("ours", "input", "recompute")
            hosts["off"] = hosts.pop("ours")
            self._finish(hosts, IN_RECOMPUTATION, hosts["recompute"])
        elif self._args.conversations:
            lines = IN_CONVERSATIONS[:-1] if self._args.skip_peer else IN_CONVERSATIONS
            hosts = self._at_once(*dict.fromkeys(line.variant for line in lines))
            self._finish(hosts, lines, hosts["ours"])
        else:
            self._usual()

    def _usual(self) -> None:
        hosts = self._at_once("off", "ours")
        ours = hosts["ours"]
        self._turns(hosts, [OFF, CAPTURED, RETURNED, *([WITH_STEPS] if self._args.steps else [])])
        hosts.pop("ours").stop()
        self._report(ours)
        if not (self._args.skip_peer or self._args.offload or self._args.sequence_parallel):
            hosts["vllm"] = self._start("vllm")
            self._finish(hosts, [OFF_BESIDE_PEER, PEER], ours)
        for host in hosts.values():
            host.stop()

    def _finish(self, hosts: dict[str, Host], lines: list[Line], ours: Host) -> None:
        self._turns(hosts, lines)
        for host in hosts.values():
            host.stop()
        hosts.clear()
        self._report(ours)

    def _at_once(self, *variants: str) -> dict[str, Host]:
        """The engine of each variant, started at the same time: a start is mostly waiting."""
        with ThreadPoolExecutor() as pool:
            return dict(zip(variants, pool.map(self._start, variants), strict=True))

    def _start(self, variant: str) -> Host:
        own: dict[str, Any] = {}
        if self._args.sequence_parallel:
            own["data_parallel_rpc_port"] = free_port()
        log = self._logs / f"{variant}.log"
        return Host.start(variant, self._options | own, self._args.device, log)

    def _turns(self, hosts: dict[str, Host], lines: list[Line]) -> None:
        save = self._logs / "results.json"
        interleave(hosts, lines, self._cases, self._args.repeats, self._results, save)

    def _report(self, ours: Host) -> None:
        """Prints the table, what it was measured on, and the memory that the capture takes."""
        args, layers = self._args, ours.info["num_layers"]
        conditions = described(commit_and_device(args.device, None))
        print(f"\n{conditions}, {args.repeats} repeats, {args.shape}, {layers} MoE layers\n")
        print(table(self._results))
        for case, variants in self._results.items():
            for name, runs in variants.items():
                again = [round(run["recomputed"]) for run in runs]
                if any(again):
                    print(f"\n{case}, {name}: tokens that had their experts again, by run: {again}")
        print(f"\nours: {ours.info}", flush=True)


def main() -> None:
    Bench(parse()).run()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="tensor 2 x data 2 with expert parallelism"
    )
    parser.add_argument("--skip-peer", action="store_true", help="without vLLM's own capture")
    parser.add_argument(
        "--steps", action="store_true", help="one line more: every request asks for steps too"
    )
    parser.add_argument(
        "--input",
        action="store_true",
        help="only the flag --enable-routed-experts-input, off against on, with the capture in both",
    )
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="only the flag --enable-routed-experts-replay-on-recompute, with and without preemption; three engines",
    )
    parser.add_argument(
        "--offload", action="store_true", help="only a mix of reloads of KV that was offloaded"
    )
    talks = {case.name: case for case in CONVERSATIONS}
    parser.add_argument(
        "--conversations",
        choices=talks,
        help="only conversations, with vLLM's own capture in a third engine beside the two",
    )
    every = {case.name: case for case in CASES}
    parser.add_argument("--cases", nargs="+", choices=every, default=every, metavar="CASE")
    parser.add_argument("--layers", type=int, default=None, help="fewer for a rehearsal")
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cuda",
        help="cpu, with --shape tiny, to rehearse",
    )
    parser.add_argument(
        "--logs", type=Path, default=None, help="folder for the engines' logs and the raw results"
    )
    args = parser.parse_args()
    args.cases = [every[name] for name in args.cases]
    if args.offload:
        args.cases = RELOADS
    if args.recompute:
        args.cases = RECOMPUTATIONS
    if args.conversations:
        args.cases = [talks[args.conversations]]
    return args


if __name__ == "__main__":
    main()
