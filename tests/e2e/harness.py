"""A real server in a process of its own, an oracle that shares no code with it, and what every
answer must satisfy."""

import asyncio
import base64
import copy
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import orjson
import torch
import vllm
from transformers import AutoModelForCausalLM

from routed_experts.capture.engine.versions import INSTALLED_VLLM
from routed_experts.protocol.fetch import fetch
from routed_experts.server.http.seams import HAS_SCALE_OUT_FLAG
from tests import programs

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 420
SHOWN_CHARS = 3000
"""Of the log of a server that does not start."""
ON_GPU = torch.cuda.is_available()
# float32 throughout, so that no rounding decides which expert is chosen: on a GPU that takes
# kernels that can do it, and Triton's products in full precision. There the engine compiles and
# captures its graphs, as it would in earnest.
FLOAT32: tuple[str, ...] = ("--dtype", "float32")
FLOAT32 += (
    ("--attention-backend", "TRITON_ATTN", "--moe-backend", "triton")
    if ON_GPU
    else ("--enforce-eager",)
)
SMALL_KV = (*FLOAT32, "--kv-cache-memory-bytes", str(8 << 20))
# Only held against what others have left free: the KV cache has a size of its own.
SMALL_KV += ("--gpu-memory-utilization", "0.3") if ON_GPU else ()
# On a CPU, vLLM gives an engine a process for its worker beside its own, and both wait for each
# other in busy loops.
ONE_PROCESS = (
    ()
    if ON_GPU
    else ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
)
FULL_PRECISION = {"TRITON_F32_DEFAULT": "ieee"}
# Chunks and blocks much smaller than the defaults, so that short prompts cross both.
SERVER_FLAGS = (*SMALL_KV, "--block-size", "32", "--max-num-batched-tokens", "64")
SERVER_FLAGS += ("--max-num-seqs", "16", "--max-model-len", "512")
# KV for few requests at once, and the routers' weights.
FEW_BLOCKS = (*SERVER_FLAGS, *ONE_PROCESS, "--num-gpu-blocks-override", "28")
FEW_BLOCKS += ("--enable-prompt-tokens-details", "--enable-return-routed-expert-weights")
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 8 << 20,
    "max_model_len": 512,
}
"""The same for the engines of programs."""
if ON_GPU:
    OPTIONS |= {
        "attention_backend": "TRITON_ATTN",
        "moe_backend": "triton",
        "gpu_memory_utilization": 0.3,
    }
else:
    OPTIONS["enforce_eager"] = True
