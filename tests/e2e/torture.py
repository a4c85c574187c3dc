"""A seeded random mix of all that can share an engine, driven against a real server, every answer
checked.

    python -m tests.e2e.torture --requests 5000 --profile async

Prints how often each situation really occurred, from vLLM's metrics and from what the clients saw,
and fails if one that the profile means to provoke did not occur, if a row is wrong or missing, or
if the server holds state at the end.

Equality with the oracle is never loosened: what it says about near-ties holds, and too many of them
fail the run. Forms and layouts of the arrays are another matter (`tests/contract/test_api.py`);
here all are in the default one.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import torch

from routed_experts.server.cli.tiny_model import make_tiny_model
from tests.e2e.harness import (
    ASYNC,
    FEW_BLOCKS,
    NGRAM,
    OURS,
    WEIGHTS_OFF,
    Answer,
    Oracle,
    Server,
    answers_of,
    answers_of_stream,
    check,
    check_weights,
    located,
    read_events,
    rows_of,
    serving,
    wait_until,
    wait_until_idle,
    with_weights_as_rows,
)
from tests.e2e.offload_on_cpu import kv_transfer_config

BLOCK_SIZE = 32
MAX_MODEL_LEN = 512
LONGEST_KNOWN = MAX_MODEL_LEN - 200
"""Tokens of an answer that another request may go on from."""
CONCURRENCY = 24
END_TOKEN = 258
REQUESTS = 100
"""Of a test; the long run has more."""
ENV = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache and /server_info
COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "prefix hits, tokens": "vllm:prefix_cache_hits_total",
    "drafts proposed": "vllm:spec_decode_num_draft_tokens_total",
    "drafts accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "tokens loaded again": "vllm:external_prefix_cache_hits_total",
}
FIELDS = {
    **{
        "echo": "echo",
        "several choices": "n",
        "structured output": "structured_outputs",
        "logit bias": "logit_bias",
    },
    **{"min_tokens": "min_tokens", "stream_interval": "stream_interval", "chat": "messages"},
    **{
        "weights asked for": "return_routed_expert_weights",
        "by reference": "routed_experts_delivery",
    },
    "at the end": "routed_experts_stream",
}
"""Situations that a request's field makes."""
SITUATIONS = (
    *("weights checked, streamed", "weights checked, not streamed"),
    *("opted in", "not opted in", "streamed", "not streamed", "preemptions", *FIELDS),
    *(
        "prefix hits, requests",
        "prefix hits, tokens",
        "turns of a conversation",
        "repeated requests",
    ),
    *("choices that ended early", "lists of prompts", "max_tokens 1"),
    *("start in a block", "start at P - 1", "start at P"),
    *("ended by a stop string", "ended by a stop token", "ended by the end token"),
    *("aborts before the first token", "aborts in mid-stream", "aborts unstreamed"),
    *("same id at once", "prefix cache resets", "resets with running requests"),
)
TIES = "answers that float32 cannot decide"


@dataclass(frozen=True)
class Profile:
    """An engine configuration, and which situations the mix must provoke in it beyond or unlike
    `SITUATIONS`."""

    flags: tuple[str, ...]
    is_async: bool
    must: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # what vLLM cannot do in it

    @property
    def situations(self) -> tuple[str, ...]:
        return (*(name for name in SITUATIONS if name not in self.without), *self.must)


PROFILES = {
    "async": Profile(("--async-scheduling",), is_async=True),
    "ngram": Profile(
        ("--speculative-config", json.dumps(NGRAM)),
        is_async=False,
        must=("drafts accepted", "drafts rejected", "chunks with several tokens"),
        # vLLM 0.32 has no logit bias with drafts, and ends structured output with an error now and
        # then ("grammar rejected tokens"), without the capture too.
        without=("logit bias", "structured output"),
    ),
    "offload": Profile(
        # 60 blocks
        ("--async-scheduling", "--kv-transfer-config", json.dumps(kv_transfer_config(6 << 20))),
        is_async=True,
        must=("tokens loaded again", "resets of what was offloaded"),
        # vLLM 0.32 cannot preempt requests by a reset while others are loaded.
        without=("resets with running requests", "prefix cache resets"),
    ),
}


