"""Situations that need engines of other configurations than the shared one: a server each, with as much as fits on it.

Every answer is checked against the oracle, and no server may hold state when its tests are done.
"""

import asyncio
import importlib.util
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.command_lines import shell_words
from tests.contract.served import serving_weights
from tests.e2e.harness import (
    ON_GPU,
    SMALL_KV,
    Answer,
    Oracle,
    Server,
    answers_of,
    answers_of_stream,
    check,
    commands_in_session,
    decode,
    free_port,
    headless,
    read_events,
    same,
    serving,
    wait_until_gone,
    wait_until_idle,
)
from tests.e2e.test_completions import ASK, one, prompt_of

pytestmark = pytest.mark.e2e

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# 23 blocks for 16 requests, of which one alone may take 16.
TINY_KV = (*SMALL_KV, "--block-size", "32", "--num-gpu-blocks-override", "24", "--max-model-len", "512")
TINY_KV += ("--max-num-seqs", "16", "--enable-prompt-tokens-details")
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}  # for /server_info, /reset_prefix_cache and /abort_requests
PREEMPTIONS = "vllm:num_preemptions_total"


@contextmanager
def left_without_state(
    model: Path,
    log: Path,
    *flags: str,
    env: dict[str, str] | None = None,
    module: str = "routed_experts.server.cli",
) -> Iterator[Server]:
    """A server that must hold no request state, and must have logged no error, when its tests are done."""
    with serving(model, log, *flags, env=env, module=module) as server:
        yield server
        wait_until_idle(server)
        errors = [line for line in log.read_text().splitlines() if " ERROR " in line]
        assert not errors, errors


