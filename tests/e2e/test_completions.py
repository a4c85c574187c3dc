"""Completions on a real engine: every row of every answer against a Hugging Face forward pass."""

import asyncio
import random
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from routed_experts.capture.message import SMALL_ARRAY_BYTES
from tests.conftest import BLOCK_SIZE, CHUNK
from tests.e2e.harness import (
    ASK,
    ON_GPU,
    Answer,
    Oracle,
    Server,
    answers_of,
    answers_of_stream,
    check,
    decode,
    prompt_of,
    read_events,
    same,
    wait_until_idle,
)

pytestmark = pytest.mark.e2e


def one(server: Server, start: int = 0, **body: Any) -> Answer:
    """The single choice of a request, asked for both ways, which must agree bit for bit."""
    if start:
        body["routed_experts_prompt_start"] = start
    (unstreamed,) = answers_of(server.complete(**ASK, **body), start)
    (streamed,) = answers_of_stream(server.stream(**ASK, **body), start)
    same(unstreamed, streamed)
    return unstreamed


@pytest.mark.parametrize(
    "length",
    [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 7],
)
def test_prompt_lengths(server: Server, oracle: Oracle, length: int) -> None:
    """Around one token, block boundaries and prefill chunks; the second request hits the first one's prefix."""
    check(one(server, prompt=prompt_of(length, seed=length), max_tokens=9, ignore_eos=True), oracle)


def test_one_new_token(server: Server, oracle: Oracle) -> None:
    answer = one(server, prompt=prompt_of(40, seed=1), max_tokens=1)
    assert answer.rows.shape == (0, 5, 4)
    check(answer, oracle)


def test_experts_are_in_the_routers_order(server: Server, oracle: Oracle) -> None:
    """By falling score with vLLM's router for CUDA; the one for CPUs takes an unsorted top-k."""
    answer = one(server, prompt=prompt_of(99, seed=3), max_tokens=60, ignore_eos=True)
    scores = oracle.logits([*answer.prompt, *answer.tokens[:-1]])
    ordered = np.sort(scores, axis=2)
    clear = (ordered[:, :, 1:] - ordered[:, :, :-1]).min(axis=2) > 1e-4  # no two so near that rounding decides
    assert clear.mean() > 0.9
    rows = np.concatenate([answer.prompt_rows, answer.rows])
    expected = torch.from_numpy(scores).topk(4, sorted=ON_GPU).indices.numpy()
    assert np.array_equal(rows[clear], expected[clear])


@pytest.mark.parametrize("start", [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE + 3, 98, 99])
def test_prompt_start(server: Server, oracle: Oracle, start: int) -> None:
    """In the middle of a block, at P - 1 and at P (where other servers have crashed)."""
    answer = one(server, start=start, prompt=prompt_of(99, seed=2), max_tokens=5, ignore_eos=True)
    assert len(answer.prompt_rows) == 99 - start
    check(answer, oracle)


def test_ends_by_stop_token_and_by_length(server: Server, oracle: Oracle) -> None:
    free = one(server, prompt=prompt_of(12, seed=3), max_tokens=12, ignore_eos=True)
    token = free.tokens[5]
    stopped = one(server, prompt=prompt_of(12, seed=3), max_tokens=12, ignore_eos=True, stop_token_ids=[token])
    assert stopped.finish_reason == "stop"
    assert len(stopped.tokens) == free.tokens.index(token) + 1
    assert free.finish_reason == "length"
    for answer in (free, stopped):
        check(answer, oracle)


def test_ends_by_end_token(server: Server, oracle: Oracle) -> None:
    """A bias towards the end token, which then ends the text at once."""
    answer = one(server, prompt=prompt_of(12, seed=4), max_tokens=12, min_tokens=3, logit_bias={"258": 100})
    assert answer.finish_reason == "stop"
    assert len(answer.tokens) == 4
    check(answer, oracle)


def test_ends_by_stop_string(server: Server, oracle: Oracle) -> None:
    """The end is found in the API process; the engine has gone on by then."""
    free = one(server, prompt=prompt_of(20, seed=5), max_tokens=24, ignore_eos=True)
    stop = free.text[8:10]
    answer = one(server, prompt=prompt_of(20, seed=5), max_tokens=24, ignore_eos=True, stop=[stop])
    assert answer.finish_reason == "stop"
    assert len(answer.tokens) == free.text.index(stop) + 2
    check(answer, oracle)


def test_same_tokens_and_logprobs_with_and_without_routing(server: Server) -> None:
    body = {"prompt": prompt_of(70, seed=6), "max_tokens": 12, "logprobs": 3, "return_token_ids": True}
    plain, routed = server.complete(**body), server.complete(**body, return_routed_experts=True)
    assert plain["choices"][0]["token_ids"] == routed["choices"][0]["token_ids"]
    assert plain["choices"][0]["logprobs"] == routed["choices"][0]["logprobs"]
    assert plain["usage"] == routed["usage"]
    assert "prompt_routed_experts" not in plain
    assert "routed_experts" not in plain["choices"][0]
    del routed["prompt_routed_experts"], routed["choices"][0]["routed_experts"]
    for answer in (plain, routed):
        del answer["id"], answer["created"]
    assert plain == routed