@dataclass
class Task:
    """One request of the mix."""

    body: dict[str, Any]
    prompts: list[list[int]]  # token ids of each prompt; empty for chat, whose answer says them
    headers: dict[str, str] = field(default_factory=dict)
    leave_after_s: float | None = None  # when the client goes away, if it does
    leave_after_chunks: int | None = None

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def n(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def has_one_choice(self) -> bool:
        return self.n == 1 and len(self.prompts) < 2

    @property
    def start(self) -> int:
        return int(self.body.get("routed_experts_prompt_start", 0))

    @property
    def opted_in(self) -> bool:
        return "return_routed_experts" in self.body

    @property
    def weights(self) -> bool:
        return "return_routed_expert_weights" in self.body

    @property
    def at_end(self) -> bool:
        """Whether rows come with the last chunk of each choice."""
        return "routed_experts_delivery" in self.body or "routed_experts_stream" in self.body

    def __str__(self) -> str:
        body = {
            name: value for name, value in self.body.items() if name not in ("prompt", "messages")
        }
        return f"{self.path} prompts of {[len(prompt) for prompt in self.prompts]} tokens, {body} {self.headers}"


class Mix:
    """Makes the requests. The same seed makes the same choices, but answers to build on come as
    they come."""

    def __init__(self, seed: int, counts: Counter[str], profile: Profile) -> None:
        self._seed, self._counts, self._profile = seed, counts, profile
        rng = random.Random(seed)
        self._prefixes = [self._tokens(rng, length) for length in (64, 100, 150, 200)]
        self._chat_prefixes = [self._text(rng, length) for length in (60, 120)]
        self.answered: deque[list[int]] = deque(maxlen=16)
        self.repeatable: deque[Task] = deque(maxlen=16)

    def make(self, index: int) -> Task:
        rng = random.Random(f"{self._seed}/{index}")
        if self.repeatable and rng.random() < 0.06:
            task = self._repeat(rng)
        else:
            task = self._chat(rng) if rng.random() < 0.15 else self._completion(rng)
            self._sampling(task, rng)
            self._delivery(task, rng)
            self._routing(task, rng)
        self._counts.update(name for name, key in FIELDS.items() if key in task.body)
        return task

    @staticmethod
    def _tokens(rng: random.Random, length: int) -> list[int]:
        """Printable text; one in three repeats itself, which lets n-gram drafts be accepted."""
        if rng.random() < 0.33:
            pattern = [rng.randrange(33, 120) for _ in range(rng.randrange(1, 6))]
            return (pattern * length)[:length]
        return [rng.randrange(33, 120) for _ in range(length)]

    def _text(self, rng: random.Random, length: int) -> str:
        return "".join(map(chr, self._tokens(rng, length)))

    def _repeat(self, rng: random.Random) -> Task:
        task = rng.choice(self.repeatable)
        self._counts["repeated requests"] += 1
        body = {**task.body, "stream": not task.stream}
        if task.stream:
            body.pop("stream_options", None)
        return Task(body, task.prompts)

    def _completion(self, rng: random.Random) -> Task:
        kind = rng.random()
        is_list = 0.65 <= kind < 0.75
        if kind < 0.25 and self.answered:
            self._counts["turns of a conversation"] += 1
            prompts = [[*rng.choice(self.answered), *self._tokens(rng, rng.randrange(1, 40))]]
        elif kind < 0.65:
            prefix = rng.choice(self._prefixes)
            prompts = [
                [
                    *prefix[: rng.randrange(1, len(prefix) + 1)],
                    *self._tokens(rng, rng.randrange(0, 60)),
                ]
            ]
            if rng.random() < 0.5:
                prompts = [[*prefix, *self._tokens(rng, rng.randrange(1, 60))]]
        elif is_list:
            self._counts["lists of prompts"] += 1
            prompts = [self._tokens(rng, rng.randrange(1, 70)) for _ in range(rng.randrange(1, 4))]
        else:
            prompts = [
                self._tokens(rng, rng.choice([1, 2, 31, 32, 33, 63, 64, 65, rng.randrange(3, 200)]))
            ]
        prompts = [prompt[: MAX_MODEL_LEN - 150] for prompt in prompts]
        task = Task({"prompt": prompts if is_list else prompts[0]}, prompts)
        if rng.random() < 0.06:
            task.body["echo"] = True
        return task

    def _chat(self, rng: random.Random) -> Task:
        messages = [{"role": "user", "content": rng.choice(self._chat_prefixes)}]
        if rng.random() < 0.5:
            messages.append({"role": "assistant", "content": self._text(rng, 20)})
            messages.append({"role": "user", "content": self._text(rng, rng.randrange(1, 40))})
        return Task({"messages": messages}, [])

    def _sampling(self, task: Task, rng: random.Random) -> None:
        body = task.body
        without = self._profile.without
        self._length(body, rng)
        if rng.random() < 0.08 and "structured output" not in without:
            body["structured_outputs"] = rng.choice(
                [{"choice": ["yes", "no", "perhaps"]}, {"regex": "[a-f]{3,30}x"}]
            )
            return  # what follows would contradict it
        self._stops(task, rng)
        if rng.random() < 0.1 and "logit bias" not in without:
            body["logit_bias"] = rng.choice([{str(END_TOKEN): 4}, {str(rng.randrange(33, 94)): 6}])
        if rng.random() < 0.1:
            body["min_tokens"] = min(rng.randrange(1, 12), body["max_tokens"])

    def _length(self, body: dict[str, Any], rng: random.Random) -> None:
        """How many choices there are, and of how many tokens."""
        body["temperature"] = rng.choice([0, 0, 1])
        body["max_tokens"] = rng.choice(
            [2, rng.randrange(2, 60), rng.randrange(20, 110), rng.randrange(20, 110)]
        )
        body["ignore_eos"] = rng.random() < 0.5
        if rng.random() < 0.06:
            self._counts["max_tokens 1"] += 1
            body["max_tokens"] = 1
        elif rng.random() < 0.12:
            body |= {"n": rng.randrange(2, 4), "temperature": 1}

    @staticmethod
    def _stops(task: Task, rng: random.Random) -> None:
        """Which strings and tokens end a choice."""
        body = task.body
        if task.n > 1:  # so that one ends before the other
            body["stop"] = [chr(rng.randrange(33, 127)) for _ in range(4)]
            body["max_tokens"] = max(body["max_tokens"], 20)
        elif rng.random() < 0.15:
            body["stop"] = [
                "".join(chr(rng.randrange(33, 127)) for _ in range(rng.choice([1, 1, 2])))
                for _ in "1234"
            ]
        if rng.random() < 0.2:
            body["stop_token_ids"] = [rng.randrange(33, 94) for _ in range(10)]

    def _delivery(self, task: Task, rng: random.Random) -> None:
        body = task.body
        if rng.random() < 0.6:
            body["stream"] = True
            if rng.random() < 0.8:
                body["stream_options"] = {"include_usage": True}
            if rng.random() < 0.15:
                body["stream_interval"] = rng.randrange(2, 8)
        if rng.random() < 0.15:
            task.headers["X-Request-Id"] = f"same-{rng.randrange(2)}"
        if rng.random() < 0.16:
            if body.get("stream") and rng.random() < 0.6:
                task.leave_after_chunks = rng.randrange(1, 12)
            else:
                task.leave_after_s = rng.random() * 0.6

    def _routing(self, task: Task, rng: random.Random) -> None:
        task.body["return_token_ids"] = True
        if rng.random() >= 0.85:
            return
        task.body["return_routed_experts"] = True
        if task.prompts and rng.random() < 0.3:
            shortest = min(map(len, task.prompts))
            where = rng.choice(["start in a block", "start at P - 1", "start at P"])
            in_block = rng.randrange(shortest) // BLOCK_SIZE * BLOCK_SIZE + rng.randrange(
                1, BLOCK_SIZE
            )
            starts = {
                "start in a block": in_block,
                "start at P - 1": shortest - 1,
                "start at P": shortest,
            }
            if starts[where] <= shortest:
                self._counts[where] += 1
                task.body["routed_experts_prompt_start"] = starts[where]
        if rng.random() < 0.5:
            task.body["routed_experts_dtype"] = rng.choice(["int16", "uint8", "int32", "auto"])
        if rng.random() < 0.5:
            task.body["return_routed_expert_weights"] = True
        if rng.random() < 0.4:
            late = [("routed_experts_delivery", "reference"), ("routed_experts_stream", "at_end")]
            task.body |= dict([rng.choice(late)])


