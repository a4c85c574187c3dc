"""A seeded random mix of all that can share an engine, driven against a real server, every answer checked.

    python -m tests.e2e.torture --requests 5000 --profile async

Prints how often each situation really occurred, from vLLM's metrics and from what the clients saw, and fails if one
that the profile means to provoke did not occur, if a row is wrong or missing, or if the server holds state at the end.

Equality with the oracle is never loosened: what it says about near-ties holds, and too many of them fail the run.
"""

import argparse
import asyncio
import base64
import io
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import torch

from tests.e2e.harness import (
    ON_GPU,
    SMALL_KV,
    Answer,
    Oracle,
    Server,
    answers_of,
    answers_of_stream,
    check,
    decode,
    read_events,
    serving,
)
from tests.e2e.offload_on_cpu import kv_transfer_config

BLOCK_SIZE = 32
MAX_MODEL_LEN = 512
CONCURRENCY = 24
END_TOKEN = 258
FLAGS = (
    *(*SMALL_KV, "--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "28", "--max-num-batched-tokens", "64"),
    *("--max-num-seqs", "16", "--max-model-len", str(MAX_MODEL_LEN), "--enable-prompt-tokens-details"),
)
REQUESTS = int(os.environ.get("TORTURE_REQUESTS", "100"))
ENV = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache and /server_info
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "prefix hits, tokens": "vllm:prefix_cache_hits_total",
    "drafts proposed": "vllm:spec_decode_num_draft_tokens_total",
    "drafts accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "tokens loaded again": "vllm:external_prefix_cache_hits_total",
}
SITUATIONS = (
    *("opted in", "not opted in", "streamed", "not streamed", "chat", "preemptions"),
    *("prefix hits, requests", "prefix hits, tokens", "turns of a conversation", "repeated requests"),
    *("several choices", "choices that ended early", "lists of prompts", "echo"),
    *("start in a block", "start at P - 1", "start at P", "max_tokens 1", "min_tokens", "logit bias"),
    *("structured output", "ended by a stop string", "ended by a stop token", "ended by the end token"),
    *("form object", "form npy", "form raw", "form list", "layout joined", "stream_interval"),
    *("aborts before the first token", "aborts in mid-stream", "aborts unstreamed"),
    *("same id at once", "prefix cache resets", "resets with running requests"),
)


@dataclass(frozen=True)
class Profile:
    """An engine configuration, and which situations the mix must provoke in it beyond or unlike `SITUATIONS`.

    Attributes:
        module: runs the server.
        without: what vLLM cannot do in it.
    """

    flags: tuple[str, ...]
    async_scheduling: bool
    module: str = "routed_experts.server.cli"
    must: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def situations(self) -> tuple[str, ...]:
        return (*(name for name in SITUATIONS if name not in self.without), *self.must)


PROFILES = {
    "async": Profile(
        ("--async-scheduling",),
        async_scheduling=True,
        module="routed_experts.server.cli" if ON_GPU else "tests.e2e.async_on_cpu",
    ),
    "ngram": Profile(
        ("--speculative-config", json.dumps(NGRAM)),
        async_scheduling=False,
        must=("drafts accepted", "drafts rejected", "chunks with several tokens"),
        # vLLM 0.32 has no logit bias with drafts, and ends structured output with an error now and then ("grammar
        # rejected tokens"), without the capture too.
        without=("logit bias", "structured output"),
    ),
    "offload": Profile(
        ("--async-scheduling", "--kv-transfer-config", json.dumps(kv_transfer_config(6 << 20))),  # 60 blocks
        async_scheduling=True,
        module="routed_experts.server.cli" if ON_GPU else "tests.e2e.async_on_cpu",
        must=("tokens loaded again", "resets of what was offloaded"),
        # vLLM 0.32 cannot preempt requests by a reset while others are loaded.
        without=("resets with running requests", "prefix cache resets"),
    ),
}


_NPY_HEADERS = threading.Lock()  # until Python 3.11 is left, see protocol/codec.py
TIES = "answers that float32 cannot decide"


@dataclass(frozen=True)
class Known:
    """A sequence that was answered, with the rows of the positions from `first` on."""

    tokens: list[int]
    first: int
    rows: np.ndarray

    @classmethod
    def of(cls, answer: Answer) -> "Known":
        return cls([*answer.prompt, *answer.tokens], answer.start, np.concatenate([answer.prompt_rows, answer.rows]))


