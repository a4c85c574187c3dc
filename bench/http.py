"""What routing costs over HTTP: real servers, clients in processes of their own, variants in turns
within one run.

On a GPU with the shape of Qwen3-30B-A3B, on a CPU with a model of as many rows and next to no
weights, or with none at all (`--without-engine`): there the API process's CPU time per token is the
figure.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from bench import spy
from bench.http_answers import Expected, Routing
from bench.http_load import MORE_FIELDS, Clients, Load, Request, Result
from bench.http_server import PLAYED, PLAYED_SLOTS, PLAYED_STEP_MS, Server, start
from bench.http_table import HEAD, Run, commit_and_device, row_of, table
from bench.shapes import QWEN3_30B_A3B, TINY, TOKEN_CHARS, kv_bytes, write_model
from routed_experts.protocol.models import REPLAY
from routed_experts.server.cli.console import say

ROOT = Path(__file__).parent.parent
WINDOW_S = 1.0
"""For how long the others are looked at beside a long answer: after its first event, or,
unstreamed, around its first byte, because its rows are encoded before that."""
LONG_ROLES = ("long", "says experts")
MODES = ("streamed", "unstreamed")
_ODD_SIZES = (129, 257, 385, 641, 1025, 1537, 2049, 3073, 4097, 6145, 8191)


@dataclass(frozen=True)
class Case:
    """One load; all its requests are sent at once but for those that come with `long`, or where it
    says otherwise."""

    name: str
    streams: int
    prompt_len: int
    new_tokens: int
    choices: int = 1
    mixed: bool = False  # answers between half and one and a half times as long as `new_tokens`
    over: float = 0.0  # the seconds over which its requests come, if not all at once
    modes: tuple[str, ...] = MODES
    # length of one more prompt, sent after `long_at` seconds; with it come short ones every `gap`
    long: int = 0
    # whether it says the experts of all its tokens, with the variant `input`
    says_experts: bool = False
    long_at: float = 1.0
    gap: float = 0.02
    others: int = 300

    @property
    def slots(self) -> int:
        """Tokens of KV cache that it takes to serve all of its requests at once."""
        return self.streams * (self.prompt_len + self.choices * self.new_tokens) + self.long


CASES = [
    Case("1", 1, 128, 256),
    Case("64", 64, 128, 256),
    Case("256", 256, 128, 256),
    Case("1024", 1024, 128, 256),
    Case("64-1k", 64, 1024, 1024),
    Case("256-mixed", 256, 128, 256, mixed=True),
    Case("64-prompts", 64, 1536, 32),
    Case("n8", 8, 8192, 256, choices=8),
    Case("long", 64, 128, 384, long=32768),
    Case("input", 64, 128, 384, modes=MODES[:1], long=32768, says_experts=True, others=0),
    Case("arrivals", 48, 1536, 128, over=6.0),
]
GPU_FLAGS = ["--load-format", "dummy", "--dtype", "bfloat16", "--gpu-memory-utilization", "0.4"]
CPU_FLAGS = ["--load-format", "dummy", "--dtype", "float32", "--enforce-eager"]


@dataclass(frozen=True)
class Line:
    """A variant as it is asked for."""

    variant: str
    server: str
    # what its answers bring: "none", one of OURS, or vLLM's "joined"
    rows: str
    stream: bool
    baseline: str
    to_generate: bool = False  # whether its requests go to vLLM's route for tokens

    @property
    def mode(self) -> str:
        return MODES[0] if self.stream else MODES[1]


def lines_of(
    variants: list[str], modes: list[str], *, has_before: bool = False
) -> list[list[Line]]:
    """The lines that take turns: first this project's, and those of its other version, then vLLM's
    own (which does not stream) beside another off."""
    servers = {"off": ("off", "none"), "captured": ("ours", "none"), "returned": ("ours", "split")}
    servers |= {
        "narrow": ("ours", "narrow"),
        "at_end": ("ours", "at_end"),
        "reference": ("ours", "reference"),
        "recorded": ("recorded", "none"),
        "input": ("input", "none"),
    }
    ours = [
        Line(variant, *servers[variant], mode == "streamed", "off")
        for mode in modes
        for variant in servers
        if variant in variants and (variant, mode) != ("at_end", "unstreamed")
    ]
    if has_before:
        ours += [
            replace(line, variant=f"before: {line.variant}", server="before")
            for line in ours
            if line.server == "ours"
        ]
    beside = "off, beside vLLM's own"
    peer = [
        Line(beside, "off", "none", False, beside),
        Line("vLLM's own", "vllm", "joined", False, beside),
    ]
    return [lines for lines in (ours, peer if "vllm" in variants else []) if lines]


def front_ends_of(modes: list[str]) -> list[Line]:
    """vLLM's front ends at its route for tokens: ours in Python, and the one in Rust, which has all
    rows at the end."""
    servers = {"off": ("off", "none")}
    servers |= {"returned": ("ours", "joined"), "at_end": ("ours", "joined")}  # as vLLM's there
    servers |= {"Rust: off": ("rust_off", "none"), "Rust: returned": ("rust", "joined")}
    return [
        Line(variant, *server, mode == "streamed", "off", to_generate=True)
        for mode in modes
        for variant, server in servers.items()
        if (variant, mode) != ("at_end", "unstreamed")
    ]


def fields_at_generate(line: Line) -> dict[str, Any]:
    """Those by which a request asks for rows at vLLM's route for tokens; the front end in Rust
    returns them to all."""
    if line.server != "ours":
        return {}
    return {"return_routed_experts": True, **MORE_FIELDS.get(line.variant, {})}


@dataclass
class RequestMaker:
    """Makes the requests of a line, with random prompts."""

    line: Line
    vocab: int
    rng: random.Random

    def make(
        self,
        role: str,
        at: float,
        prompt_len: int,
        new_tokens: int,
        *,
        stream: bool,
        choices: int = 1,
    ) -> Request:
        line = self.line
        return Request(
            at,
            role,
            [self.rng.randrange(self.vocab) for _ in range(prompt_len)],
            stream,
            Expected(prompt_len, new_tokens, choices, self._rows(stream)),
            apart=role in LONG_ROLES,
            to_generate=line.to_generate,
            more_fields=fields_at_generate(line) if line.to_generate else {},
        )

    def _rows(self, stream: bool) -> str:
        """What an answer brings. vLLM's own capture does not stream, but at its route for tokens."""
        line = self.line
        if line.rows == "joined" and stream and not line.to_generate:
            return "none"
        return line.rows