OURS = "routed_experts.server.cli"
ASYNC = OURS if ON_GPU else "tests.e2e.async_on_cpu"
"""The module that runs a server with asynchronous scheduling, which vLLM switches off on a CPU."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASK: dict[str, Any] = {"return_routed_experts": True, "return_token_ids": True}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
WEIGHTS_OFF = 3e-5 if ON_GPU else 1e-5
"""What two computations of a weight in float32 seldom differ by."""
MOST_WEIGHTS_OFF = 3e-5
"""What one in float32 may differ from one in float64 by: of a million, 1.4e-5 was seen. The tests of
the oracle show that 1e-4 is found."""
DRAFTS = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")


def prompt_of(length: int, seed: int) -> list[int]:
    """Printable token ids that a seed decides."""
    rng = random.Random(seed)
    return [rng.randrange(33, 120) for _ in range(length)]


# ---- servers ----


@dataclass
class Server:
    """`routed-experts serve` in a process group of its own, which is all that `stop` ends."""

    model: Path
    url: str
    process: programs.Process
    log: Path

    def client(self) -> httpx.Client:
        # Without TLS there is nothing to verify, and reading the certificates takes longer than
        # most requests. A connection that is used again may be one that the server is closing, as
        # it does after 5 seconds.
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.Client(base_url=self.url, timeout=300, verify=False, limits=limits)

    def complete(self, **body: Any) -> dict[str, Any]:
        return self._post(COMPLETIONS, body)

    def chat(self, **body: Any) -> dict[str, Any]:
        return self._post(CHAT, body)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self.post(path, {"model": "tiny", "temperature": 0, **body})

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        with self.client() as client:
            response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        return orjson.loads(response.content) if response.content else None

    def stream(self, path: str = COMPLETIONS, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed answer, in order, `[DONE]` checked and left out."""
        payload = {"model": "tiny", "temperature": 0, **body, "stream": True}
        with self.client() as client, client.stream("POST", path, json=payload) as response:
            assert response.status_code == 200, response.read()
            return list(read_events(response.iter_lines()))

    def info(self) -> dict[str, Any]:
        with self.client() as client:
            return client.get("/v1/routed_experts").json()

    def profile(self) -> dict[str, Any]:
        """That of the experts, with its arrays decoded: `counts`, and `weights`, None if they are not captured."""
        with self.client() as client:
            answer: dict[str, Any] = client.get("/v1/routed_experts/profile").json()
        arrays = {name: unpacked(answer[name]) for name in ("counts", "weights") if answer[name]}
        return answer | arrays

    def is_async(self) -> bool:
        """Whether its scheduling is asynchronous; it has to run with `VLLM_SERVER_DEV_MODE`."""
        with self.client() as client:
            config = client.get("/server_info?config_format=json").json()["vllm_config"]
        return config["scheduler_config"]["async_scheduling"] is True

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a Prometheus counter or gauge over the labels that are not given."""
        with self.client() as client:
            lines = client.get("/metrics").raise_for_status().text.splitlines()
        wanted_labels = [f'{label}="{value}"' for label, value in labels.items()]
        samples = [line for line in lines if line.startswith((name + "{", name + " "))]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in samples
            if all(label in line for label in wanted_labels)
        )

    def state_left(self) -> dict[str, float]:
        """How much of requests' state the server says that it holds."""
        return {
            name: self.metric(f"routed_experts_{name}")
            for name in ("requests_tracked", "buffers_open")
        }

    def errors(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if " ERROR " in line]

    def stop(self) -> int:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def wait_until_healthy(self, beside: Sequence["Server"] = ()) -> None:
        deadline = time.monotonic() + START_LIMIT_S  # clock: minutes
        needed = (self, *beside)
        while time.monotonic() < deadline:  # clock: minutes
            if any(one.process.poll() is not None for one in needed):
                break
            with suppress(httpx.TransportError), self.client() as client:
                if client.get("/health").status_code == 200:
                    return
            time.sleep(0.3)
        logs = "\n\n".join(one.log.read_text()[-SHOWN_CHARS:] for one in needed)
        raise AssertionError(f"the server did not start:\n{logs}")