@dataclass
class Task:
    """One request of the mix.

    Attributes:
        prompts: token ids of each prompt; empty for chat, whose answer says them.
        earlier: an answer whose rows must come back bit for bit as far as the tokens are the same.
        leave_after_s, leave_after_chunks: when the client goes away, if it does.
    """

    path: str
    body: dict[str, Any]
    prompts: list[list[int]]
    headers: dict[str, str] = field(default_factory=dict)
    opted_in: bool = True
    start: int = 0
    n: int = 1
    form: str = "object"
    layout: str = "split"
    earlier: Known | None = None
    leave_after_s: float | None = None
    leave_after_chunks: int | None = None

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


class Mix:
    """Makes the requests. The same seed makes the same choices, but answers to build on come as they come."""

    def __init__(self, seed: int, counts: Counter[str], profile: Profile) -> None:
        self._seed = seed
        self._profile = profile
        self._counts = counts
        rng = random.Random(seed)
        self._prefixes = [self._tokens(rng, length) for length in (64, 100, 150, 200)]
        self._chat_prefixes = ["".join(map(chr, self._tokens(rng, length))) for length in (60, 120)]
        self.answered: deque[Known] = deque(maxlen=16)
        self.repeatable: deque[tuple[Task, Known]] = deque(maxlen=16)

    def make(self, index: int) -> Task:
        rng = random.Random(f"{self._seed}/{index}")
        if self.repeatable and rng.random() < 0.06:
            return self._repeat(rng)
        task = self._chat(rng) if rng.random() < 0.15 else self._completion(rng)
        self._sampling(task, rng)
        self._delivery(task, rng)
        self._routing(task, rng)
        return task

    @staticmethod
    def _tokens(rng: random.Random, length: int) -> list[int]:
        """Printable text; one in three repeats itself, which lets n-gram drafts be accepted."""
        if rng.random() < 0.33:
            pattern = [rng.randrange(33, 120) for _ in range(rng.randrange(1, 6))]
            return (pattern * length)[:length]
        return [rng.randrange(33, 120) for _ in range(length)]

    def _repeat(self, rng: random.Random) -> Task:
        task, known = rng.choice(self.repeatable)
        self._counts["repeated requests"] += 1
        body = {**task.body, "stream": not task.stream}
        if task.stream:
            body.pop("stream_options", None)
        return Task(task.path, body, task.prompts, start=task.start, form=task.form, layout=task.layout, earlier=known)

    def _completion(self, rng: random.Random) -> Task:
        kind = rng.random()
        earlier = None
        if kind < 0.25 and self.answered:
            earlier = rng.choice(self.answered)
            self._counts["turns of a conversation"] += 1
            prompts = [[*earlier.tokens, *self._tokens(rng, rng.randrange(1, 40))]]
        elif kind < 0.65:
            prefix = rng.choice(self._prefixes)
            prompts = [[*prefix[: rng.randrange(1, len(prefix) + 1)], *self._tokens(rng, rng.randrange(0, 60))]]
            if rng.random() < 0.5:
                prompts = [[*prefix, *self._tokens(rng, rng.randrange(1, 60))]]
        elif kind < 0.75:
            self._counts["lists of prompts"] += 1
            prompts = [self._tokens(rng, rng.randrange(1, 70)) for _ in range(rng.randrange(1, 4))]
        else:
            prompts = [self._tokens(rng, rng.choice([1, 2, 31, 32, 33, 63, 64, 65, rng.randrange(3, 200)]))]
        prompts = [prompt[: MAX_MODEL_LEN - 150] for prompt in prompts]
        is_list = 0.65 <= kind < 0.75
        task = Task("/v1/completions", {"prompt": prompts if is_list else prompts[0]}, prompts, earlier=earlier)
        if rng.random() < 0.06:
            self._counts["echo"] += 1
            task.body["echo"] = True
        return task

    def _chat(self, rng: random.Random) -> Task:
        self._counts["chat"] += 1
        messages = [{"role": "user", "content": rng.choice(self._chat_prefixes)}]
        if rng.random() < 0.5:
            messages.append({"role": "assistant", "content": "".join(map(chr, self._tokens(rng, 20)))})
            messages.append({"role": "user", "content": "".join(map(chr, self._tokens(rng, rng.randrange(1, 40))))})
        return Task("/v1/chat/completions", {"messages": messages}, [])

    def _sampling(self, task: Task, rng: random.Random) -> None:
        body, counts = task.body, self._counts
        body["temperature"] = rng.choice([0, 0, 1])
        body["max_tokens"] = rng.choice([2, rng.randrange(2, 60), rng.randrange(20, 110), rng.randrange(20, 110)])
        body["ignore_eos"] = rng.random() < 0.5
        if rng.random() < 0.06:
            counts["max_tokens 1"] += 1
            body["max_tokens"] = 1
        elif rng.random() < 0.12:
            counts["several choices"] += 1
            task.n = body["n"] = rng.randrange(2, 4)
            body["temperature"] = 1
        if rng.random() < 0.08 and "structured output" not in self._profile.without:
            counts["structured output"] += 1
            body["structured_outputs"] = rng.choice([{"choice": ["yes", "no", "perhaps"]}, {"regex": "[a-f]{3,30}x"}])
            return  # what follows would contradict it
        if task.n > 1:  # so that one ends before the other
            body["stop"] = [chr(rng.randrange(33, 127)) for _ in range(4)]
            body["max_tokens"] = max(body["max_tokens"], 20)
        elif rng.random() < 0.15:
            body["stop"] = ["".join(chr(rng.randrange(33, 127)) for _ in range(rng.choice([1, 1, 2]))) for _ in "1234"]
        if rng.random() < 0.2:
            body["stop_token_ids"] = [rng.randrange(33, 94) for _ in range(10)]
        if rng.random() < 0.1 and "logit bias" not in self._profile.without:
            counts["logit bias"] += 1
            body["logit_bias"] = rng.choice([{str(END_TOKEN): 4}, {str(rng.randrange(33, 94)): 6}])
        if rng.random() < 0.1:
            counts["min_tokens"] += 1
            body["min_tokens"] = min(rng.randrange(1, 12), body["max_tokens"])

    def _delivery(self, task: Task, rng: random.Random) -> None:
        body = task.body
        if rng.random() < 0.6:
            body["stream"] = True
            if rng.random() < 0.8:
                body["stream_options"] = {"include_usage": True}
            if rng.random() < 0.15:
                self._counts["stream_interval"] += 1
                body["stream_interval"] = rng.randrange(2, 8)
        if rng.random() < 0.15:
            task.headers["X-Request-Id"] = f"same-{rng.randrange(2)}"
        if rng.random() < 0.16:
            if body.get("stream") and rng.random() < 0.6:
                task.leave_after_chunks = rng.randrange(1, 12)
            else:
                task.leave_after_s = rng.random() * 0.6

    def _routing(self, task: Task, rng: random.Random) -> None:
        body, counts = task.body, self._counts
        body["return_token_ids"] = True
        task.opted_in = rng.random() < 0.85
        if not task.opted_in:
            return
        body["return_routed_experts"] = True
        if task.prompts and rng.random() < 0.3:
            shortest = min(map(len, task.prompts))
            where = rng.choice(["start in a block", "start at P - 1", "start at P"])
            in_block = rng.randrange(shortest) // BLOCK_SIZE * BLOCK_SIZE + rng.randrange(1, BLOCK_SIZE)
            starts = {"start in a block": in_block, "start at P - 1": shortest - 1, "start at P": shortest}
            if starts[where] <= shortest:
                counts[where] += 1
                task.start = body["routed_experts_prompt_start"] = starts[where]
        task.form = rng.choice(["object", "object", "npy", "raw", "list"])
        counts[f"form {task.form}"] += 1
        if task.form != "object":
            body["routed_experts_format"] = task.form
        if rng.random() < 0.5:
            body["routed_experts_dtype"] = rng.choice(["int16", "uint8", "int32", "auto"])
        if rng.random() < 0.25:
            counts["layout joined"] += 1
            task.layout = body["routed_experts_layout"] = "joined"


