"""Responses of every format, streamed in every way, are collected whole; incomplete ones raise."""

import asyncio
import base64
import copy
import json
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.protocol.codec import UNKNOWN_STEP, Format
from routed_experts.protocol.collect import Collector, Routing, RoutingError, collect, collect_async
from tests.protocol.answers import (
    JSON,
    LAYERS,
    TOP_K,
    RoutedPrompt,
    answer,
    rows_of,
    sse,
    step_of,
    stream,
    weights_of,
)
from tests.protocol.forms import encode

SETTINGS = settings(max_examples=60, deadline=None, database=None, derandomize=True)
RAW: dict[str, Any] = {"num_layers": LAYERS, "top_k": TOP_K}
Chunks = list[dict[str, Any]]


def routed(p: int = 9, g: int = 6, n: int = 1, **options: Any) -> RoutedPrompt:
    return RoutedPrompt(
        rows_of(p, seed=p), [rows_of(g - 1, seed=50 + i) for i in range(n)], **options
    )


def check(routing: Routing, expected: RoutedPrompt, choice: int = 0) -> None:
    whole = expected.whole(choice)
    assert routing.rows.dtype == np.int16
    assert np.array_equal(routing.rows, whole)
    assert (routing.start, routing.end) == (expected.start, expected.start + len(whole))
    assert routing.missing == int((routing.rows == -1).any(axis=(1, 2)).sum())
    assert np.array_equal(routing.prompt_rows, expected.prompt[expected.start :])
    assert np.array_equal(routing.generated_rows, expected.choices[choice])
    assert (routing.prompt_len, routing.finish_reason) == (len(expected.prompt), "length")
    ids = tuple(expected.prompt_token_ids), tuple(expected.token_ids(choice))
    assert (routing.prompt_token_ids, routing.token_ids) == ids
    if len(whole):  # a stream without rows has no array
        assert (routing.weights is not None) == expected.weights
    if routing.weights is not None:
        check_weights(routing.weights, weights_of(whole), is_list=expected.fmt == "list")
    if len(whole):
        assert (routing.steps is not None) == expected.steps
    if routing.steps is not None:
        is_unknown = (whole < 0).any(axis=(1, 2))
        steps = [step_of(at) for at in range(routing.start, routing.end)]
        assert np.array_equal(routing.steps, np.where(is_unknown, UNKNOWN_STEP, steps))


def check_weights(weights: np.ndarray, expected: np.ndarray, is_list: bool) -> None:
    """NaN has all bits set, but in lists, where it was null."""
    assert np.array_equal(weights, expected, equal_nan=True)
    if not is_list:
        assert weights.tobytes() == expected.tobytes()


def check_all(routings: list[Routing], *prompts: RoutedPrompt) -> None:
    expected = [(prompt, choice) for prompt in prompts for choice in range(len(prompt.choices))]
    assert [routing.index for routing in routings] == list(range(len(expected)))
    for routing, (prompt, choice) in zip(routings, expected, strict=True):
        check(routing, prompt, choice)


@st.composite
def responses(draw: Any) -> list[RoutedPrompt]:
    """One or two prompts of one request, with the choices of each."""
    fmt, layout = (
        draw(st.sampled_from(get_args(Format))),
        draw(st.sampled_from(["split", "joined"])),
    )
    dtype, g, n = (
        draw(st.sampled_from(["int16", "uint8", "int32"])),
        draw(st.integers(1, 6)),
        draw(st.integers(1, 3)),
    )
    lengths = draw(st.lists(st.integers(2, 9), min_size=1, max_size=2))
    start = draw(st.integers(0, min(lengths)))
    options = {
        "fmt": fmt,
        "layout": layout,
        "dtype": dtype,
        "start": start,
        "weights": draw(st.booleans()),
        "steps": draw(st.booleans()),
    }
    prompts = [routed(p, g, n, first_token=500 * i, **options) for i, p in enumerate(lengths)]
    if dtype != "uint8":
        for at in (
            draw(st.sets(st.integers(start, min(lengths) - 1), max_size=2))
            if start < min(lengths)
            else ()
        ):
            prompts[0].prompt[at] = -1
    return prompts