def read_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON of server-sent events up to `[DONE]`, which must be the last."""
    done = False
    for line in filter(None, lines):
        assert not done, f"after [DONE]: {line}"
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            done = True
        else:
            yield orjson.loads(line[len("data: ") :])
    assert done, "no [DONE]"


_reserved: deque[list[socket.socket]] = deque()
_NUM_RESERVED = 50
"""Servers that a process of the tests may start before the first of them has taken its port."""


def free_port(*beside: int) -> int:
    """One that the system gives to no client, and no other process of the tests takes: half a
    minute goes by until a server does. `beside` are the distances of other ports that it takes as
    well.

    What is reserved is a name, as vLLM holds its port for long before anybody else can see that.
    """
    while len(_reserved) >= _NUM_RESERVED:
        for sock in _reserved.popleft():
            sock.close()
    while True:
        port, held = random.SystemRandom().randrange(20_000, 30_000), list[socket.socket]()
        try:
            for candidate in (port, *(port + distance for distance in beside)):
                held.append(socket.socket(socket.AF_UNIX))
                held[-1].bind(f"\0port {candidate} of the tests")
                with socket.socket() as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    sock.bind(("127.0.0.1", candidate))
        except OSError:
            for sock in held:
                sock.close()
        else:
            _reserved.append(held)
            return port


def start(
    model: Path,
    log: Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
    module: str = OURS,
    as_users_do: bool = False,
    python: str = sys.executable,
) -> programs.Process:
    """`routed-experts serve`, or that of another `module`, in a process group of its own."""
    assert {"--port", "--uds", "--headless"} & {*flags}, (
        "on vLLM's default port may be a server that is no test's"
    )
    arguments = ["-m", module, "serve", str(model), "--served-model-name", "tiny", *flags]
    every = {**os.environ, **FULL_PRECISION, **(env or {})}
    with log.open("wb") as out:
        return programs.start(
            arguments, out.fileno(), env=every, as_users_do=as_users_do, python=python
        )


@contextmanager
def serving(
    model: Path, log: Path, *flags: str, beside: Sequence[Server] = (), **process: Any
) -> Iterator[Server]:
    """A running server for `model`; `flags` are those of `routed-experts serve`.

    It does not start without those `beside` it.
    """
    port = free_port()
    address = ("--host", "127.0.0.1", "--port", str(port))
    server = Server(
        model, f"http://127.0.0.1:{port}", start(model, log, *address, *flags, **process), log
    )
    try:
        server.wait_until_healthy(beside)
        yield server
    finally:
        server.stop()


@contextmanager
def serving_what_provokes_most(model: Path, log: Path) -> Iterator[Server]:
    """A server with asynchronous scheduling, KV blocks for few requests at once, and the routers'
    weights."""
    flags = (*FEW_BLOCKS, "--async-scheduling", "--enable-auto-tool-choice")
    flags += ("--tool-call-parser", "hermes")
    flags += ("--enable-scale-out",) if HAS_SCALE_OUT_FLAG else ()
    env = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache and /abort_requests
    with serving(model, log, *flags, module=ASYNC, env=env) as running:
        assert running.is_async()
        yield running


@contextmanager
def headless(model: Path, log: Path, *flags: str, **process: Any) -> Iterator[Server]:
    """A node that runs a part of the engine of a server elsewhere, and answers nobody."""
    node = Server(model, "", start(model, log, "--headless", *flags, **process), log)
    try:
        yield node
    finally:
        node.stop()


def run_program(*arguments: str, env: Mapping[str, str] | None = None, limit_s: float = 500) -> str:
    """What `python -m` with these arguments prints, which must end well."""
    every = {**os.environ, **(env or {})}
    done = programs.run(["-m", *arguments], env=every, cwd=ROOT, timeout=limit_s, check=True)
    return done.stdout


def counts_of(*arguments: str, **options: Any) -> dict[str, int]:
    """What a program counted, in a line of JSON among what it prints: vLLM may log more at its
    end."""
    (counted,) = (
        line for line in run_program(*arguments, **options).splitlines() if line.startswith("{")
    )
    counts: dict[str, int] = json.loads(counted)
    print(counts)
    return counts


def wait_until(
    condition: Callable[[], Any], fails: Callable[[], Any] | str, limit_s: float = 240
) -> None:
    """Until the condition holds; `fails` says what is wrong if that takes too long."""
    deadline = time.monotonic() + limit_s  # clock: a minute or more
    while not condition():
        is_late = time.monotonic() > deadline  # clock: a minute or more
        assert not is_late, fails if isinstance(fails, str) else fails()
        time.sleep(0.02)


def wait_until_idle(server: Server) -> None:
    wait_until(
        lambda: not any(server.state_left().values()),
        lambda: f"state is left: {server.state_left()}",
    )


def commands_in_session(server: Server) -> list[str]:
    """The command lines of what runs in the session of a server, which Ray's processes stay in
    too."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, _, session = (process / "stat").read_text().rpartition(") ")[2].split()[:4]
            if int(session) == server.process.pid and state != "Z":
                commands.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return commands