def test_streams_without_routing_have_no_new_key(server: Server) -> None:
    for chunk in server.stream(prompt="abc", max_tokens=4):
        assert "prompt_routed_experts" not in chunk
        assert all("routed_experts" not in choice for choice in chunk["choices"])


def test_hits_on_a_prefix_that_was_written_without_routing(server: Server, oracle: Oracle) -> None:
    prompt = prompt_of(4 * BLOCK_SIZE + 5, seed=7)
    hits = server.metric("vllm:prefix_cache_hits_total")
    server.complete(prompt=prompt, max_tokens=2)
    answers = answers_of(server.complete(**ASK, prompt=prompt, max_tokens=6, ignore_eos=True))
    assert server.metric("vllm:prefix_cache_hits_total") - hits == 4 * BLOCK_SIZE
    check(answers[0], oracle)


def test_hits_on_generated_tokens(server: Server, oracle: Oracle) -> None:
    """The next turn of a conversation: its prompt is the last turn's prompt and answer."""
    first = one(server, prompt=prompt_of(30, seed=8), max_tokens=50, ignore_eos=True)
    turn = [*first.prompt, *first.tokens, *prompt_of(9, seed=9)]
    second = one(server, prompt=turn, max_tokens=5, ignore_eos=True)
    check(second, oracle)
    assert np.array_equal(second.prompt_rows[: 30 + 49], np.concatenate([first.prompt_rows, first.rows]))


def test_several_choices(server: Server, oracle: Oracle) -> None:
    """Without a seed: on CPU, vLLM's engine dies of one in a batch with others."""
    body = {"prompt": prompt_of(45, seed=10), "max_tokens": 20, "n": 3, "temperature": 1.0}
    unstreamed = answers_of(server.complete(**ASK, **body))
    streamed = answers_of_stream(server.stream(**ASK, **body), per_prompt=3)
    assert len(unstreamed) == len(streamed) == 3
    for answer in (*unstreamed, *streamed):
        answer.prompt = body["prompt"]  # vLLM streams prompt_token_ids with some of the choices only
        check(answer, oracle)