def requests_of(case: Case, line: Line, seed: int, vocab: int, routing: Routing) -> list[Request]:
    """The requests of one run; the same seed gives the same lengths, and prompts that no other seed
    gives."""
    maker = RequestMaker(line, vocab, random.Random(seed))
    requests = streams_of(case, maker)
    if case.long:
        requests.append(long_request(case, maker, routing))
        requests += others_of(case, maker)
    return requests


def streams_of(case: Case, maker: RequestMaker) -> list[Request]:
    """Beside a long request they are always streamed: their times are the figures."""
    is_streamed = maker.line.stream or case.long > 0
    return [
        maker.make(
            "stream",
            index * case.over / case.streams,
            case.prompt_len,
            new_tokens,
            stream=is_streamed,
            choices=case.choices,
        )
        for index, new_tokens in enumerate(lengths_of(case))
    ]


def lengths_of(case: Case) -> list[int]:
    """How many tokens each stream generates; the same in every run."""
    middle = case.new_tokens
    if not case.mixed:
        return [middle] * case.streams
    rng = random.Random(1)
    return [rng.randint(middle // 2, middle + middle // 2) for _ in range(case.streams)]


def long_request(case: Case, maker: RequestMaker, routing: Routing) -> Request:
    """The one with a long prompt, whose experts it says where the variant is `input`."""
    role = "says experts" if case.says_experts else "long"
    request = maker.make(role, case.long_at, case.long, 64, stream=maker.line.stream)
    if case.says_experts and maker.line.variant == "input":
        return replace(request, more_fields={REPLAY: given_rows(case.long, routing)})
    return request


def others_of(case: Case, maker: RequestMaker) -> list[Request]:
    """Short ones that come while the long one is served."""
    return [
        maker.make("other", case.long_at + index * case.gap, 16, 2, stream=True)
        for index in range(case.others)
    ]


def given_rows(num_tokens: int, routing: Routing) -> dict[str, Any]:
    """Random experts for so many tokens, as a request in MessagePack gives them."""
    shape = (num_tokens, routing.layers, routing.top_k)
    first = np.random.default_rng(0).integers(0, routing.num_experts, (*shape[:2], 1))
    rows = (first + np.arange(routing.top_k)) % routing.num_experts
    data = rows.astype("<i2").tobytes()
    return {"data": data, "shape": list(shape), "dtype": "int16", "start": 0}


def figures(load: Load, stream: bool) -> dict[str, Any]:
    """The figures of a run, times in milliseconds; without streaming there are none of single
    tokens."""
    results = load.results
    answers = [result.answer for result in results]
    tokens = sum(result.expected.new_tokens * result.expected.choices for result in results)
    began = min(result.sent for result in results)
    ended = max(answer.last for answer in answers)
    durations = [result.answer.last - result.sent for result in results]
    run: dict[str, Any] = {
        "tokens_per_s": tokens / (ended - began),
        "answer_p50_ms": 1e3 * float(np.median(durations)),
        "cpu_us": 1e6 * load.api_cpu / tokens,
        "bytes": sum(answer.size for answer in answers) / tokens,
        "rows": sum(answer.rows for answer in answers),
        "client_busy": load.busy,
        "faults": [answer.fault for answer in answers if answer.fault],
    }
    window = window_of(results, stream)
    return {
        **run,
        **percentiles("ttft", first_tokens(results, window)),
        **percentiles("itl", gaps(results, window)),
    }


class Window(NamedTuple):
    """When times of single tokens count, and of which requests the first."""

    low: float
    high: float
    role: str


def window_of(results: Sequence[Result], stream: bool) -> Window:
    """Around the answer of the long request, or from when one was sent that may say experts; the
    whole run without one."""
    for result in results:
        if result.role == "says experts":
            return Window(result.sent, result.answer.first, "other")
        if result.role == "long":
            low = result.answer.first - (0 if stream else WINDOW_S / 2)
            return Window(low, low + WINDOW_S, "other")
    return Window(-np.inf, np.inf, "stream")


def first_tokens(results: Sequence[Result], window: Window) -> list[float]:
    """After how many seconds the first token came of each request that was sent in the window."""
    seconds = []
    for result in results:
        times = result.answer.tokens
        is_in_window = result.role == window.role and window.low <= result.sent < window.high
        if is_in_window and times and all(times):
            seconds.append(min(map(min, times)) - result.sent)
    return seconds


def gaps(results: Sequence[Result], window: Window) -> list[float]:
    """The seconds between two tokens of a stream that both came in the window."""
    seconds = []
    streams = [result.answer.tokens for result in results if result.role == "stream"]
    for times in chain.from_iterable(streams):
        for earlier, later in pairwise(times):
            if window.low <= earlier and later < window.high:
                seconds.append(later - earlier)
    return seconds


def percentiles(name: str, seconds: list[float]) -> dict[str, float | None]:
    by_name: dict[str, float | None] = {}
    for key, percent in (("p50", 50), ("p99", 99), ("max", 100)):
        milliseconds = 1e3 * float(np.percentile(seconds, percent)) if seconds else None
        by_name[f"{name}_{key}_ms"] = milliseconds
    return by_name


class Bench:
    """The benchmark's servers, clients and results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.out: Path = args.out or Path(tempfile.mkdtemp())
        self.out.mkdir(parents=True, exist_ok=True)
        self._config = {
            **(QWEN3_30B_A3B if args.device == "cuda" else TINY),
            "num_hidden_layers": args.layers,
        }
        self._routing = Routing(
            args.layers, self._config["num_experts_per_tok"], self._config["num_experts"]
        )
        self._model = Path(tempfile.mkdtemp()) / "model"
        self._servers: dict[str, Server] = {}
        self._clients = Clients(args.clients)
        self._runs: list[Run] = []
        self._seed = 0
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
        self._gpus = visible.split(",") if args.device == "cuda" else []
        self._about = commit_and_device(args.device, args.commit)

    @property
    def slots(self) -> int:
        """How many tokens the KV cache of a server holds."""
        if self._args.without_engine is not None:
            return PLAYED_SLOTS
        return int(self._args.kv_cache_bytes // kv_bytes(self._config))

    def run(self, cases: list[Case]) -> list[Run]:
        """All runs of all lines; the table and the raw results are written as they come."""
        args = self._args
        write_model(self._model, self._config)
        try:
            every = lines_of(args.variants, args.modes, has_before=args.before is not None)
            for lines in [front_ends_of(args.modes)] if args.rust else every:
                self._serve(list(dict.fromkeys(line.server for line in lines)), cases)
                for case in cases:
                    self._turns(case, lines)
        finally:
            for server in self._servers.values():
                server.stop()
            self._clients.stop()
        return self._runs

    def _serve(self, variants: list[str], cases: list[Case]) -> None:
        """Has just these servers run: at most two fit on a GPU."""
        for variant in [variant for variant in self._servers if variant not in variants]:
            self._servers.pop(variant).stop()
        flags = self._flags(cases)
        started = [variant for variant in variants if variant not in self._servers]
        for variant in started:
            self._servers[variant] = self._start(variant, flags)
        for variant in started:
            say(f"Starting the server of {variant}; its log is {self._servers[variant].log}.")
            self._servers[variant].wait_until_healthy()
            if self._args.device == "cuda":
                self._warm_up(self._servers[variant])

    def _flags(self, cases: list[Case]) -> list[str]:
        """Of all servers: with them, each of the cases fits."""
        longest = max(max(case.prompt_len + 2 * case.new_tokens, case.long + 64) for case in cases)
        most = max(case.streams * case.choices for case in cases)
        flags = [*CPU_FLAGS, "--max-num-batched-tokens", "2048"]
        if self._args.device == "cuda":
            longest = max(longest, _ODD_SIZES[-1])
            flags = [*GPU_FLAGS, "--max-num-batched-tokens", "8192"]
        flags += ["--max-model-len", str(longest + 64), "--max-num-seqs", str(max(most, 256))]
        if self._args.rust:
            flags.append("--enable-scale-out")
        flags += ["--kv-cache-memory-bytes", str(self._args.kv_cache_bytes)]
        return [*flags, *self._args.serve]

    def _start(self, variant: str, flags: list[str]) -> Server:
        """The server of a variant, on the next GPU if there are several."""
        args = self._args
        gpu = self._gpus[len(self._servers) % args.gpus] if args.gpus > 1 else None
        apart = self._gpus[:2] if args.prefill_decode else None
        return start(
            variant,
            self._model,
            flags,
            self.out / f"{variant}.log",
            args.api_servers,
            gpu,
            apart,
            front_end=args.rust or "",
            tree=args.before if variant == "before" else None,
        )

    def _warm_up(self, server: Server) -> None:
        """Prompts of odd lengths, one after the other: vLLM's MoE kernel is compiled for each kind
        of size that it meets, which takes more than a second, in the middle of a run if nobody met
        it before."""
        rng, vocab = random.Random(0), self._config["vocab_size"]
        requests = [
            Request(
                0.5 * index,
                "other",
                [rng.randrange(vocab) for _ in range(size)],
                False,
                Expected(size, 2, 1, "none"),
            )
            for index, size in enumerate(_ODD_SIZES)
        ]
        self._clients.run(server, requests, self._routing, TOKEN_CHARS)

    def _turns(self, case: Case, lines: list[Line]) -> None:
        """Every line of a case in turns, after a warm-up."""
        lines = [line for line in lines if line.mode in case.modes]
        short = replace(case, new_tokens=8, others=min(case.others, 10), long_at=0.1)
        for line in {(line.server, line.stream): line for line in lines}.values():
            self._once(short, line)
        with tqdm(
            total=self._args.repeats * len(lines), desc=case.name, unit=" runs", disable=None
        ) as bar:
            for repeat in range(self._args.repeats):
                for line in lines if repeat % 2 == 0 else lines[::-1]:
                    self._measure(case, line, repeat)
                    bar.update()
                (self.out / "table.md").write_text(table(self._runs))
        if self._args.spy:
            for line in lines:
                self._spy_on(case, line)

    def _measure(self, case: Case, line: Line, repeat: int) -> None:
        run = self._once(case, line)
        common = {
            "case": case.name,
            "variant": line.variant,
            "baseline": line.baseline,
            "repeat": repeat,
        }
        common |= {"mode": line.mode, "api_servers": self._args.api_servers}
        self._runs.append({**common, **run, **self._about})
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(self._runs[-1]) + "\n")
        # a run that is ended from outside leaves what it has measured
        if len(self._runs) == 1:
            print(HEAD, flush=True)
        print(row_of(self._runs[-1]), flush=True)

    def _spy_on(self, case: Case, line: Line) -> None:
        """One more run, whose figures do not count."""
        (pid,) = self._servers[line.server].api_pids()
        file = spy.file_of(self.out, case.name, line.mode, line.variant)
        with spy.recorded(self._args.spy, pid, file):
            self._once(case, line)

    def _once(self, case: Case, line: Line) -> dict[str, Any]:
        self._seed += 1
        vocab = self._config["vocab_size"]
        requests = requests_of(case, line, self._seed, vocab, self._routing)
        server = self._servers[line.server]
        loaded = server.loaded_tokens()
        load = self._clients.run(server, requests, self._routing, TOKEN_CHARS)
        run = figures(load, line.stream)
        loaded, prompts = (
            server.loaded_tokens() - loaded,
            sum(len(request.prompt) for request in requests),
        )
        if server.apart and loaded < prompts:
            run["faults"].append(
                f"the decode server loaded KV of {loaded} of {prompts} prompt tokens"
            )
        for fault in run["faults"][:3]:
            print(f"{case.name}, {line.variant}: {fault}", file=sys.stderr, flush=True)
        return run


def main() -> None:
    args = parse()
    # so that the servers end too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    if args.without_engine is not None:
        play_the_engine(args)
    named = cases_named(args.cases)
    bench = Bench(args)
    for name, case in named:
        if case.slots > bench.slots:
            print(
                f"{name} does not fit the KV cache at once: see --kv-cache-bytes and --gpus",
                file=sys.stderr,
            )
    fitting = [case for case in CASES if case.slots <= bench.slots]
    runs = bench.run([case for _, case in named] or fitting)
    print(f"\n{table(runs)}")
    if args.spy:
        print(spy.tables(bench.out))
    if any(run["faults"] for run in runs):
        raise SystemExit("answers were not what they must be: see the column of faults")


def play_the_engine(args: argparse.Namespace) -> None:
    """Has the servers run without an engine."""
    args.serve = ["--distributed-executor-backend", PLAYED, *args.serve]
    os.environ[PLAYED_STEP_MS] = str(args.without_engine)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )


def cases_named(names: list[str]) -> list[tuple[str, Case]]:
    """Cases with their names; `CASE:MODE` names one in one mode. Raises `SystemExit` for another name."""
    every = {case.name: case for case in CASES}
    every |= {
        f"{case.name}:{mode}": replace(case, modes=(mode,)) for case in CASES for mode in MODES
    }
    unknown = set(names) - set(every)
    if unknown:
        raise SystemExit(
            f"no such case: {sorted(unknown)}; there are {[case.name for case in CASES]}"
        )
    return [(name, every[name]) for name in names]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[],
        metavar="CASE[:MODE]",
        help="by default all whose KV cache fits",
    )
    parser.add_argument("--variants", nargs="+", default=["off", "captured", "returned"])
    parser.add_argument("--modes", nargs="+", default=MODES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--api-servers", type=int, default=1, help="processes that answer HTTP, for each server"
    )
    parser.add_argument("--clients", type=int, default=None, help="client processes: 4, on a CPU 2")
    parser.add_argument(
        "--gpus", type=int, default=1, help="with more than one, each server has one for itself"
    )
    parser.add_argument(
        "--prefill-decode",
        action="store_true",
        help="each variant is examples/prefill_decode.py: a proxy, and two servers on the first two GPUs",
    )
    parser.add_argument(
        "--without-engine",
        type=float,
        metavar="MS",
        help="no model runs: steps of so many milliseconds are played, and the API process is all that is measured; "
        "with --prefill-decode also what hands prompts over, while loading KV takes no time",
    )
    parser.add_argument(
        "--rust",
        metavar="VLLM_RS",
        help="vLLM's front end in Rust (this program, of 0.33 or later) beside ours, at vLLM's route for tokens",
    )
    parser.add_argument(
        "--before",
        type=Path,
        metavar="TREE",
        help="another version of this repository: its server takes turns with ours",
    )
    parser.add_argument(
        "--spy",
        default="",
        metavar="PY_SPY",
        help="this program samples the API process in one more run of each line; with one API process",
    )
    parser.add_argument("--layers", type=int, default=48, help="fewer for a rehearsal")
    parser.add_argument(
        "--kv-cache-bytes", type=int, default=None, help="9.1 GiB, so that two servers fit 140 GB"
    )
    parser.add_argument(
        "--serve",
        nargs=argparse.REMAINDER,
        default=[],
        help="more flags of vllm serve; the last option",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="folder for results.jsonl, table.md and the servers' logs",
    )
    parser.add_argument("--commit", default=None, help="what is measured, where git does not say")
    args = parser.parse_args()
    args.clients = args.clients or (4 if args.device == "cuda" else 2)
    args.kv_cache_bytes = args.kv_cache_bytes or (
        9771050598 if args.device == "cuda" else 512 << 20
    )
    variants = ["off", "captured", "returned", "narrow", "at_end", "reference", "recorded"]
    variants += ["input", "vllm"]
    for name, known in (("variants", variants), ("modes", MODES)):
        if set(getattr(args, name)) - set(known):
            parser.error(f"--{name}: choose from {known}")
    if args.spy and args.api_servers > 1:
        parser.error("--spy samples one API process: leave --api-servers out")
    return args


if __name__ == "__main__":
    main()