def wait_until_gone(server: Server) -> None:
    """Until nothing is left of a server that has been told to end."""
    wait_until(
        lambda: not commands_in_session(server),
        lambda: f"left behind: {commands_in_session(server)}",
    )


# ---- the oracle ----


class Wrong(NamedTuple):
    """One layer of a row that is not the oracle's."""

    position: int
    layer: int  # among the MoE layers
    got: list[int]  # the chosen experts in ascending order
    expected: list[int]
    gap: float  # the score of the K-th expert less that of the next one, in float64
    rounding: float  # the most that a score of float32 is off

    @property
    def is_undecidable(self) -> bool:
        """Whether float32 may as well choose this: one expert for another, closer together than two
        scores are off."""
        return self.gap < 2 * self.rounding and len(set(self.got) - set(self.expected)) == 1


class Oracle:
    """The experts that a Hugging Face forward pass of the same weights chooses for the same
    tokens."""

    def __init__(self, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.top_k = int(self.model.config.num_experts_per_tok)
        # answers in which float32 differed and float64 decided, or could not
        self.decided = self.undecidable = 0
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    @cached_property
    def exact(self) -> torch.nn.Module:
        """The same model in float64."""
        model = copy.deepcopy(self.model).double()
        model.set_experts_implementation("eager")  # the faster ones have no float64
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(_rms_norm, module)  # theirs computes in float32
        return model

    def logits(self, tokens: Sequence[int], exact: bool = False) -> np.ndarray:
        """Router scores [tokens, L, experts]."""
        with torch.no_grad():
            model = self.exact if exact else self.model
            output = model(torch.tensor([list(tokens)]), output_router_logits=True, use_cache=False)
        return scores_of(output)

    def rows(self, tokens: Sequence[int]) -> np.ndarray:
        """[tokens, L, K], the chosen experts in ascending order."""
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = self._chosen(self.logits(tokens))
        return self._known[key]

    def wrong(self, rows: np.ndarray, tokens: Sequence[int], start: int = 0) -> list[Wrong]:
        """Where `rows` [tokens - start, L, K], their experts in any order, are not what the model
        chooses for `tokens`.

        A row that is not that of the model in float32 must be that of the same model in float64,
        but for what no model in float32 can decide (docs/support.md, Near-ties).
        """
        assert len(rows) == len(tokens) - start
        rows = np.sort(rows, axis=2)
        if np.array_equal(rows, self.rows(tokens)[start:]):
            return []
        exact = self.logits(tokens, exact=True)[start:]
        rounding = np.abs(self.logits(tokens)[start:] - exact).max(axis=2)
        ordered = -np.sort(-exact, axis=2)
        gaps = ordered[:, :, self.top_k - 1] - ordered[:, :, self.top_k]
        differing = differences(rows, self._chosen(exact), start, gaps, rounding)
        wrong = [one for one in differing if not one.is_undecidable]
        if not wrong:
            self.decided += not differing
            self.undecidable += bool(differing)
        return wrong

    def weights(
        self, rows: np.ndarray, tokens: Sequence[int], start: int = 0, exact: bool = False
    ) -> np.ndarray:
        """The router's weights of the experts in `rows`, in their order: the softmax over the
        chosen scores."""
        scores = torch.from_numpy(self.logits(tokens, exact)[start:]).double()
        return scores.gather(2, torch.from_numpy(rows.astype(np.int64))).softmax(2).numpy()

    def _chosen(self, scores: np.ndarray) -> np.ndarray:
        return np.sort(np.argsort(-scores, axis=2)[:, :, : self.top_k], axis=2).astype(np.int16)


def differences(
    rows: np.ndarray, expected: np.ndarray, start: int, gaps: np.ndarray, rounding: np.ndarray
) -> list[Wrong]:
    """Where sorted rows are not the expected ones."""
    return [
        Wrong(
            *(
                int(row) + start,
                int(layer),
                rows[row, layer].tolist(),
                expected[row, layer].tolist(),
            ),
            *(float(gaps[row, layer]), float(rounding[row, layer])),
        )
        for row, layer in np.argwhere((rows != expected).any(axis=2))
    ]


def scores_of(output: Any) -> np.ndarray:
    """Router scores [tokens, L, experts] of a forward pass of one sequence."""
    return torch.stack(
        [layer.reshape(-1, layer.shape[-1]) for layer in output.router_logits], dim=1
    ).numpy()


def _rms_norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module.weight * (
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    )


# ---- answers ----


def unpacked(array: dict[str, Any]) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(array["data"]), dtype=array["dtype"])
    return flat.reshape(array["shape"])