class Torture:
    """Drives the mix and checks what comes back."""

    def __init__(
        self, server: Server, oracle: Oracle, profile: str, requests: int, seed: int = 1
    ) -> None:
        self._server, self._oracle, self._requests = server, oracle, requests
        self._profile = PROFILES[profile]
        self.counts: Counter[str] = Counter()  # how often each situation occurred
        # A sentence for each answer that was not as it should be, and each error in the server's
        # log.
        self.failures: list[str] = []
        self.weights_off = 0.0  # the largest difference of a weight to the oracle's
        self._mix = Mix(seed, self.counts, self._profile)
        self._ids_in_flight: Counter[str] = Counter()
        self._next = 0

    def run(self) -> list[str]:
        """Why the run failed; empty if it did not."""
        torch.set_num_threads(1)  # the server needs the rest
        server, counts, logged = self._server, self.counts, len(self._server.errors())
        before = {name: server.metric(metric) for name, metric in COUNTERS.items()}
        asyncio.run(self._drive())
        for name, metric in COUNTERS.items():
            counts[name] = int(server.metric(metric) - before[name])
        counts["drafts rejected"] = counts.pop("drafts proposed") - counts["drafts accepted"]
        counts["answers that float64 decided"] = self._oracle.decided
        counts[TIES] = self._oracle.undecidable
        wait_until(lambda: server.metric("vllm:num_requests_running") == 0, "requests are left")
        wait_until_idle(server)
        self.failures += [f"the server logged: {line}" for line in server.errors()[logged:]]
        print("\n".join(f"  {name:38}{count:>9}" for name, count in counts.items()))
        print(f"  {'largest difference of a weight':38}{self.weights_off:>9.1e}")
        problems = self.failures[:10]
        if counts[TIES] > 1 + counts["rows checked"] // 100_000:
            problems.append(f"too many answers that float32 cannot decide: {counts[TIES]}")
        return problems + [
            f"did not occur: {name}" for name in self._profile.situations if not counts[name]
        ]

    async def _drive(self) -> None:
        # No connection is used twice: the server may close one just as it is.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self._server.url, timeout=300, verify=False, limits=limits
        ) as client:
            await asyncio.gather(*(self._work(client) for _ in range(CONCURRENCY)))

    async def _work(self, client: httpx.AsyncClient) -> None:
        while self._next < self._requests:
            index = self._next
            self._next += 1
            if index % 20 == 19:
                await self._reset_prefix_cache(client, index)
            task = self._mix.make(index)
            self.counts["requests"] += 1
            try:
                await self._answer(client, task)
            except (AssertionError, KeyError, httpx.HTTPError) as error:
                self.failures.append(f"request {index}: {error!r} {task}")
                print(self.failures[-1], flush=True)

    async def _reset_prefix_cache(self, client: httpx.AsyncClient, index: int) -> None:
        """Without running requests it is granted only when the engine is idle, so it waits for
        that. What was offloaded is forgotten in any case."""
        running = index % 60 != 59 and "resets with running requests" not in self._profile.without
        external = index % 40 == 19 and "resets of what was offloaded" in self._profile.must
        flags = {"reset_running_requests": running, "reset_external": external}
        response = await client.post("/reset_prefix_cache", params=flags)
        assert response.status_code == 200, response.text
        self.counts[
            "resets with running requests" if running else "prefix cache resets asked for"
        ] += 1
        self.counts["resets of what was offloaded"] += external
        self.counts["prefix cache resets"] += bool(response.json()["success"])

    async def _answer(self, client: httpx.AsyncClient, task: Task) -> None:
        self.counts["opted in" if task.opted_in else "not opted in"] += 1
        self.counts["streamed" if task.stream else "not streamed"] += 1
        with self._in_flight(task.headers.get("X-Request-Id")):
            received, complete = await self._exchange(client, task)
        if complete or task.stream:
            await asyncio.to_thread(self._check, task, received, complete)
        else:
            self.counts["aborts unstreamed"] += 1

    @contextmanager
    def _in_flight(self, request_id: str | None) -> Iterator[None]:
        if request_id is None:
            yield
            return
        self.counts["same id at once"] += self._ids_in_flight[request_id] > 0
        self._ids_in_flight[request_id] += 1
        try:
            yield
        finally:
            self._ids_in_flight[request_id] -= 1

    async def _exchange(
        self, client: httpx.AsyncClient, task: Task
    ) -> tuple[list[dict[str, Any]], bool]:
        """What was received, and whether that is all: the client may have gone away before."""
        body = {"model": "tiny", **task.body}
        lines: list[str] = []
        try:
            async with (
                asyncio.timeout(task.leave_after_s),
                client.stream("POST", task.path, json=body, headers=task.headers) as response,
            ):
                assert response.status_code == 200, await response.aread()
                if not task.stream:
                    return [orjson.loads(await response.aread())], True
                async for line in response.aiter_lines():
                    if line:
                        lines.append(line)
                    if (
                        task.leave_after_chunks is not None
                        and len(lines) >= task.leave_after_chunks
                    ):
                        break
        except TimeoutError:
            pass
        if lines and lines[-1] == "data: [DONE]":
            return list(read_events(iter(lines))), True
        return [orjson.loads(line[len("data: ") :]) for line in lines], False

    def _check(self, task: Task, received: list[dict[str, Any]], complete: bool) -> None:
        """The chunks of a stream, or the body of another response."""
        received = located(received, f"{self._server.url}/v1")
        choices = [choice for body in received for choice in body["choices"]]
        self._count_prefix_hits(received)
        if not complete:
            self._count_abort(choices)
        check_names(task, [*received, *choices])
        if not task.opted_in:
            self._remember_what_it_wrote(task, choices)
            return
        if task.stream and "stream_interval" not in task.body:
            self._count_several_tokens(choices)
        if complete or not task.at_end:
            self._check_routing(task, received, complete)
        if complete:
            self._count_stops(choices)

    def _check_routing(self, task: Task, received: list[dict[str, Any]], complete: bool) -> None:
        """Of a whole response, or of what came of a stream until the client left."""
        answers = self._answers(task, received)
        weights: list[Answer] = []
        if task.weights:
            weights = self._answers(task, [*map(with_weights_as_rows, received)])
        if complete:
            assert len(answers) == max(len(task.prompts), 1) * task.n
        # In what came of several choices it is not known which is which.
        if complete or task.has_one_choice:
            self._check_answers(task, answers, weights)

    def _remember_what_it_wrote(self, task: Task, choices: list[dict[str, Any]]) -> None:
        """A later turn hits what a request, which did not opt in, has written."""
        if not task.stream and len(task.prompts) == 1 and task.n == 1:
            self._remember([*task.prompts[0], *choices[0]["token_ids"]])

    def _count_prefix_hits(self, received: list[dict[str, Any]]) -> None:
        for body in received:
            details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
            self.counts["prefix hits, requests"] += bool(details.get("cached_tokens"))

    def _count_abort(self, choices: list[dict[str, Any]]) -> None:
        has_begun = any(choice.get("token_ids") for choice in choices)
        self.counts["aborts in mid-stream" if has_begun else "aborts before the first token"] += 1

    def _count_several_tokens(self, choices: list[dict[str, Any]]) -> None:
        self.counts["chunks with several tokens"] += sum(
            len(choice.get("token_ids") or []) > 1 for choice in choices
        )

    def _count_stops(self, choices: list[dict[str, Any]]) -> None:
        reasons = [choice.get("stop_reason") for choice in choices if choice.get("finish_reason")]
        strings = [reason for reason in reasons if isinstance(reason, str)]
        tokens = [reason for reason in reasons if isinstance(reason, int)]
        self.counts["ended by a stop string"] += len(strings)
        self.counts["ended by a stop token"] += len(tokens)

    @staticmethod
    def _answers(task: Task, received: list[dict[str, Any]]) -> list[Answer]:
        if task.stream:
            return [
                received_answer
                for received_answer in answers_of_stream(received, task.start, task.n, task.at_end)
                if received_answer.tokens
            ]
        return answers_of(received[0], task.start)

    def _check_answers(self, task: Task, answers: list[Answer], weights: list[Answer]) -> None:
        """Each of `weights` has the weights of the answer at its place as its rows; empty if none
        were asked for."""
        counts = self.counts
        assert len(weights) == len(answers) * task.weights
        for index, answer in enumerate(answers):
            answer.prompt = task.prompts[index // task.n] if task.prompts else answers[0].prompt
            check(answer, self._oracle)
            counts["answers checked"] += 1
            counts["rows checked"] += len(rows_of(answer))
            if weights:
                rows, tokens = rows_of(answer), [*answer.prompt, *answer.tokens[:-1]]
                off = check_weights(
                    rows_of(weights[index]), rows, tokens, self._oracle, answer.start
                )
                self.weights_off = max(self.weights_off, off)
                how = "streamed" if task.stream else "not streamed"
                counts[f"weights checked, {how}"] += rows.size
                counts["answers whose weights float64 decided"] += off >= WEIGHTS_OFF
            counts["ended by the end token"] += (
                answer.finish_reason == "stop" and answer.tokens[-1] == END_TOKEN
            )
        counts["choices that ended early"] += (
            task.n > 1 and len({len(answer.tokens) for answer in answers}) > 1
        )
        if len(answers) == 1 and answers[0].finish_reason is not None:
            self._remember([*answers[0].prompt, *answers[0].tokens])
            if task.body["temperature"] == 0:
                self._mix.repeatable.append(task)

    def _remember(self, tokens: list[int]) -> None:
        if len(tokens) < LONGEST_KNOWN:
            self._mix.answered.append(tokens)


def check_names(task: Task, holders: list[dict[str, Any]]) -> None:
    """Checks that chunks and choices have fields of routing and of weights only if these were asked
    for."""
    names = {name for holder in holders for name in holder if "routed_expert" in name}
    assert task.opted_in or not names
    assert task.weights or not any("weights" in name for name in names)


@contextmanager
def serving_profile(model: Path, log: Path, profile: str) -> Iterator[Server]:
    wanted = PROFILES[profile]
    module = ASYNC if wanted.is_async else OURS
    # numba's threads, which n-gram drafts start, are many times slower in a fork
    how = {"env": ENV, "module": module, "as_users_do": profile == "ngram"}
    with serving(model, log, *FEW_BLOCKS, *wanted.flags, **how) as server:
        assert server.is_async() is wanted.is_async
        yield server


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--profile", choices=sorted(PROFILES), default="async")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        make_tiny_model(model)
        with serving_profile(model, Path(folder) / "log", args.profile) as server:
            problems = Torture(server, Oracle(model), args.profile, args.requests, args.seed).run()
    print("\n".join(problems) or "PASSED")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