class DefaultForm:
    """Rewrites an answer in any form and layout as the default one, which is what the harness checks."""

    def __init__(self, task: Task, shape: tuple[int, int]) -> None:
        self._task = task
        self._shape = shape
        wire = task.body.get("routed_experts_dtype", "int16")
        self._dtype = np.dtype("uint8" if wire == "auto" else wire)
        self._prompt: dict[int, np.ndarray] = {}
        self._sent: Counter[int] = Counter()

    def response(self, body: dict[str, Any]) -> dict[str, Any]:
        task = self._task
        per_prompt = len(body["choices"]) // max(len(task.prompts), 1)
        if task.layout == "split":
            prompts = body["prompt_routed_experts"]
            is_list = isinstance(task.body.get("prompt", [0])[0], list)
            arrays = [self._rows(array) for array in (prompts if is_list else [prompts])]
        else:
            assert "prompt_routed_experts" not in body
            arrays = []
        for index, choice in enumerate(body["choices"]):
            rows = self._rows(choice["routed_experts"])
            prompt_len = self._prompt_len(choice, body, index)
            if task.layout == "joined":
                cut = prompt_len - task.start
                if index % per_prompt == 0:
                    arrays.append(rows[:cut])
                assert np.array_equal(arrays[-1], rows[:cut]), "prompt rows differ between choices"
                rows = rows[cut:]
            choice["routed_experts"] = as_object(rows, prompt_len)
        body["prompt_routed_experts"] = [as_object(rows, task.start) for rows in arrays]
        return body

    def chunks(self, chunks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        task = self._task
        prompt_ids: list[int] | None = None
        for chunk in chunks:
            assert "error" not in chunk, chunk
            if not chunk["choices"]:
                yield chunk
                continue
            prompt_ids = prompt_ids or chunk.get("prompt_token_ids")
            (choice,) = chunk["choices"]
            if task.layout == "joined":
                assert "prompt_routed_experts" not in chunk
                if not choice.get("token_ids") and choice["finish_reason"] is None:
                    continue  # a chat's chunk with the role, before which the default layout has the prompt's rows
                chunk["prompt_token_ids"] = prompt_ids
            self._chunk(chunk, choice, self._prompt_len(choice, {"prompt_token_ids": prompt_ids}, choice["index"]))
            yield chunk

    def _chunk(self, chunk: dict[str, Any], choice: dict[str, Any], prompt_len: int) -> None:
        task, key = self._task, choice["index"]
        rows = self._rows(choice.pop("routed_experts")) if "routed_experts" in choice else self._rows([])
        if "prompt_routed_experts" in chunk:
            chunk["prompt_routed_experts"] = as_object(self._rows(chunk["prompt_routed_experts"]), task.start)
        if task.layout == "joined" and key not in self._sent:
            before, rows = rows[: prompt_len - task.start], rows[prompt_len - task.start :]
            if key // task.n not in self._prompt:
                self._prompt[key // task.n] = before
                chunk["prompt_routed_experts"] = as_object(before, task.start)
            assert np.array_equal(self._prompt[key // task.n], before), "prompt rows differ between choices"
        if len(rows):
            choice["routed_experts"] = as_object(rows, prompt_len + self._sent[key])
        self._sent[key] += len(rows)

    def _prompt_len(self, choice: dict[str, Any], body: dict[str, Any], index: int) -> int:
        if self._task.prompts:
            return len(self._task.prompts[index // self._task.n])
        return len(choice.get("prompt_token_ids") or body["prompt_token_ids"])

    def _rows(self, value: Any) -> np.ndarray:
        """[n, L, K] int16; the form and the element type must be those that were asked for."""
        form = self._task.form
        if isinstance(value, list):
            assert form == "list" or not value
            return np.asarray(value, dtype=np.int16).reshape(-1, *self._shape)
        if form == "object":
            assert value["dtype"] == self._dtype.name
            return decode(value).astype(np.int16)
        data = base64.b64decode(value)
        if form == "raw":
            return np.frombuffer(data, dtype=self._dtype).reshape(-1, *self._shape).astype(np.int16)
        with _NPY_HEADERS:
            rows = np.load(io.BytesIO(data), allow_pickle=False)
        assert rows.dtype == self._dtype
        return rows.astype(np.int16)


def as_object(rows: np.ndarray, start: int) -> dict[str, Any]:
    missing = int((rows == -1).any(axis=(1, 2)).sum())
    data = base64.b64encode(rows.astype("<i2").tobytes()).decode()
    return {"data": data, "shape": list(rows.shape), "dtype": "int16", "start": start, "missing": missing}


@dataclass
class Report:
    """What occurred. `failures` holds a sentence for each answer that was not as it should be."""

    profile: str
    counts: Counter[str]
    failures: list[str] = field(default_factory=list)
    missing_rows: int = 0
    seconds: float = 0.0
    state: dict[str, Any] = field(default_factory=dict)
    log_errors: list[str] = field(default_factory=list)

    def not_provoked(self) -> list[str]:
        return [name for name in PROFILES[self.profile].situations if not self.counts[name]]

    def problems(self) -> list[str]:
        """Why the run failed; empty if it did not."""
        problems = self.failures[:10]
        if self.counts[TIES] > 1 + self.counts["rows checked"] // 100_000:
            problems.append(f"too many answers that float32 cannot decide: {self.counts[TIES]}")
        problems += [f"did not occur: {name}" for name in self.not_provoked()]
        left = {name: self.state.get(name) for name in ("requests_tracked", "feeds_open", "running", "waiting")}
        if any(left.values()):
            problems.append(f"state is left: {left}")
        problems += [f"the server logged: {line}" for line in self.log_errors[:5]]
        return problems

    def table(self) -> str:
        wanted = PROFILES[self.profile].situations
        lines = [f"torture, profile {self.profile}: {self.counts['requests']} requests in {self.seconds:.0f} s"]
        lines += [f"  {name:34}{self.counts[name]:>9}" for name in self.counts if name not in wanted]
        lines += ["  provoked on purpose:"]
        lines += [f"    {name:32}{self.counts[name]:>9}" for name in wanted]
        lines += [
            f"  {'missing rows':34}{self.missing_rows:>9}",
            f"  {'failed requests':34}{len(self.failures):>9}",
            f"  state at the end: {self.state}",
        ]
        return "\n".join(lines)


class Torture:
    """Drives the mix and checks what comes back."""

    def __init__(self, server: Server, oracle: Oracle, profile: str, requests: int, seed: int) -> None:
        self._server = server
        self._oracle = oracle
        self._requests = requests
        self._profile = PROFILES[profile]
        self._rng = random.Random(seed)
        self.report = Report(profile, Counter())
        self._mix = Mix(seed, self.report.counts, self._profile)
        self._ids_in_flight: Counter[str] = Counter()
        info = server.info()
        self._shape = (info["num_layers"], info["top_k"])
        self._next = 0

    def run(self) -> Report:
        torch.set_num_threads(1)  # the server needs the rest
        began = time.monotonic()
        before = {name: self._server.metric(metric) for name, metric in COUNTERS.items()}
        logged = len(self._server.log.read_text())
        asyncio.run(self._drive())
        report = self.report
        for name, metric in COUNTERS.items():
            report.counts[name] = int(self._server.metric(metric) - before[name])
        report.counts["drafts rejected"] = report.counts.pop("drafts proposed") - report.counts["drafts accepted"]
        report.counts["answers that float64 decided"] = self._oracle.decided
        report.counts[TIES] = self._oracle.undecidable
        report.state = self._state_at_the_end()
        report.log_errors = [line for line in self._server.log.read_text()[logged:].splitlines() if " ERROR " in line]
        report.seconds = time.monotonic() - began
        return report

    async def _drive(self) -> None:
        # No connection is used twice: the server may close one just as it is.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self._server.url, timeout=300, verify=False, limits=limits) as client:
            await asyncio.gather(*(self._work(client) for _ in range(CONCURRENCY)))

    async def _work(self, client: httpx.AsyncClient) -> None:
        while self._next < self._requests:
            index = self._next
            self._next += 1
            if index % 20 == 19:
                await self._reset_prefix_cache(client, index)
            task = self._mix.make(index)
            self.report.counts["requests"] += 1
            try:
                await self._answer(client, task)
            except (AssertionError, KeyError, httpx.HTTPError) as error:
                self.report.failures.append(f"request {index}: {error!r} {describe(task)}")
                print(self.report.failures[-1], flush=True)
            if index % 500 == 499:
                print(f"{index + 1} requests, {len(self.report.failures)} failed", flush=True)

    async def _reset_prefix_cache(self, client: httpx.AsyncClient, index: int) -> None:
        """Without running requests it is granted only when the engine is idle, so it waits for that. What was offloaded
        is forgotten in any case."""
        running = index % 60 != 59 and "resets with running requests" not in self._profile.without
        external = index % 40 == 19 and "resets of what was offloaded" in self._profile.must
        flags = {"reset_running_requests": running, "reset_external": external}
        response = await client.post("/reset_prefix_cache", params=flags)
        assert response.status_code == 200, response.text
        self.report.counts["resets with running requests" if running else "prefix cache resets asked for"] += 1
        self.report.counts["resets of what was offloaded"] += external
        self.report.counts["prefix cache resets"] += bool(response.json()["success"])

    async def _answer(self, client: httpx.AsyncClient, task: Task) -> None:
        counts = self.report.counts
        counts["opted in" if task.opted_in else "not opted in"] += 1
        counts["streamed" if task.stream else "not streamed"] += 1
        request_id = task.headers.get("X-Request-Id")
        if request_id is not None:
            counts["same id at once"] += self._ids_in_flight[request_id] > 0
            self._ids_in_flight[request_id] += 1
        try:
            received, complete = await self._exchange(client, task)
        finally:
            if request_id is not None:
                self._ids_in_flight[request_id] -= 1
        if task.stream:
            await asyncio.to_thread(self._check_stream, task, received, complete)
        elif complete:
            await asyncio.to_thread(self._check_response, task, received[0])
        else:
            counts["aborts unstreamed"] += 1

    async def _exchange(self, client: httpx.AsyncClient, task: Task) -> tuple[list[dict[str, Any]], bool]:
        """What was received, and whether that is all: the client may have gone away before."""
        body = {"model": "tiny", **task.body}
        lines: list[str] = []
        try:
            async with asyncio.timeout(task.leave_after_s):
                if not task.stream:
                    response = await client.post(task.path, json=body, headers=task.headers)
                    assert response.status_code == 200, response.text
                    return [orjson.loads(response.content)], True
                async with client.stream("POST", task.path, json=body, headers=task.headers) as response:
                    assert response.status_code == 200, await response.aread()
                    async for line in response.aiter_lines():
                        if line:
                            lines.append(line)
                        if task.leave_after_chunks is not None and len(lines) >= task.leave_after_chunks:
                            break
        except TimeoutError:
            pass
        if lines and lines[-1] == "data: [DONE]":
            return list(read_events(iter(lines))), True
        return [orjson.loads(line[len("data: ") :]) for line in lines], False

    def _check_response(self, task: Task, body: dict[str, Any]) -> None:
        self._count_hits(body)
        if not task.opted_in:
            assert "prompt_routed_experts" not in body
            assert not any("routed_experts" in choice for choice in body["choices"])
            self._note_unrouted(task, body)
            return
        answers = answers_of(DefaultForm(task, self._shape).response(body), task.start)
        self._check_answers(task, answers, [choice.get("stop_reason") for choice in body["choices"]])

    def _check_stream(self, task: Task, chunks: list[dict[str, Any]], complete: bool) -> None:
        counts = self.report.counts
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        if not complete:
            begun = any(choice.get("token_ids") for choice in choices)
            counts["aborts in mid-stream" if begun else "aborts before the first token"] += 1
        for chunk in chunks:
            self._count_hits(chunk)
        if not task.opted_in:
            assert not any("prompt_routed_experts" in chunk for chunk in chunks)
            assert not any("routed_experts" in choice for choice in choices)
            return
        if "stream_interval" not in task.body:
            counts["chunks with several tokens"] += sum(len(choice.get("token_ids") or []) > 1 for choice in choices)
        answers = answers_of_stream(list(DefaultForm(task, self._shape).chunks(chunks)), task.start, task.n)
        answers = [answer for answer in answers if answer.tokens]
        if complete:
            assert len(answers) == max(len(task.prompts), 1) * task.n
            reasons = {choice["index"]: choice.get("stop_reason") for choice in choices if choice.get("finish_reason")}
            self._check_answers(task, answers, [reasons[index] for index in sorted(reasons)])
        elif task.n == 1 and len(task.prompts) < 2:  # else it is not known here which choice is which
            self._check_answers(task, answers, [])

    def _note_unrouted(self, task: Task, body: dict[str, Any]) -> None:
        """A later turn hits what this request, which did not opt in, has written."""
        if len(task.prompts) == 1 and task.n == 1:
            tokens = [*task.prompts[0], *body["choices"][0]["token_ids"]]
            if len(tokens) < MAX_MODEL_LEN - 200:
                self._mix.answered.append(Known(tokens, 0, np.empty((0, *self._shape), dtype=np.int16)))

    def _check_answers(self, task: Task, answers: list[Answer], stop_reasons: list[Any]) -> None:
        report = self.report
        for index, answer in enumerate(answers):
            answer.prompt = task.prompts[index // task.n] if task.prompts else answers[0].prompt
            rows = np.concatenate([answer.prompt_rows, answer.rows])
            report.missing_rows += int((rows == -1).any(axis=(1, 2)).sum())
            check(answer, self._oracle)
            report.counts["answers checked"] += 1
            report.counts["rows checked"] += len(rows)
            if task.earlier is not None:
                report.counts["rows compared with an earlier answer"] += compare(task.earlier, answer)
            if task.n > 1 and index % task.n:
                first = answers[index - index % task.n]
                assert np.array_equal(first.prompt_rows, answer.prompt_rows), "prompt rows differ between choices"
        for reason in stop_reasons:
            if isinstance(reason, str):
                report.counts["ended by a stop string"] += 1
            elif isinstance(reason, int):
                report.counts["ended by a stop token"] += 1
        ended = [answer for answer in answers if answer.finish_reason == "stop" and answer.tokens[-1] == END_TOKEN]
        report.counts["ended by the end token"] += len(ended)
        if task.n > 1:
            report.counts["choices that ended early"] += len({len(answer.tokens) for answer in answers}) > 1
        self._remember(task, answers)

    def _remember(self, task: Task, answers: list[Answer]) -> None:
        if len(answers) != 1 or answers[0].finish_reason is None:
            return
        known = Known.of(answers[0])
        if len(known.tokens) < MAX_MODEL_LEN - 200:
            self._mix.answered.append(known)
        if task.body["temperature"] == 0 and task.opted_in:
            self._mix.repeatable.append((task, known))

    def _count_hits(self, body: dict[str, Any]) -> None:
        details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
        self.report.counts["prefix hits, requests"] += bool(details.get("cached_tokens"))

    def _state_at_the_end(self) -> dict[str, Any]:
        deadline = time.monotonic() + 120
        while True:
            state: dict[str, Any] = {name: int(value) for name, value in self._server.state_left().items()}
            state["running"] = int(self._server.metric("vllm:num_requests_running"))
            state["waiting"] = int(self._server.metric("vllm:num_requests_waiting"))
            if not any(state.values()) or time.monotonic() > deadline:
                return state
            time.sleep(0.2)


def compare(known: Known, answer: Answer) -> int:
    """Asserts that the rows of the tokens that two answers share are bit-equal; returns how many there are."""
    other = Known.of(answer)
    shared = 0
    for a, b in zip(known.tokens, other.tokens, strict=False):
        if a != b:
            break
        shared += 1
    first = max(known.first, other.first)
    end = min(shared, known.first + len(known.rows), other.first + len(other.rows))
    if end <= first:
        return 0
    same = known.rows[first - known.first : end - known.first] == other.rows[first - other.first : end - other.first]
    differing = np.flatnonzero(~same.all(axis=(1, 2)))
    assert len(differing) == 0, f"rows {(differing + first).tolist()} are not those of an earlier answer"
    return end - first


def describe(task: Task) -> str:
    body = {name: value for name, value in task.body.items() if name not in ("prompt", "messages")}
    return f"{task.path} prompts of {[len(prompt) for prompt in task.prompts]} tokens, {body} {task.headers}"


def torture(model: Path, log: Path, profile: str, requests: int, seed: int = 1) -> Report:
    """Starts a server with the profile, drives the mix and stops it."""
    wanted = PROFILES[profile]
    with serving(model, log, *FLAGS, *wanted.flags, env=ENV, module=wanted.module) as server:
        with server.client() as client:
            config = client.get("/server_info?config_format=json").json()["vllm_config"]
        assert config["scheduler_config"]["async_scheduling"] is wanted.async_scheduling
        return Torture(server, Oracle(model), profile, requests, seed).run()


def main() -> int:
    from routed_experts.server.cli.tiny_model import make_tiny_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--profile", choices=sorted(PROFILES), default="async")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="the server's log; default: in a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        make_tiny_model(model)
        report = torture(model, args.log or Path(folder) / "log", args.profile, args.requests, args.seed)
    print(report.table())
    problems = report.problems()
    print("\n".join(problems) if problems else "PASSED")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