def decode(array: dict[str, Any]) -> np.ndarray:
    """The decoder of the documentation, written out again: the oracle must not use the code under
    test."""
    rows = unpacked(array)
    unknown = np.isnan(rows) if rows.dtype == np.float32 else rows == -1
    assert array["missing"] == int(unknown.any(axis=(1, 2)).sum())
    return rows


@dataclass
class Answer:
    """One choice, from a streamed or an unstreamed response, with all that belongs to it."""

    prompt: list[int]  # token ids
    tokens: list[int]  # the generated ones
    start: int  # first position that the request asked for
    prompt_rows: np.ndarray  # as received
    rows: np.ndarray  # from the prompt's end on
    text: str = ""
    finish_reason: str | None = None


NO_ROWS = np.empty((0, 1, 1), np.int16)


def rows_of(answer: Answer) -> np.ndarray:
    """From its first position on."""
    return np.concatenate([answer.prompt_rows, answer.rows])


def check(answer: Answer, oracle: Oracle, num_experts: int = 16) -> None:
    """The invariants of every answer, and equality with the oracle in every row."""
    p, g = len(answer.prompt), len(answer.tokens)
    assert g >= 1
    assert answer.prompt_rows.shape[0] == p - answer.start
    assert answer.rows.shape[0] == g - 1
    rows = rows_of(answer)
    assert rows.min(initial=0) >= 0
    assert rows.max(initial=0) < num_experts
    ordered = np.sort(rows, axis=2)
    assert (ordered[:, :, 1:] != ordered[:, :, :-1]).all(), "an expert twice in a row"
    tokens = [*answer.prompt, *answer.tokens[:-1]]
    wrong = oracle.wrong(rows, tokens, answer.start)
    assert not wrong, (
        f"{len(wrong)} layers of rows are not the oracle's, such as {wrong[:3]}, of tokens {tokens}"
    )


def check_weights(
    weights: np.ndarray, rows: np.ndarray, tokens: Sequence[int], oracle: Oracle, start: int = 0
) -> float:
    """That `weights` are those of the experts in `rows`; returns the largest difference to the
    model in float32.

    If that is `WEIGHTS_OFF` or more, float64 decides: a weight may be off by what scores of float32
    are off. They move it by half of that at most, but those of the engine are off, too.

    Where a row has another expert than the oracle, which `check` lets pass for a near-tie alone,
    the layers behind it compute with another output than the oracle, at this token and at those
    that attend to it: their weights are not compared.
    """
    assert (weights.dtype, weights.shape) == (np.float32, rows.shape)
    assert np.isfinite(weights).all()
    assert np.abs(weights.sum(axis=2, dtype=np.float64) - 1).max(initial=0) < 1e-5
    off = float(np.abs(weights - oracle.weights(rows, tokens, start)).max(initial=0))
    if off >= WEIGHTS_OFF:
        rounding = np.abs(oracle.logits(tokens) - oracle.logits(tokens, exact=True))[start:].max(
            axis=2, keepdims=True
        )
        from_exact = np.abs(weights - oracle.weights(rows, tokens, start, exact=True))
        is_wrong = from_exact >= np.maximum(rounding, MOST_WEIGHTS_OFF)
        is_wrong &= ~follows_another_expert(rows, oracle.rows(tokens)[start:])[:, :, None]
        wrong = np.argwhere(is_wrong)
        assert len(wrong) == 0, (
            f"{len(wrong)} weights are off, by up to {from_exact.max()}, as at {wrong[:3].tolist()}"
        )
    return off