def test_a_list_of_prompts_with_several_choices(server: Server, oracle: Oracle) -> None:
    prompts = [prompt_of(length, seed=length) for length in (3, 70, 33)]
    body = {"prompt": prompts, "max_tokens": 7, "n": 2, "temperature": 1.0, "ignore_eos": True}
    unstreamed = answers_of(server.complete(**ASK, **body))
    streamed = answers_of_stream(server.stream(**ASK, **body), per_prompt=2)
    assert len(unstreamed) == len(streamed) == 6
    for answers in (unstreamed, streamed):
        for index, answer in enumerate(answers):
            answer.prompt = prompts[index // 2]
            check(answer, oracle)


def test_prompt_rows_too_large_for_a_common_message(server: Server, oracle: Oracle) -> None:
    """They come apart from the tokens of requests that decode meanwhile."""
    prompts = [prompt_of(5, seed=21), prompt_of(470, seed=22), prompt_of(9, seed=23)]
    assert np.prod([len(prompts[1]), 5, 4]) * 2 > SMALL_ARRAY_BYTES
    body = {"prompt": prompts, "max_tokens": 30, "ignore_eos": True}
    unstreamed = answers_of(server.complete(**ASK, **body))
    streamed = answers_of_stream(server.stream(**ASK, **body))
    for answers in (unstreamed, streamed):
        assert len(answers) == 3
        for answer, prompt in zip(answers, prompts, strict=True):
            answer.prompt = prompt
            check(answer, oracle)


def test_a_list_of_one_prompt_answers_with_a_list(server: Server) -> None:
    response = server.complete(prompt=["abc"], max_tokens=2, return_routed_experts=True)
    assert [array["shape"] for array in response["prompt_routed_experts"]] == [[3, 5, 4]]


def test_text_prompt_and_echo(server: Server, oracle: Oracle) -> None:
    response = server.complete(**ASK, prompt="Hello", max_tokens=4, echo=True, ignore_eos=True, logprobs=1)
    (answer,) = answers_of(response)
    check(answer, oracle)
    only_prompt = server.complete(prompt="Hello", max_tokens=0, echo=True, return_routed_experts=True)
    assert only_prompt["choices"][0]["routed_experts"]["shape"] == [0, 5, 4]
    assert only_prompt["prompt_routed_experts"]["shape"] == [5, 5, 4]
    (streamed,) = server.stream(prompt="Hello", max_tokens=0, echo=True, return_routed_experts=True)
    assert streamed["prompt_routed_experts"] == only_prompt["prompt_routed_experts"]
    assert "routed_experts" not in streamed["choices"][0]


def test_joined_layout(server: Server) -> None:
    body = {"prompt": prompt_of(40, seed=11), "max_tokens": 6, "ignore_eos": True, "return_routed_experts": True}
    split = server.complete(**body)
    rows = np.concatenate([decode(split["prompt_routed_experts"])[7:], decode(split["choices"][0]["routed_experts"])])
    joined = {**body, "routed_experts_layout": "joined", "routed_experts_start_len": 7}
    response = server.complete(**joined)
    assert "prompt_routed_experts" not in response
    assert response["choices"][0]["routed_experts"]["start"] == 7
    assert np.array_equal(decode(response["choices"][0]["routed_experts"]), rows)
    chunks = server.stream(**joined)
    assert not any("prompt_routed_experts" in chunk for chunk in chunks)
    arrays = [chunk["choices"][0]["routed_experts"] for chunk in chunks if "routed_experts" in chunk["choices"][0]]
    behind = np.cumsum([array["shape"][0] for array in arrays])
    assert [array["start"] for array in arrays] == [7, *(7 + behind[:-1])]  # a slow reader's chunks are merged
    assert arrays[0]["shape"][0] >= 33
    assert np.array_equal(np.concatenate([decode(array) for array in arrays]), rows)


@pytest.mark.parametrize("dtype", ["int16", "uint8", "int32", "auto"])
def test_forms_and_dtypes(server: Server, dtype: str) -> None:
    import base64
    import io

    body = {"prompt": "forms", "max_tokens": 4, "ignore_eos": True, "return_routed_experts": True}
    rows = decode(server.complete(**body)["choices"][0]["routed_experts"])
    wire = np.dtype("uint8" if dtype == "auto" else dtype)

    def answer(form: str) -> Any:
        response = server.complete(**body, routed_experts_format=form, routed_experts_dtype=dtype)
        return response["choices"][0]["routed_experts"]

    as_object = answer("object")
    assert list(as_object) == ["data", "shape", "dtype", "start", "missing"]
    assert as_object["dtype"] == wire.name
    assert np.array_equal(decode(as_object), rows)
    loaded = np.load(io.BytesIO(base64.b64decode(answer("npy"))), allow_pickle=False)
    assert loaded.dtype == wire
    assert np.array_equal(loaded, rows)
    assert base64.b64decode(answer("raw")) == rows.astype(wire).tobytes()
    assert answer("list") == rows.tolist()


def test_usage_chunk_has_no_rows(server: Server) -> None:
    chunks = server.stream(
        prompt="abc", max_tokens=3, return_routed_experts=True, stream_options={"include_usage": True}
    )
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert "prompt_routed_experts" not in chunks[-1]


def test_structured_output(server: Server, oracle: Oracle) -> None:
    answer = one(server, prompt=prompt_of(10, seed=12), max_tokens=8, structured_outputs={"choice": ["yes", "no"]})
    assert answer.text in ("yes", "no")
    check(answer, oracle)


@pytest.mark.parametrize("interval", [3, 100])
def test_stream_interval(server: Server, oracle: Oracle, interval: int) -> None:
    """Several tokens in one chunk."""
    body = {"prompt": prompt_of(33, seed=13), "max_tokens": 11, "ignore_eos": True}
    (answer,) = answers_of_stream(server.stream(**ASK, **body, stream_interval=interval))
    same(answer, one(server, **body))
    check(answer, oracle)


def test_32_concurrent_streams_with_mixed_options(server: Server, oracle: Oracle) -> None:
    async def run(index: int, client: httpx.AsyncClient) -> None:
        rng = random.Random(index)
        length = rng.randrange(1, 150)
        shared = prompt_of(96, seed=99)[: rng.randrange(0, 97)]
        prompt = [*shared, *prompt_of(length, seed=1000 + index)]
        start = rng.choice([0, 0, len(prompt) // 2, len(prompt)])
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": rng.randrange(1, 40),
            "temperature": rng.choice([0, 1]),
        }
        if index % 4 == 3:  # without the opt-in, among the others
            body["stream"] = True
        else:
            body |= {**ASK, "stream": index % 4 != 2, "routed_experts_prompt_start": start}
        if not body["stream"]:
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            answers = answers_of(response.json(), start)
        else:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                lines = [line async for line in response.aiter_lines()]
            chunks = list(read_events(iter(lines)))
            if index % 4 == 3:
                assert not any("prompt_routed_experts" in chunk for chunk in chunks)
                return
            answers = answers_of_stream(chunks, start)
        check(answers[0], oracle)

    async def run_all() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            await asyncio.gather(*(run(index, client) for index in range(32)))

    asyncio.run(run_all())


def test_client_that_leaves_early_leaves_nothing_behind(server: Server) -> None:
    body = {"model": "tiny", "prompt": prompt_of(50, seed=14), "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.client() as client:
        for _ in range(3):
            with client.stream("POST", "/v1/completions", json={**body, "return_routed_experts": True}) as response:
                next(response.iter_lines())
    wait_until_idle(server)