@contextmanager
def left_without_state_quickly(model: Path, log: Path, *flags: str) -> Iterator[Server]:
    """The same, on a CPU in this process."""
    if ON_GPU:  # what its processes log is in their file
        with left_without_state(model, log, *flags) as server:
            yield server
        return
    errors: list[str] = []

    class Errors(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(record.getMessage())

    handler = Errors(logging.ERROR)
    loggers = [logging.getLogger(name) for name in ("vllm", "routed_experts", "uvicorn", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with serving_weights(model, *flags) as server:
            yield server
            wait_until_idle(server)
            assert not errors, errors
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def cached_tokens(response: dict[str, Any]) -> int:
    return (response["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def at_once(
    server: Server, bodies: list[dict[str, Any]], headers: dict[str, str] | None = None, path: str = COMPLETIONS
) -> list[Any]:
    """The answers to requests that run at the same time: chunks of the streamed ones, bodies of the others."""

    async def run(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
        payload = {"model": "tiny", "temperature": 0, **body}
        if not body.get("stream"):
            response = await client.post(path, json=payload, headers=headers)
            assert response.status_code == 200, response.text
            return response.json()
        async with client.stream("POST", path, json=payload, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            lines = [line async for line in response.aiter_lines()]
        return list(read_events(iter(lines)))

    async def run_all() -> list[Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300, verify=False) as client:
            return await asyncio.gather(*(run(client, body) for body in bodies))

    return asyncio.run(run_all())


def meanwhile(
    server: Server, bodies: list[dict[str, Any]], act: Callable[[httpx.AsyncClient], Awaitable[None]]
) -> list[Any]:
    """The answers to `bodies`, all at once, while `act` happens again and again."""

    async def run() -> list[Any]:
        answers = asyncio.create_task(asyncio.to_thread(at_once, server, bodies))
        async with httpx.AsyncClient(base_url=server.url, timeout=60, verify=False) as client:
            while not answers.done():
                await asyncio.sleep(0.05)
                await act(client)
        return await answers

    return asyncio.run(run())


def answer_of(got: Any, start: int = 0) -> Answer:
    """The only choice of an answer of `at_once`."""
    (answer,) = answers_of_stream(got, start) if isinstance(got, list) else answers_of(got, start)
    return answer


def crowd(seed: int, count: int = 14) -> list[dict[str, Any]]:
    """Requests that do not fit into the tiny KV cache together, every other one streamed."""
    return [
        {
            **ASK,
            "prompt": prompt_of(50 + 5 * i, seed=seed + i),
            "max_tokens": 90,
            "ignore_eos": True,
            "stream": i % 2 == 0,
        }
        for i in range(count)
    ]


def check_preempted(server: Server, oracle: Oracle, seed: int) -> None:
    """Preempted requests have the rows, bit for bit, that they have when nothing disturbs them."""
    before = server.metric(PREEMPTIONS)
    for attempt in range(5):  # how many there are depends on how close together the requests arrive
        bodies = crowd(seed + 1000 * attempt)
        crowded = [answer_of(got) for got in at_once(server, bodies)]
        for body, answer in zip(bodies, crowded, strict=True):
            check(answer, oracle)
            same(answer, answers_of(server.complete(**{**body, "stream": False}))[0])
        if server.metric(PREEMPTIONS) - before >= 3:
            return
    raise AssertionError("hardly any request was preempted")


def leave(server: Server, after_chunks: int, **body: Any) -> list[dict[str, Any]]:
    """Goes away in mid-stream; the chunks until then."""
    payload = {"model": "tiny", "temperature": 0, **ASK, **body, "stream": True}
    chunks: list[dict[str, Any]] = []
    with server.client() as client, client.stream("POST", COMPLETIONS, json=payload) as response:
        for line in response.iter_lines():
            if line == "data: [DONE]":  # all of it came at once
                break
            if line:
                chunks.append(json.loads(line[len("data: ") :]))
            if len(chunks) == after_chunks:
                break
    return chunks


def leave_after(server: Server, seconds: float, **body: Any) -> None:
    """Goes away so long after it has sent a request, whatever has come back by then."""
    payload = json.dumps({"model": "tiny", "temperature": 0, **ASK, **body, "stream": True}).encode()
    with raw_connection(server) as sock:
        sock.sendall(http_head("HTTP/1.1", payload) + payload)
        time.sleep(seconds)
    wait_until_idle(server)


def http_head(version: str, payload: bytes) -> bytes:
    fields = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(payload)}")
    return "\r\n".join((f"POST {COMPLETIONS} {version}", *fields, "", "")).encode()


@contextmanager
def raw_connection(server: Server, small_buffers: bool = False) -> Iterator[socket.socket]:
    url = httpx.URL(server.url)
    with socket.socket() as sock:
        if small_buffers:  # this side's, and through the segments' size the server's too
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        sock.connect((url.host, url.port))
        yield sock


def check_held_back(server: Server, oracle: Oracle, body: dict[str, Any]) -> list[dict[str, Any]]:
    """With token ids in every chunk, and as most clients ask: then a parser may keep whole chunks back."""
    with_tokens = server.stream(CHAT, **ASK, **body)
    (answer,) = answers_of_stream(with_tokens)
    check(answer, oracle)
    unstreamed = server.chat(**ASK, **body)
    (other,) = answers_of(unstreamed)
    assert other.tokens == answer.tokens
    assert np.array_equal(other.rows, answer.rows)
    chunks = server.stream(CHAT, return_routed_experts=True, **body)
    assert len(chunks) < len(answer.tokens)  # by how many depends on the reader too
    arrays = [choice["routed_experts"] for chunk in chunks for choice in chunk["choices"] if "routed_experts" in choice]
    assert [array["start"] for array in arrays] == [
        len(answer.prompt) + sum(other["shape"][0] for other in arrays[:i]) for i in range(len(arrays))
    ]
    assert np.array_equal(np.concatenate([decode(array) for array in arrays]), answer.rows)
    assert sum("prompt_routed_experts" in chunk for chunk in chunks) == 1
    assert np.array_equal(decode(chunks[0]["prompt_routed_experts"]), answer.prompt_rows)
    return chunks


class TestAsynchronousScheduling:
    """Two steps in flight, a KV cache too small for the load, chunks of 32 tokens."""

    @pytest.fixture(scope="class")
    def engine(self, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        log = tmp_path_factory.mktemp("async") / "log"
        flags = (*TINY_KV, "--async-scheduling", "--max-num-batched-tokens", "32")
        module = "routed_experts.server.cli" if ON_GPU else "tests.e2e.async_on_cpu"
        with left_without_state(tiny_model, log, *flags, env=DEV_MODE, module=module) as server:
            yield server

    def test_it_is_on(self, engine: Server) -> None:
        with engine.client() as client:
            config = client.get("/server_info?config_format=json").json()["vllm_config"]
        assert config["scheduler_config"]["async_scheduling"] is True

    def test_preemption(self, engine: Server, oracle: Oracle) -> None:
        check_preempted(engine, oracle, seed=100)

    def test_eviction_and_recomputation(self, engine: Server, oracle: Oracle) -> None:
        """The blocks of the first answer are overwritten by others before it is asked for again."""
        body = {"prompt": prompt_of(200, seed=200), "max_tokens": 6, "ignore_eos": True}
        first = one(engine, **body)
        check(first, oracle)
        for seed in range(201, 206):
            engine.complete(prompt=prompt_of(250, seed=seed), max_tokens=1)
        again = engine.complete(**ASK, **body)
        assert cached_tokens(again) == 0
        same(answer_of(again), first)

    def test_reset_prefix_cache_between_requests(self, engine: Server, oracle: Oracle) -> None:
        body = {"prompt": prompt_of(100, seed=210), "max_tokens": 6, "ignore_eos": True}
        first = one(engine, **body)
        warm = engine.complete(**ASK, **body)
        assert cached_tokens(warm) == 96
        with engine.client() as client:
            assert client.post("/reset_prefix_cache").json() == {"success": True}
        cold = engine.complete(**ASK, **body)
        assert cached_tokens(cold) == 0
        for response in (warm, cold):
            same(answer_of(response), first)
        check(first, oracle)

    def test_reset_prefix_cache_under_running_requests(self, engine: Server, oracle: Oracle) -> None:
        """Refused without `reset_running_requests`; with it, all of them start again with what they have."""
        bodies = [
            {**ASK, "prompt": prompt_of(40, seed=220 + i), "max_tokens": 300, "ignore_eos": True, "stream": i == 0}
            for i in range(2)  # the KV cache holds both
        ]
        alone = [answer_of(engine.complete(**{**body, "stream": False})) for body in bodies]
        before = engine.metric(PREEMPTIONS)
        replies: list[bool] = []

        async def reset(client: httpx.AsyncClient) -> None:
            if len(replies) == enough:  # else nothing but resets might happen
                return
            replies.append((await client.post("/reset_prefix_cache")).json()["success"])
            response = await client.post("/reset_prefix_cache?reset_running_requests=true")
            assert response.status_code == 200, response.text

        for _ in range(10):  # the engine may be done before it hears of a reset
            enough = len(replies) + 6
            answers = [answer_of(got) for got in meanwhile(engine, bodies, reset)]
            for answer, undisturbed in zip(answers, alone, strict=True):
                check(answer, oracle)
                same(answer, undisturbed)
            if False in replies and engine.metric(PREEMPTIONS) - before >= 4:
                return
        raise AssertionError(f"hardly any reset came while requests ran: {replies}")

    def test_client_leaves_between_chunks_of_the_prefill(self, engine: Server, oracle: Oracle) -> None:
        """How far it came is seen from the blocks that it left: the next request hits them, and has their rows."""
        in_the_middle, seconds = 0, 0.05
        for attempt in range(60):
            prompt = prompt_of(500, seed=2300 + attempt)
            leave_after(engine, seconds, prompt=prompt, max_tokens=2)
            response = engine.complete(**ASK, prompt=prompt, max_tokens=2, ignore_eos=True)
            check(answer_of(response), oracle)
            cached = cached_tokens(response)
            in_the_middle += 0 < cached < 480
            if in_the_middle == 3:
                return
            # How long a prefill takes depends on the machine, and on what else it does.
            seconds *= 1.5 if cached == 0 else 0.7 if cached >= 480 else 1
        raise AssertionError(f"only {in_the_middle} requests were aborted in the middle of their prefill")

    def test_client_leaves_before_the_first_token_while_waiting(self, engine: Server, oracle: Oracle) -> None:
        """It is still in the queue, behind requests that fill the KV cache."""
        bodies = [{**body, "prompt": prompt_of(200, seed=260 + i)} for i, body in enumerate(crowd(260, 6))]
        body = {"model": "tiny", **ASK, "prompt": prompt_of(300, seed=270), "max_tokens": 5}
        left = 0

        async def leave_at_once(client: httpx.AsyncClient) -> None:
            nonlocal left
            try:
                await client.post(COMPLETIONS, json={**body, "stream": left % 2 == 0}, timeout=0.1)
            except httpx.TimeoutException:
                left += 1

        for _ in range(10):
            for got in meanwhile(engine, bodies, leave_at_once):
                check(answer_of(got), oracle)
            if left >= 4:
                break
        assert left >= 4
        wait_until_idle(engine)

    @pytest.mark.parametrize("after", [1, 2, 20])
    def test_client_leaves_in_mid_stream(self, engine: Server, oracle: Oracle, after: int) -> None:
        """What it got is right, and so is what a later request finds in the blocks that it left."""
        prompt = prompt_of(70, seed=280 + after)
        (received,) = answers_of_stream(leave(engine, after, prompt=prompt, max_tokens=300, ignore_eos=True))
        check(received, oracle)
        wait_until_idle(engine)
        later = engine.complete(**ASK, prompt=[*prompt, *received.tokens], max_tokens=3, ignore_eos=True)
        assert cached_tokens(later) >= 64
        check(answer_of(later), oracle)

    def test_engine_aborts(self, engine: Server, oracle: Oracle) -> None:
        """A request that the engine ends has the rows of the tokens that it has, and claims no others."""

        async def abort(client: httpx.AsyncClient) -> None:
            assert (await client.post("/abort_requests", json={})).status_code == 200

        aborted = 0
        answers = [got for seed in range(300, 400, 20) for got in meanwhile(engine, crowd(seed, 12), abort)]
        for got in answers:
            if isinstance(got, list):
                choices = [choice for chunk in got for choice in chunk["choices"]]
                reason = choices[-1]["finish_reason"] if choices else "abort"
                tokens = [token for choice in choices for token in choice["token_ids"] or []]
            else:
                reason, tokens = got["choices"][0]["finish_reason"], got["choices"][0]["token_ids"]
            aborted += reason == "abort"
            if tokens:
                check(answer_of(got), oracle)
            elif isinstance(got, list):
                assert not any("routed_experts" in choice for choice in choices)
                assert not any("prompt_routed_experts" in chunk for chunk in got)
            else:
                assert got["choices"][0]["routed_experts"]["shape"][0] == 0
                assert got["prompt_routed_experts"]["shape"][0] == 0
        assert aborted > 0
        wait_until_idle(engine)

    def test_hit_on_the_blocks_of_a_running_request(self, engine: Server, oracle: Oracle) -> None:
        for seed in range(3200, 3210):
            prompt = prompt_of(140, seed=seed)
            body = {"model": "tiny", "temperature": 0, **ASK, "prompt": prompt, "max_tokens": 350, "ignore_eos": True}
            body["stream"] = True
            with engine.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
                lines = response.iter_lines()
                first = next(lines)
                other = engine.complete(**ASK, prompt=[*prompt[:130], *prompt_of(20, seed=seed)], max_tokens=2)
                still_running = engine.metric("routed_experts_requests_tracked") > 0
                chunks = list(read_events(iter([first, *lines])))
            assert cached_tokens(other) == 128
            check(answer_of(other), oracle)
            check(answer_of(chunks), oracle)
            if still_running:
                return
        raise AssertionError("the first request always ended before the second one")

    def test_same_request_id_at_once(self, engine: Server, oracle: Oracle) -> None:
        bodies = crowd(330, 6)
        for got in at_once(engine, bodies, headers={"X-Request-Id": "the-same"}):
            check(answer_of(got), oracle)

    @pytest.mark.parametrize("n", [1, 3])
    def test_slow_reader(self, engine: Server, oracle: Oracle, n: int) -> None:
        """It reads nothing until the engine is done, so that outputs merge: chunks then bring several tokens."""
        prompt = prompt_of(90, seed=340)
        body = {"model": "tiny", **ASK, "prompt": prompt, "max_tokens": 110 if n > 1 else 400, "ignore_eos": True}
        body |= {"temperature": 1 if n > 1 else 0, "n": n, "stream": True, "logprobs": 20}  # which makes chunks large
        payload = json.dumps(body).encode()
        head = http_head("HTTP/1.0", payload)
        ended = engine.metric("vllm:request_success_total")
        with raw_connection(engine, small_buffers=True) as sock:
            sock.sendall(head + payload)
            deadline = time.monotonic() + 60
            while engine.metric("vllm:request_success_total") < ended + n:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            received = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        lines = [line for line in received.decode().splitlines() if line.startswith("data: ")]  # not sizes of chunks
        chunks = list(read_events(iter(lines)))
        assert any(len(choice["token_ids"]) > 5 for chunk in chunks for choice in chunk["choices"])
        for answer in answers_of_stream(chunks, per_prompt=n):
            answer.prompt = prompt
            check(answer, oracle)


class TestSpeculativeDecoding:
    """n-gram drafts, with a KV cache too small for the load; vLLM has no asynchronous scheduling for them."""

    @pytest.fixture(scope="class")
    def engine(self, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        log = tmp_path_factory.mktemp("ngram") / "log"
        speculative = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
        flags = (*TINY_KV, "--max-num-batched-tokens", "64", "--speculative-config", json.dumps(speculative))
        with left_without_state_quickly(tiny_model, log, *flags) as server:
            yield server

    @staticmethod
    def groups(server: Server, **body: Any) -> tuple[Answer, list[list[int]]]:
        """A streamed answer and the tokens of each chunk: those that were accepted in one step."""
        chunks = server.stream(**ASK, **body)
        (answer,) = answers_of_stream(chunks)
        return answer, [choice["token_ids"] for chunk in chunks for choice in chunk["choices"]]

    def test_rejected_drafts_leave_no_row(self, engine: Server, oracle: Oracle) -> None:
        names = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
        drafted, accepted = (engine.metric(name) for name in names)
        for seed in range(400, 408):
            prompt = prompt_of(5, seed=seed) * 8
            check(one(engine, prompt=prompt, max_tokens=60, ignore_eos=True), oracle)
        drafted, accepted = (
            engine.metric(name) - before for name, before in zip(names, (drafted, accepted), strict=True)
        )
        assert accepted > 0
        assert drafted - accepted > 0

    def test_stop_string_inside_an_accepted_group(self, engine: Server, oracle: Oracle) -> None:
        """The rows end with the token that completes the stop string, not with the group."""
        cut = 0
        for seed in range(410, 440):
            body = {"prompt": prompt_of(4, seed=seed) * 9, "max_tokens": 150, "ignore_eos": True}
            free, groups = self.groups(engine, **body)
            end = 0
            for group in groups:
                begin, end = end, end + len(group)
                if len(group) < 2 or len(free.text) != len(free.tokens):
                    continue
                # The shortest text that ends with the group's first token and is not found before.
                stop = next(s for k in range(begin, -1, -1) if free.text.index(s := free.text[k : begin + 1]) == k)
                answer = one(engine, **body, stop=[stop])
                assert answer.finish_reason == "stop"
                assert answer.tokens == free.tokens[: begin + 1]
                check(answer, oracle)
                cut += 1
                break
            if cut == 3:
                return
        raise AssertionError(f"only {cut} stop strings were inside an accepted group")

    def test_max_tokens_inside_an_accepted_group(self, engine: Server, oracle: Oracle) -> None:
        """A stop token cannot be put there on purpose: what n-grams propose has been seen before. The torture does."""
        cut = 0
        for seed in range(470, 500):
            body = {"prompt": prompt_of(4, seed=seed) * 9, "max_tokens": 150, "ignore_eos": True}
            free, groups = self.groups(engine, **body)
            end = 0
            for group in groups:
                begin, end = end, end + len(group)
                if len(group) >= 2:
                    shorter = one(engine, **{**body, "max_tokens": begin + 1})
                    assert shorter.tokens == free.tokens[: begin + 1]
                    check(shorter, oracle)
                    cut += 1
                    break
            if cut == 3:
                return
        raise AssertionError(f"only {cut} answers ended inside an accepted group")

    def test_preemption(self, engine: Server, oracle: Oracle) -> None:
        check_preempted(engine, oracle, seed=500)


class TestWithoutPrefixCache:
    """No prefix cache, chunks of 16 tokens, blocks of 64, several tokens a chunk, and parsers that hold text back."""

    INTERVAL = 4
    END_OF_THINKING = 260

    @pytest.fixture(scope="class")
    def thinker(self, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The tiny model with two more tokens, which a reasoning parser looks for."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
        assert tokenizer.add_tokens(["<think>", "</think>"]) == 2
        assert tokenizer.convert_tokens_to_ids("</think>") == self.END_OF_THINKING
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        directory = tmp_path_factory.mktemp("thinker") / "tiny"
        model.save_pretrained(directory)
        model.generation_config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return directory

    @pytest.fixture(scope="class")
    def thinker_oracle(self, thinker: Path) -> Oracle:
        return Oracle(thinker)

    @pytest.fixture(scope="class")
    def engine(self, thinker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        log = tmp_path_factory.mktemp("no-prefix-cache") / "log"
        flags = (*SMALL_KV, "--block-size", "64", "--num-gpu-blocks-override", "13", "--max-model-len", "512")
        flags += ("--max-num-seqs", "16", "--max-num-batched-tokens", "16", "--no-enable-prefix-caching")
        flags += ("--no-async-scheduling", "--stream-interval", str(self.INTERVAL), "--enable-prompt-tokens-details")
        flags += ("--reasoning-parser", "deepseek_r1", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
        with left_without_state_quickly(thinker, log, *flags) as server:
            yield server

    def test_nothing_is_hit(self, engine: Server, thinker_oracle: Oracle) -> None:
        body = {"prompt": prompt_of(200, seed=600), "max_tokens": 9, "ignore_eos": True}
        check(one(engine, **body), thinker_oracle)
        assert cached_tokens(engine.complete(**ASK, **body)) == 0

    @pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 130])
    def test_prompt_lengths(self, engine: Server, thinker_oracle: Oracle, length: int) -> None:
        check(one(engine, prompt=prompt_of(length, seed=length), max_tokens=9, ignore_eos=True), thinker_oracle)

    def test_preemption(self, engine: Server, thinker_oracle: Oracle) -> None:
        check_preempted(engine, thinker_oracle, seed=610)

    def test_stream_interval_of_the_server(self, engine: Server, thinker_oracle: Oracle) -> None:
        """The first token comes at once, then so many at a time; more where the reader is slower than the engine."""
        chunks = engine.stream(**ASK, prompt=prompt_of(20, seed=620), max_tokens=14, ignore_eos=True)
        assert {1, 5, 9, 13, 14} >= set(np.cumsum([len(chunk["choices"][0]["token_ids"]) for chunk in chunks]).tolist())
        check(answer_of(chunks), thinker_oracle)

    def test_reasoning_that_the_parser_sets_apart(self, engine: Server, thinker_oracle: Oracle) -> None:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Think!"}], "max_tokens": 40}
        body |= {"logit_bias": {str(self.END_OF_THINKING): 1}, "ignore_eos": True}
        chunks = check_held_back(engine, thinker_oracle, body)
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert any(delta.get("reasoning") for delta in deltas)


def test_tool_call_that_the_parser_holds_back(server: Server, oracle: Oracle) -> None:
    """On the shared server, which has a parser for them; structured output makes the model write one."""
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "How is it in Rome?"}], "max_tokens": 120}
    body |= {"tools": [{"type": "function", "function": function}], "structured_outputs": {"choice": [text]}}
    chunks = check_held_back(server, oracle, body)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    arguments = [call["function"].get("arguments") for delta in deltas for call in delta.get("tool_calls") or []]
    assert json.loads("".join(part for part in arguments if part)) == {"city": "Rome"}


def check_mix(server: Server, oracle: Oracle, seed: int) -> None:
    """Cold and warm, streamed and not, many at a time."""
    bodies = [
        {**ASK, "prompt": [*prompt_of(70, seed=seed), *prompt_of(1 + 9 * i, seed=seed + i)], "max_tokens": 20}
        for i in range(12)
    ]
    bodies = [{**body, "stream": i % 2 == 0} for i, body in enumerate(bodies)]
    cold = [answer_of(got) for got in at_once(server, bodies)]
    warm = [answer_of(got) for got in at_once(server, [{**body, "stream": not body["stream"]} for body in bodies])]
    for a, b in zip(cold, warm, strict=True):
        check(a, oracle)
        same(a, b)


def _at_rest(server: Server, metric: str) -> float:
    """Once it does not change: one of the API processes has the engine's numbers, and it may be behind."""
    seen = [server.metric(metric)]
    while len(seen) < 4 or len(set(seen[-4:])) > 1:
        time.sleep(0.5)
        seen.append(server.metric(metric))
    return seen[-1]


def test_two_api_servers(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """Each API process takes its own requests' rows off the one engine's outputs."""
    with serving(tiny_model, tmp_path / "log", *TINY_KV, "--api-server-count", "2") as server:
        for seed in (700, 720, 740):
            check_mix(server, oracle, seed)
        returned = server.metric("routed_experts_rows_returned_total")
        captured = _at_rest(server, "routed_experts_rows_captured_total")
        for seed in range(750, 762):  # whichever of the two answers
            one(server, prompt=prompt_of(20, seed=seed), max_tokens=4, ignore_eos=True)  # twice
        wait_until_idle(server)
        assert server.metric("routed_experts_rows_returned_total") - returned == 24 * (20 + 3)
        assert 24 * 23 <= _at_rest(server, "routed_experts_rows_captured_total") - captured <= 24 * 24
        for _ in range(6):
            leave(server, 3, prompt=prompt_of(30, seed=760), max_tokens=300, ignore_eos=True)
        for _ in range(8):
            wait_until_idle(server)
        log = (tmp_path / "log").read_text()  # before it ends: vLLM may stop the engine before an API process
    assert "ApiServer_0" in log
    assert "ApiServer_1" in log
    assert " ERROR " not in log


@pytest.mark.skipif(ON_GPU, reason="needs a GPU for each rank")
def test_tensor_parallel(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    with left_without_state(tiny_model, tmp_path / "log", *TINY_KV, "-tp", "2") as server:
        check_mix(server, oracle, 800)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="needs a GPU for each rank")
def test_sequence_parallel(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """Each tensor-parallel rank routes a part of the tokens. A data-parallel rank without any takes part by padding."""
    flags = (*TINY_KV, "-tp", "2", "-dp", "2", "--enable-expert-parallel", "--data-parallel-rpc-port", str(free_port()))
    flags += ("--api-server-count", "1")
    with left_without_state(tiny_model, tmp_path / "log", *flags, module="tests.e2e.ranks_on_cpu") as server:
        for length in (1, 2, 31, 64, 65, 150):
            (answer,) = answers_of(server.complete(**ASK, prompt=prompt_of(length, 830 + length), max_tokens=6))
            check(answer, oracle)
        check_mix(server, oracle, 850)


@contextmanager
def two_nodes(
    model: Path, folder: Path, commands: str, *more: str, module: str = "routed_experts.server.cli"
) -> Iterator[Server]:
    """A server of which another node is a part, as the documentation's two commands start them; both on this host."""
    values = {"FIRST": "127.0.0.1", "13345": str(free_port()), "13346": str(free_port())}
    first, second = ([values.get(word, word) for word in words[3:]] for words in shell_words(commands))
    env = {"VLLM_HOST_IP": "127.0.0.1"}
    with (
        headless(model, folder / "second", *TINY_KV, *second, env=env, module=module) as node,
        serving(model, folder / "log", *TINY_KV, *first, *more, env=env, module=module, beside=[node]) as server,
    ):
        yield server
        assert " ERROR " not in (folder / "log").read_text() + (folder / "second").read_text()


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_nodes.py does this there, with a GPU each")
def test_tensor_parallel_on_two_nodes(tiny_model: Path, oracle: Oracle, tmp_path: Path, documented: list[str]) -> None:
    with two_nodes(tiny_model, tmp_path, documented[0]) as server:
        check_mix(server, oracle, 840)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_nodes.py does this there, with vLLM's own collectives")
def test_data_parallel_with_a_headless_node(
    tiny_model: Path, oracle: Oracle, tmp_path: Path, documented: list[str]
) -> None:
    """The second engine and its worker are another node's, and its rows come back over TCP."""
    module = "tests.e2e.ranks_on_cpu"
    with two_nodes(tiny_model, tmp_path, documented[0], "--api-server-count", "1", module=module) as server:
        check_mix(server, oracle, 860)
        wait_until_idle(server)
        for engine in ("0", "1"):
            assert server.metric("routed_experts_rows_captured_total", engine=engine) > 0


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/gpu/test_nodes.py does this there, with a GPU for each rank")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_ray_executor(tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """Told to end, the one process that its user knows of leaves none of Ray's behind."""
    flags = (*TINY_KV, "-tp", "2", "--distributed-executor-backend", "ray")
    with serving(tiny_model, tmp_path / "log", *flags, module="tests.e2e.ray_on_cpu") as server:
        check_mix(server, oracle, 900)
        check_preempted(server, oracle, seed=920)
        wait_until_idle(server)
        assert any("raylet" in command for command in commands_in_session(server))
        server.process.terminate()
        assert server.process.wait(60) == 0
        wait_until_gone(server)
    assert " ERROR " not in (tmp_path / "log").read_text()


@pytest.mark.skipif(ON_GPU, reason="the layers that skip steps there are bound in another way")
def test_a_layer_that_skips_some_steps_is_found_at_start(tiny_model: Path, tmp_path: Path) -> None:
    """Its first decode steps, and a short prompt alone, are complete."""
    log, flags = tmp_path / "log", (*SMALL_KV, "--max-model-len", "512")
    with (
        pytest.raises(AssertionError, match="did not start"),
        serving(tiny_model, log, *flags, module="tests.e2e.skipping_layer"),
    ):
        pass
    assert "The MoE layers at rows [0, 1, 2, 3, 4] wrote no ids for some of the tokens" in log.read_text()