def follows_another_expert(rows: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """[tokens, L]: whether an earlier layer, of this token or of one before it, has other experts
    than expected."""
    differs = (np.sort(rows, axis=2) != expected).any(axis=2)
    so_far = np.logical_or.accumulate(np.logical_or.accumulate(differs, axis=0), axis=1)
    return np.concatenate([np.zeros_like(so_far[:, :1]), so_far[:, :-1]], axis=1)


def with_weights_as_rows(body: dict[str, Any]) -> dict[str, Any]:
    """A response or a chunk of one with the arrays of weights in place of those of ids, which they
    must be beside."""

    def replaced(holder: dict[str, Any]) -> dict[str, Any]:
        for name in ("routed_experts", "prompt_routed_experts"):
            assert (name in holder) == (name.replace("experts", "expert_weights") in holder), (
                f"only one of {name}"
            )
        weights = {
            name: value for name, value in holder.items() if not name.endswith("routed_experts")
        }
        return {name.replace("expert_weights", "experts"): value for name, value in weights.items()}

    return {**replaced(body), "choices": [replaced(choice) for choice in body["choices"]]}


def unknown(answer: Answer, oracle: Oracle) -> list[int]:
    """The positions whose rows are -1; all others must be the oracle's."""
    rows, tokens = rows_of(answer), [*answer.prompt, *answer.tokens[:-1]]
    are_unknown = (rows == -1).all(axis=(1, 2))
    rows[are_unknown] = oracle.rows(tokens)[are_unknown]
    assert oracle.wrong(rows, tokens) == []
    return np.flatnonzero(are_unknown).tolist()


def answers_of(response: dict[str, Any], start: int = 0) -> list[Answer]:
    """The choices of an unstreamed completion in the default form, asked for with
    `return_token_ids`."""
    prompts = response["prompt_routed_experts"]
    prompts = prompts if isinstance(prompts, list) else [prompts]
    per_prompt = len(response["choices"]) // len(prompts)
    answers = []
    for index, choice in enumerate(response["choices"]):
        prompt = choice.get("prompt_token_ids") or response["prompt_token_ids"]
        array, prompt_array = choice["routed_experts"], prompts[index // per_prompt]
        assert prompt_array["start"] == start
        assert array["start"] == len(prompt)
        answer = Answer(prompt, choice["token_ids"], start, rows_in(prompt_array), rows_in(array))
        answer.text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
        answer.finish_reason = choice["finish_reason"]
        answers.append(answer)
    return answers


def rows_in(array: dict[str, Any]) -> np.ndarray:
    """The rows of an array in the default form, or by reference in an answer that is `located`."""
    return (
        fetch(array, base_url=array["base_url"]).swapaxes(0, 1) if "url" in array else decode(array)
    )


def located(value: Any, base_url: str) -> Any:
    """An answer in which references also say where their server is."""
    if isinstance(value, list):
        return [located(item, base_url) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {name: located(item, base_url) for name, item in value.items()}
    is_reference = "url" in fields and "expires" in fields
    return {**fields, "base_url": base_url} if is_reference else fields


def answers_of_stream(
    chunks: list[dict[str, Any]], start: int = 0, per_prompt: int = 1, at_end: bool = False
) -> list[Answer]:
    """The choices of a streamed completion, checking on the way that each chunk carries the rows it
    should.

    Rows that take more than one line come in pieces, on chunks without tokens before the one that
    they belong to.

    Args:
        start: the position of the first row that was asked for.
        per_prompt: choices of each prompt.
        at_end: whether all rows come with the last chunk of each choice.
    """
    stream = _StreamedAnswers(start, per_prompt, at_end)
    for chunk in chunks:
        assert "error" not in chunk, chunk
        if chunk["choices"]:
            stream.add(chunk)
    return stream.answers()


class _StreamedAnswers:
    """The choices of a stream, as far as its chunks came."""

    def __init__(self, start: int, per_prompt: int, at_end: bool) -> None:
        self._start = start
        self._per_prompt = per_prompt
        self._at_end = at_end
        self._prompts: dict[int, np.ndarray] = {}  # rows, by the prompt's index in the request
        self._answers: dict[int, Answer] = {}  # by the choice's index
        self._first_positions: dict[int, int] = {}  # of the generated rows, by the choice's index

    def add(self, chunk: dict[str, Any]) -> None:
        (choice,) = chunk["choices"]
        index = choice["index"]
        prompt_index = index // self._per_prompt
        if "prompt_routed_experts" in chunk:
            self._add_prompt_rows(prompt_index, chunk["prompt_routed_experts"])
        assert self._at_end or prompt_index in self._prompts, (
            "the first chunk of a prompt has no prompt rows"
        )
        no_rows = self._prompts.get(prompt_index, NO_ROWS)[:0]
        answer = self._answers.setdefault(index, Answer([], [], self._start, no_rows, no_rows))
        prompt = choice.get("prompt_token_ids") or chunk.get("prompt_token_ids") or []
        answer.prompt = answer.prompt or prompt
        answer.tokens += choice.get("token_ids") or []
        answer.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        if "routed_experts" in choice:
            self._add_rows(index, choice["routed_experts"])
        self._check_number_of_rows(answer, has_tokens=bool(choice.get("token_ids")))

    def _add_prompt_rows(self, prompt_index: int, array: dict[str, Any]) -> None:
        rows = rows_in(array)
        before = self._prompts.get(prompt_index)
        num_before = 0 if before is None else len(before)
        assert array["start"] == self._start + num_before, "rows twice, or not in order"
        self._prompts[prompt_index] = rows if before is None else np.concatenate([before, rows])

    def _add_rows(self, index: int, array: dict[str, Any]) -> None:
        answer = self._answers[index]
        assert array["shape"][0] > 0 or "url" in array, "an empty array in a chunk"
        first_position = self._first_positions.setdefault(index, array["start"])
        assert array["start"] == first_position + len(answer.rows)
        rows = rows_in(array)
        answer.rows = np.concatenate([answer.rows, rows]) if len(answer.rows) else rows

    def _check_number_of_rows(self, answer: Answer, has_tokens: bool) -> None:
        """After a chunk, all rows that its tokens made known have come; pieces come before."""
        num_known = max(len(answer.tokens) - 1, 0)
        if self._at_end and answer.finish_reason is None:
            num_known = 0
        is_piece = not has_tokens and answer.finish_reason is None
        num_rows = len(answer.rows)
        assert num_rows == num_known or (is_piece and num_rows > num_known), (
            f"{num_rows} rows after {len(answer.tokens)} tokens"
        )

    def answers(self) -> list[Answer]:
        for index, answer in self._answers.items():
            answer.prompt_rows = self._prompts[index // self._per_prompt]
            if not len(answer.rows):
                answer.rows = answer.prompt_rows[:0]
            prompt_end = self._start + len(answer.prompt_rows)
            assert self._first_positions.get(index, prompt_end) == prompt_end
        return [self._answers[index] for index in sorted(self._answers)]


def answer_of(got: Any) -> Answer:
    """The only choice of an answer: the chunks of a streamed one, or a body."""
    (answer,) = answers_of_stream(got) if isinstance(got, list) else answers_of(got)
    return answer


def same(a: Answer, b: Answer) -> None:
    """Bit-equality of two answers to one request."""
    assert (a.prompt, a.tokens, a.text, a.finish_reason) == (
        b.prompt,
        b.tokens,
        b.text,
        b.finish_reason,
    )
    assert np.array_equal(a.prompt_rows, b.prompt_rows)
    assert np.array_equal(a.rows, b.rows)


def one(server: Server, start: int = 0, path: str = COMPLETIONS, **body: Any) -> Answer:
    """The single choice of a request, asked for both ways, which must agree bit for bit."""
    if start:
        body["routed_experts_prompt_start"] = start
    ask = server.complete if path == COMPLETIONS else server.chat
    (unstreamed,) = answers_of(ask(**ASK, **body), start)
    (streamed,) = answers_of_stream(server.stream(path, **ASK, **body), start)
    same(unstreamed, streamed)
    return unstreamed


def cached_tokens(response: dict[str, Any]) -> int:
    """Tokens of the prompt that were hit; the server has to run with
    `--enable-prompt-tokens-details`."""
    return (response["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def at_once(server: Server, bodies: list[dict[str, Any]]) -> list[Any]:
    """The answers to completions that run at the same time: chunks of the streamed ones, bodies of
    the others."""

    async def run(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
        payload = {"model": "tiny", "temperature": 0, **body, "stream": bool(body.get("stream"))}
        async with client.stream("POST", COMPLETIONS, json=payload) as response:
            assert response.status_code == 200, await response.aread()
            if not payload["stream"]:
                return orjson.loads(await response.aread())
            lines = [line async for line in response.aiter_lines()]
        return list(read_events(iter(lines)))

    async def run_all() -> list[Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300, verify=False) as client:
            return await asyncio.gather(*(run(client, body) for body in bodies))

    return asyncio.run(run_all())


def check_mix(server: Server, oracle: Oracle, seed: int) -> None:
    """Cold and warm, streamed and not, many at a time."""
    prompts = [[*prompt_of(70, seed=seed), *prompt_of(1 + 9 * i, seed=seed + i)] for i in range(12)]
    bodies = [{**ASK, "prompt": prompt, "max_tokens": 20} for prompt in prompts]
    cold, warm = (
        [
            *map(
                answer_of,
                at_once(
                    server, [{**body, "stream": i % 2 == turn} for i, body in enumerate(bodies)]
                ),
            )
        ]
        for turn in range(2)
    )
    for a, b in zip(cold, warm, strict=True):
        check(a, oracle)
        same(a, b)


def vllm_fails(server: Server, path: str, body: dict[str, Any]) -> bool:
    """Whether a vLLM older than the newest supported one fails a request by itself, without routed
    experts."""
    if vllm.__version__.split("+")[0] == INSTALLED_VLLM:
        return False
    plain = {name: value for name, value in body.items() if "routed_experts" not in name}
    with server.client() as client:
        return (
            client.post(path, json={"model": "tiny", **plain, "stream": False}).status_code >= 500
        )


def check_held_back(server: Server, oracle: Oracle, body: dict[str, Any]) -> list[dict[str, Any]]:
    """With token ids in every chunk, and as most clients ask: then a parser may keep whole chunks
    back."""
    (answer,) = answers_of_stream(server.stream(CHAT, **ASK, **body))
    check(answer, oracle)
    (other,) = answers_of(server.chat(**ASK, **body))
    assert other.tokens == answer.tokens
    assert np.array_equal(other.rows, answer.rows)
    chunks = server.stream(CHAT, return_routed_experts=True, **body)
    assert len(chunks) < len(answer.tokens)  # by how many depends on the reader too
    arrays = [
        choice["routed_experts"]
        for chunk in chunks
        for choice in chunk["choices"]
        if "routed_experts" in choice
    ]
    lengths = np.cumsum([0, *(array["shape"][0] for array in arrays[:-1])])
    assert [array["start"] for array in arrays] == (len(answer.prompt) + lengths).tolist()
    assert np.array_equal(np.concatenate([decode(array) for array in arrays]), answer.rows)
    assert sum("prompt_routed_experts" in chunk for chunk in chunks) == 1
    assert np.array_equal(decode(chunks[0]["prompt_routed_experts"]), answer.prompt_rows)
    return chunks