@SETTINGS
@given(responses(), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_collect(prompts: list[RoutedPrompt], piece: int, per_chunk: int, is_list: bool) -> None:
    one = prompts[0]
    options: dict[str, Any] = {
        **RAW,
        "dtype": one.dtype,
        "prompt_start": one.start,
        "n": len(one.choices),
    }
    body = answer(*prompts, is_list=is_list)
    check_all(collect(body, **options), *prompts)
    check_all(
        collect(iter(stream(*prompts, piece=piece, per_chunk=per_chunk)), **options), *prompts
    )
    packed = copy.deepcopy(body)
    for holder in (packed, *packed["choices"]):
        holder |= {name: binary(value) for name, value in holder.items() if "routed_expert" in name}
    check_all(collect(msgspec.msgpack.decode(msgspec.msgpack.encode(packed)), **options), *prompts)
    del options["n"]  # needed for several prompts only
    for source in (body, iter(stream(*prompts, piece=piece))):
        if len(prompts) == 1 or one.layout == "joined":
            check_all(collect(source, **options), *prompts)
        else:
            refused("give n", source, **options)


def binary(array: Any) -> Any:
    """An array as it is in MessagePack: bytes in place of base64."""
    if isinstance(array, str):
        return base64.b64decode(array)
    if isinstance(array, dict):
        return {**array, "data": base64.b64decode(array["data"])}
    # of prompts, or nested lists
    return [binary(part) if isinstance(part, str | dict) else part for part in array]


def test_prompts_with_different_starts_and_without_rows() -> None:
    """The object format has each array's start. An empty list has no shape, and does not contradict
    others."""
    prompts = [routed(9, 4, start=4), routed(11, 4, start=9, first_token=500)]
    check_all(collect(answer(*prompts, is_list=True), prompt_start=None, n=1), *prompts)
    prompts = [routed(9, 4, fmt="list", start=9, first_token=first) for first in (0, 500)]
    check_all(collect(answer(*prompts), prompt_start=9, n=1), *prompts)


def refused(message: str, response: Any, **options: Any) -> None:
    with pytest.raises(RoutingError, match=message):
        collect(response, **options)


PROMPTS = (routed(9, 6, n=2), routed(4, 3, n=2, first_token=500))


def test_the_prompt_of_a_choice_is_not_guessed() -> None:
    """Choices 0 and 2 came before 1 and 3: two choices of two prompts, or two prompts with one
    each?"""
    chunks, collector = stream(*PROMPTS), Collector(n=2)
    for chunk in [chunk for chunk in chunks if chunk["choices"][0]["index"] in (0, 2)][:6]:
        collector.take(chunk)
    for routing, expected in zip(collector.so_far(), PROMPTS, strict=True):
        assert np.array_equal(routing.rows, expected.whole()[: routing.end])
    refused("with choice 0 and with choice 2: for several prompts, give n", iter(chunks))


def test_prompts_or_choices_that_did_not_arrive_or_arrived_twice() -> None:
    def without(chunks: Chunks, index: int) -> Any:
        for chunk in chunks:
            if chunk["choices"][0]["index"] == index:
                chunk.pop("prompt_routed_experts", None)
        return iter(chunks)

    two = routed(9, 4), routed(9, 4, first_token=500)
    bodies = [answer(*two) for _ in range(2)]
    # rows of one prompt are not the other's
    bodies[0]["prompt_routed_experts"] = bodies[0]["prompt_routed_experts"][0]
    bodies[1]["prompt_routed_experts"] = bodies[1]["prompt_routed_experts"][:1]
    for response in (*bodies, without(stream(*two), 1)):
        refused("choice 1: the rows of its prompt did not come|1 choices for|give n", response, n=1)
    refused("choice 2: the rows of its prompt did not come", without(stream(*PROMPTS), 2), n=2)
    chunks = stream(routed(n=2))
    second = next(c for c in chunks if c["choices"][0]["index"] == 1)
    second["prompt_routed_experts"] = chunks[0]["prompt_routed_experts"]
    refused("with choice 0 and with choice 1: it comes once", iter(chunks), n=2)
    for left in ([0], [1], [0, 2], []):
        body = answer(routed(n=3))
        body["choices"] = [body["choices"][index] for index in left]
        refused(r"not all of the answer's|no choices|give n", body, n=3)


class TestServerSentEvents:
    EXPECTED = routed(n=2)
    CHUNKS: Chunks = [*stream(EXPECTED, piece=3), {"choices": [], "usage": {"prompt_tokens": 9}}]  # noqa: RUF012
    TEXT = sse(CHUNKS)

    LINES: dict[str, Callable[[bytes], list[Any]]] = {  # noqa: RUF012
        "lines": lambda text: text.split(b"\n"),
        "text": lambda text: text.decode().split("\n"),
        "with line ends": lambda text: text.splitlines(keepends=True),
        "CRLF": lambda text: text.replace(b"\n", b"\r\n").splitlines(keepends=True),
        "whole": lambda text: [text],
        "at U+2028 too": lambda text: text.decode().splitlines(),  # as httpx
        "comments": lambda text: [
            b": ping",
            *text.replace(b"\n\n", b"\n: ping\n\nevent: x\n\n").split(b"\n"),
        ],
    }

    @pytest.mark.parametrize("split", LINES)
    def test_lines(self, split: str) -> None:
        async def pieces() -> AsyncIterator[Any]:
            for piece in self.LINES[split](self.TEXT):
                await asyncio.sleep(0)
                yield piece

        check_all(collect(self.LINES[split](self.TEXT)), self.EXPECTED)
        check_all(asyncio.run(collect_async(pieces())), self.EXPECTED)
        chunks = stream(routed())
        for chunk in chunks:  # generated text that looks like an event
            chunk["choices"][0]["text"] = 'data: {"choices": [}]\n\ndata: [DONE]\u2028'
        text = sse(chunks).replace(rb"\u2028", "\u2028".encode())  # as vLLM writes it
        check_all(collect(self.LINES[split](text)), routed())

    @SETTINGS
    @given(
        st.sets(st.integers(0, len(TEXT) + 40), min_size=1, max_size=20),
        st.sampled_from([b"", b"\n", b": {x}\r\n"]),
    )
    def test_nothing_is_lost_where_lines_are_cut(self, cuts: set[int], before: bytes) -> None:
        text = before + self.TEXT
        edges = sorted(
            {0, len(text), *(cut for cut in cuts if cut < len(text)), *(cut % 50 for cut in cuts)}
        )
        try:
            collected = collect([text[a:b] for a, b in pairwise(edges)])
        except RoutingError:
            return
        check_all(collected, self.EXPECTED)

    def test_a_whole_body(self) -> None:
        text, events = json.dumps(answer(routed())), sse(stream(routed()))
        for body in (
            text,
            text.encode(),
            bytearray(text.encode()),
            memoryview(text.encode()),
            events,
        ):
            check_all(collect(body), routed())

    def test_invalid_streams(self) -> None:
        error = {"error": {"message": "the engine died", "code": 500}}
        lines = self.TEXT.splitlines()
        for keep in (1, 4, -2):
            refused(r"ended without \[DONE\]", lines[:keep])
        for keep in (300, 2000):
            refused(r"ended without \[DONE\]", [self.TEXT[:keep]])
        for rest in (b"ta: {}", b"{}", b"[DONE]", b"3"):
            refused("not a whole line", [*lines[:4], rest])
        refused(r"after \[DONE\]", [self.TEXT + self.TEXT])
        refused("an event is not JSON", [b'data: {"choices": [\n\ndata: [DONE]\n\n'])
        refused("the engine died", [sse([*self.CHUNKS[:3], error])])
        refused("the engine died", error)


def test_weights_that_are_not_of_the_ids_beside_them() -> None:
    """A stream that loses some of its weights; an array of another start, shape or type; too few of
    them."""
    expected = routed(weights=True)
    for number in range(len(stream(expected, piece=5))):
        chunks = stream(expected, piece=5)
        for holder in (chunks[number], *chunks[number]["choices"]):
            for name in [name for name in holder if name.endswith("weights")]:
                del holder[name]
                refused("some of its rows", iter(chunks))
    for change in (
        {"start": 1},
        {"missing": 1},
        {"shape": [2, 1, 1]},
        {"shape": [1, 3, 8]},
        {"dtype": "int32"},
    ):
        for prefix in ("prompt_", ""):
            body = answer(expected)
            holder = body if prefix else body["choices"][0]
            holder[f"{prefix}routed_expert_weights"] |= change
            refused("weights", body)
    body = answer(expected, routed(weights=True, first_token=500))
    body["prompt_routed_expert_weights"].pop()
    refused("rows of 2 prompts, but weights of 1", body)


def test_steps_that_are_not_of_the_ids_beside_them() -> None:
    expected = routed(steps=True)
    for change in ({"start": 1}, {"missing": 1}, {"shape": [2]}, {"dtype": "int32"}, {"data": ""}):
        for prefix in ("prompt_", ""):
            body = answer(expected)
            holder = body if prefix else body["choices"][0]
            holder[f"{prefix}routed_experts_steps"] |= change
            refused("steps", body)
    body = answer(expected)
    del body["prompt_routed_experts_steps"]
    refused("steps of some of its rows", body)


def test_streams_that_are_not_whole() -> None:
    def changed(change: Callable[[Chunks], Any], **options: Any) -> Any:
        chunks = copy.deepcopy(stream(routed(**options), piece=2))
        change(chunks)
        return iter(chunks)

    def pop(index: int, name: str = "routed_experts") -> Callable[[Chunks], Any]:
        return lambda chunks: (
            chunks[index] if name.startswith("prompt") else chunks[index]["choices"][0]
        ).pop(name)

    def update(**fields: Any) -> Callable[[Chunks], Any]:
        return lambda chunks: chunks[6]["choices"][0]["routed_experts"].update(fields)

    def abort(chunks: Chunks) -> None:
        chunks[-1]["choices"][0]["finish_reason"] = "abort"
        del chunks[-1]["choices"][0]["routed_experts"]

    check_all(collect(changed(lambda chunks: None)), routed())
    cases: list[tuple[Callable[[Chunks], Any], str]] = [
        (lambda chunks: chunks.pop(1), "the prompt of choice 0: a gap: rows from 4 on after 2"),
        (pop(6), "choice 0: a gap: rows from 11 on after 10"),
        (
            lambda chunks: chunks.insert(1, chunks[0]),
            "the prompt of choice 0: overlap: rows from 0 on after 2",
        ),
        (pop(5), "choice 0: rows from 10 on after a prompt of 9 tokens"),
        (pop(4, "prompt_routed_experts"), "the prompt ends at 8 by its rows, at 9 by its tokens"),
        (pop(-1), "rows up to 13, but 9 prompt and 6 generated tokens have rows up to 14"),
        (pop(-1, "token_ids"), "rows up to 14, but 9 prompt and 5 generated tokens"),
        (
            update(**routed().encode(rows_of(1, layers=2), 10)),
            r"choice 0: rows of shape \(2, 4\), not \(3, 4\)",
        ),
        (update(shape=[2, 3, 4]), "choice 0: not an array of expert ids"),
        (update(missing=1), "choice 0: 0 rows are not known, said to be 1"),
        (lambda chunks: chunks.pop(), "choice 0 was not finished"),
    ]
    for change, message in cases:
        refused(message, changed(change))
    refused("rows up to 13", changed(pop(6), fmt="npy"))  # a format without positions
    assert collect(changed(abort))[0].end == 13, "an aborted response may have fewer rows"


def test_bodies_that_are_not_whole() -> None:
    without: dict[str, Any] = answer(routed(layout="joined"))
    del without["choices"][0]["routed_experts"]
    refused("must ask with return_routed_experts", without)
    refused("rows from 4 on, asked for from 3 on", answer(routed(start=4)), prompt_start=3)
    refused("rows from 4 on, asked for from 0 on", answer(routed(start=4)))
    refused("no choices", {"choices": []})
    for shape in ({}, {"num_layers": LAYERS}):
        refused("pass num_layers and top_k", answer(routed(fmt="raw")), **shape)
    for start in (None, "0", 1.0, True):
        body = answer(routed())
        body["prompt_routed_experts"]["start"] = start
        refused(r"Expected `int`, got .* at `\$\.start`", body)
    for text in ("{", '{"choices": 5}', '{"choices": "abc"}', json.dumps(answer(routed()))[:200]):
        for raw in (text, text.encode()):
            refused(".", raw)


def test_without_prompt_token_ids_the_prompts_end_is_unknown() -> None:
    body = answer(routed(layout="joined"))
    del body["choices"][0]["prompt_token_ids"]
    (routing,) = collect(body)
    assert routing.prompt_len is None
    assert np.array_equal(routing.rows, routed().whole())
    with pytest.raises(RoutingError, match="where the prompt ends is not known"):
        _ = routing.generated_rows


@pytest.mark.parametrize("fmt", ["object", "npy"])
def test_the_caller_says_where_the_prompt_ends(fmt: Format) -> None:
    """As for `/inference/v1/generate`, which repeats the prompt only with `return_token_ids`."""
    expected = routed(layout="joined", start=4, n=2, fmt=fmt)
    body, chunks = answer(expected), stream(expected)
    for choice in [*body["choices"], *(chunk["choices"][0] for chunk in chunks)]:
        choice.pop("prompt_token_ids", None)
    for response in (body, iter(chunks)):
        for choice, routing in enumerate(collect(response, prompt_len=9, prompt_start=4)):
            assert (routing.prompt_len, routing.prompt_token_ids) == (9, None)
            assert np.array_equal(routing.prompt_rows, expected.prompt[4:])
            assert np.array_equal(routing.generated_rows, expected.choices[choice])
    refused(
        "rows up to 14, but 8 prompt and 6 generated tokens", body, prompt_len=8, prompt_start=4
    )
    refused(
        "the prompt ends at 9 by its rows, at 9 by its tokens, at 8 by its prompt_len",
        answer(routed()),
        prompt_len=8,
    )
    for choice in body["choices"]:
        del choice["token_ids"]
    refused("rows up to 14, but 15 prompt tokens", body, prompt_len=15, prompt_start=4)


@pytest.mark.parametrize("layout", ["split", "joined"])
def test_prompt_rows_that_a_gateway_dropped(layout: str) -> None:
    """A request without a prompt start is answered from the first row on, whatever the
    layout."""
    body, chunks = answer(routed()), stream(routed())
    for part in (body, *chunks):
        part.pop("prompt_routed_experts", None)
    for response in (body, iter(chunks), answer(routed(start=9, layout=layout))):
        refused("rows from 9 on, asked for from 0 on", response)
    check_all(collect(answer(routed(start=9, layout=layout)), prompt_start=9), routed(start=9))
    check_all(collect(answer(routed(start=9, layout=layout)), prompt_start=None), routed(start=9))


def litellm_made(body: dict[str, Any], *fields: str) -> dict[str, Any]:
    """`body` as LiteLLM passes it on: fields of choices that OpenAI does not have are put aside."""
    choices = []
    for choice in body["choices"]:
        own = {name: choice[name] for name in ("index", "finish_reason") if name in choice}
        rest = {name: value for name, value in choice.items() if name not in own}
        choices.append({**own, "provider_specific_fields": rest})
    return {"choices": choices, **{name: body[name] for name in fields if name in body}}


def test_fields_that_litellm_puts_aside() -> None:
    """It keeps those of choices; without those at the top level a joined response is whole, a
    split one is not."""
    joined = routed(layout="joined", n=2)
    for body in (answer(joined), stream(joined)):
        made = (
            litellm_made(body)
            if isinstance(body, dict)
            else iter([litellm_made(chunk) for chunk in body])
        )
        check_all(collect(made), joined)
    check_all(collect(litellm_made(answer(routed(n=2)), "prompt_routed_experts")), routed(n=2))
    refused("rows from 9 on, asked for from 0 on", litellm_made(answer(routed())))


def test_errors_whose_other_fields_are_null() -> None:
    """As a client of OpenAI makes them of what a proxy answers."""
    failed = {"error": {"message": "too long"}, "choices": None}
    for item in (failed, SimpleNamespace(**failed), [failed]):
        refused("the server answered with an error: too long", item)


def test_lines_of_a_batch() -> None:
    """OpenAI's output files hold a response in each line."""
    line = {"id": "batch_req_1", "custom_id": "mine", "error": None}
    line["response"] = {"status_code": 200, "request_id": "1", "body": answer(routed(n=2))}
    for source in (line, json.dumps(line), json.dumps(line).encode()):
        check_all(collect(source), routed(n=2))
    refused(
        "the server answered with an error: too long",
        {**line, "response": None, "error": {"message": "too long"}},
    )
    body = {"status_code": 400, "body": {"error": {"message": "no such model"}}}
    refused("the server answered with an error: no such model", {**line, "response": body})
    refused(
        "no choices: it is no response of an endpoint",
        {**line, "response": {"status_code": 400, "body": {}}},
    )


def test_log_probabilities_and_texts() -> None:
    """Of completions, with those of the prompt where the request asks for `echo`, and of chats."""
    own, of_prompt, values = [*"abcdef"], [*"ABCDEFGHI"], [-0.5 - at for at in range(6)]
    body, chunks = answer(routed()), stream(routed())
    for texts, numbers, expected in (
        (own, values, [None] * 9 + own),
        ([*of_prompt, *own], [None] * 9 + values, [*of_prompt, *own]),
    ):
        body["choices"][0]["logprobs"] = {"tokens": texts, "token_logprobs": numbers}
        (routing,) = collect(body)
        assert routing.texts == tuple(expected)
        assert np.array_equal(routing.logprobs, np.array(numbers, float), equal_nan=True)
    for chunk, value in zip(
        (sent for sent in chunks if sent["choices"][0].get("token_ids")), values, strict=True
    ):
        chunk["choices"][0]["logprobs"] = {"content": [{"logprob": value}]}
    assert collect(iter(chunks))[0].logprobs.tolist() == values
    assert collect(answer(routed()))[0].logprobs is None
    body["choices"][0]["logprobs"] = {"tokens": own[1:]}
    assert collect(body)[0].texts is None, "the places of these are unknown"
    assert collect(iter(stream(routed())))[0].texts is None, (
        "with stop strings, chunks have the texts of other tokens"
    )


def test_texts_where_nothing_says_where_the_prompt_ends() -> None:
    """Those of a prompt and what follows stand beside their rows all the same, as in a file of the
    page."""
    rows, texts = routed().whole(), [*"ABCDEFGHIabcdef"]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "routed_experts": encode(rows, fmt="npy", dtype="int16", start=0),
    }
    (said,) = collect({"choices": [{**choice, "logprobs": {"tokens": texts}}]})
    assert (said.prompt_len, said.texts) == (None, tuple(texts))
    for some in (texts[9:], texts[1:]):
        assert collect({"choices": [{**choice, "logprobs": {"tokens": some}}]})[0].texts is None


@SETTINGS
@given(st.data())
def test_any_value_in_any_place_is_a_routing_error(data: Any) -> None:
    """A field of a response that holds other JSON than the server sends."""
    body: Any = answer(routed(n=2))
    body["choices"][0]["logprobs"] = {"tokens": [*"abcdef"], "token_logprobs": [-1.0] * 6}
    body["error"] = None
    holder = body
    while isinstance(holder, dict | list):
        names = [*holder] if isinstance(holder, dict) else [*range(len(holder))]
        if not names:
            break
        name = data.draw(st.sampled_from(names), label="place")
        if data.draw(st.booleans(), label="here") or not isinstance(holder[name], dict | list):
            holder[name] = data.draw(JSON, label="value")
            break
        holder = holder[name]
    try:
        routings = collect(body)
    except RoutingError:
        return
    for index, routing in enumerate(routings):  # a field that is not needed
        assert np.array_equal(routing.rows, routed(n=2).whole(index)) or len(routings) == 1
