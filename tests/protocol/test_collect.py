"""Answers of every form, streamed in every way, are collected whole; what is not whole raises."""

import asyncio
import copy
import doctest
import json
import random
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from routed_experts.protocol import collect as module
from routed_experts.protocol.codec import Format
from routed_experts.protocol.collect import Collector, Routing, RoutingError, collect, collect_async
from tests.protocol.answers import LAYERS, TOP_K, Told, answer, rows_of, sse, stream

RAW: dict[str, Any] = {"num_layers": LAYERS, "top_k": TOP_K}


def told(p: int = 9, g: int = 6, n: int = 1, **options: Any) -> Told:
    return Told(rows_of(p, seed=p), [rows_of(g - 1, seed=50 + i) for i in range(n)], **options)


def check(routing: Routing, expected: Told, choice: int = 0) -> None:
    assert routing.rows.dtype == np.int16
    assert np.array_equal(routing.rows, expected.whole(choice))
    assert (routing.start, routing.end) == (expected.start, expected.start + len(expected.whole(choice)))
    assert routing.prompt_len == len(expected.prompt)
    assert np.array_equal(routing.prompt_rows, expected.prompt[expected.start :])
    assert np.array_equal(routing.generated_rows, expected.choices[choice])
    assert routing.token_ids == tuple(expected.token_ids(choice))
    assert routing.prompt_token_ids == tuple(expected.prompt_token_ids)
    assert routing.finish_reason == "length"


def test_the_documentation_runs() -> None:
    assert doctest.testmod(module).attempted
    assert not doctest.testmod(module).failed


@pytest.mark.parametrize("layout", ["split", "joined"])
@pytest.mark.parametrize("start", [0, 4, 9])
@pytest.mark.parametrize("g", [1, 6])
@pytest.mark.parametrize("fmt", get_args(Format))
class TestForms:
    def test_unstreamed(self, fmt: Format, g: int, start: int, layout: str) -> None:
        expected = told(g=g, start=start, fmt=fmt, layout=layout)
        (routing,) = collect(answer(expected), prompt_start=start, **RAW)
        check(routing, expected)

    @pytest.mark.parametrize("per_chunk", [1, 4])
    @pytest.mark.parametrize("piece", [1, 2, 100])
    def test_streamed_in_pieces(self, piece: int, per_chunk: int, fmt: Format, g: int, start: int, layout: str) -> None:
        expected = told(g=g, start=start, fmt=fmt, layout=layout)
        chunks = stream(expected, piece=piece, per_chunk=per_chunk)
        (routing,) = collect(iter(chunks), prompt_start=start, **RAW)
        check(routing, expected)


@pytest.mark.parametrize("dtype", ["int16", "uint8", "int32"])
@pytest.mark.parametrize("fmt", get_args(Format))
def test_every_type_becomes_int16(fmt: Format, dtype: str) -> None:
    expected = told(fmt=fmt, dtype=dtype)
    check(collect(answer(expected), dtype=dtype, **RAW)[0], expected)


def test_an_id_that_int16_cannot_hold() -> None:
    body = answer(told())
    array = np.full((5, 1, 1), 40_000, dtype="<u2")
    body["choices"][0]["routed_experts"] = {
        "data": array.tobytes(), "shape": [5, 1, 1], "dtype": "uint16", "start": 9, "missing": 0
    }  # fmt: skip
    del body["prompt_routed_experts"]
    with pytest.raises(RoutingError, match="not an expert id: 40000"):
        collect(body)


@pytest.mark.parametrize("fmt", ["object", "npy", "raw"])
def test_messagepack_has_bytes_where_json_has_base64(fmt: Format) -> None:
    import base64

    expected = told(fmt=fmt)
    body = answer(expected)
    for holder, key in ((body, "prompt_routed_experts"), (body["choices"][0], "routed_experts")):
        if fmt == "object":
            holder[key]["data"] = base64.b64decode(holder[key]["data"])
        else:
            holder[key] = base64.b64decode(holder[key])
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(body))
    check(collect(received, **RAW)[0], expected)


class TestChoicesAndPrompts:
    """`n` > 1 shares a prompt; a list of prompts has an array for each."""

    PROMPTS = (told(9, 6, n=2), told(4, 3, n=2, first_token=500))

    @pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]])
    @pytest.mark.parametrize("streamed", [True, False])
    def test_split_by_choice(self, prompts: tuple[Told, ...], streamed: bool) -> None:
        routings = collect(iter(stream(*prompts, piece=2)) if streamed else answer(*prompts))
        assert [routing.index for routing in routings] == list(range(2 * len(prompts)))
        for index, routing in enumerate(routings):
            check(routing, prompts[index // 2], index % 2)

    @pytest.mark.parametrize("fmt", get_args(Format))
    @pytest.mark.parametrize("starts", [(0,), (0, 0), (4, 9)])
    def test_lists_of_prompts(self, fmt: Format, starts: tuple[int, ...]) -> None:
        """Nested lists do not say by themselves how many prompts they are."""
        prompts = [told(p, 4, fmt=fmt, start=s, first_token=p * 100) for p, s in zip((9, 11), starts, strict=False)]
        body = answer(*prompts, is_list=True)
        if fmt == "object":
            for routing, expected in zip(collect(body), prompts, strict=True):
                check(routing, expected)
        elif len(set(starts)) == 1:
            for routing, expected in zip(collect(body, prompt_start=starts[0], **RAW), prompts, strict=True):
                check(routing, expected)

    def test_a_list_of_prompts_without_rows(self) -> None:
        prompts = [told(9, 4, fmt="list", start=9), told(9, 4, fmt="list", start=9, first_token=500)]
        for routing, expected in zip(collect(answer(*prompts), prompt_start=9), prompts, strict=True):
            check(routing, expected)

    def test_broken_off_the_prompt_of_a_choice_is_not_guessed(self) -> None:
        """Choices 0 and 2 came before 1 and 3: two choices of two prompts, or two prompts with one each?"""
        chunks = [chunk for chunk in stream(*self.PROMPTS) if chunk["choices"][0]["index"] in (0, 2)][:6]
        without, given = Collector(), Collector(n=2)
        for chunk in chunks:
            without.take(chunk)
            given.take(chunk)
        with pytest.raises(RoutingError, match="give n"):
            without.so_far()
        for routing, expected in zip(given.so_far(), self.PROMPTS, strict=True):
            assert np.array_equal(routing.rows, expected.whole()[: routing.end])

    def test_a_prompt_that_did_not_come(self) -> None:
        chunks = stream(*self.PROMPTS)
        del next(c for c in chunks if c["choices"][0]["index"] == 2)["prompt_routed_experts"]
        with pytest.raises(RoutingError, match="choice 2: the rows of its prompt did not come"):
            collect(iter(chunks), n=2)

    def test_a_prompt_that_came_twice(self) -> None:
        chunks = stream(told(n=2))
        second = next(c for c in chunks if c["choices"][0]["index"] == 1)
        second["prompt_routed_experts"] = chunks[0]["prompt_routed_experts"]
        with pytest.raises(RoutingError, match="came with several"):
            collect(iter(chunks), n=2)


class TestClientObjects:
    """The OpenAI client hands out objects: fields that it does not know become attributes."""

    def test_completion(self) -> None:
        expected = told()
        body = Completion.construct(**answer(expected))
        body.choices = [type("Choice", (), choice) for choice in answer(expected)["choices"]]
        check(collect(body)[0], expected)

    def test_chat_chunks(self) -> None:
        expected = told()
        chunks = []
        for chunk in stream(expected):
            prompt_token_ids = chunk["choices"][0].pop("prompt_token_ids", None)
            chunk["choices"][0]["delta"] = {"content": chunk["choices"][0].pop("text", "")}
            chunk |= {"prompt_token_ids": prompt_token_ids} if prompt_token_ids else {}
            chunk |= {"id": "1", "created": 1, "model": "tiny", "object": "chat.completion.chunk"}
            chunks.append(ChatCompletionChunk.model_validate(chunk))
        check(collect(iter(chunks))[0], expected)


def _lines(text: bytes) -> Iterable[bytes]:
    return text.split(b"\n")


def _cut_anywhere(text: bytes) -> Iterable[bytes]:
    rng = random.Random(7)
    while text:
        size = rng.choice((1, 2, 5, 100, 4000))
        yield text[:size]
        text = text[size:]


TRANSPORTS: dict[str, Callable[[bytes], Iterable[Any]]] = {
    "lines": _lines,
    "text lines": lambda text: text.decode().split("\n"),
    "lines with ends": lambda text: text.splitlines(keepends=True),
    "CRLF": lambda text: text.replace(b"\n", b"\r\n").splitlines(keepends=True),
    "cut anywhere": _cut_anywhere,
    "single bytes": lambda text: [text[i : i + 1] for i in range(len(text))],
    "whole": lambda text: [text],
    "with comments": lambda text: [b": ping", *_lines(text.replace(b"\n\n", b"\n: ping\n\nevent: x\n\n"))],
}


class TestServerSentEvents:
    EXPECTED = told(n=2)
    TEXT = sse([*stream(EXPECTED, piece=3), {"choices": [], "usage": {"prompt_tokens": 9}}])

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_however_it_is_cut(self, transport: str) -> None:
        for choice, routing in enumerate(collect(TRANSPORTS[transport](self.TEXT))):
            check(routing, self.EXPECTED, choice)

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_asynchronously(self, transport: str) -> None:
        async def pieces() -> AsyncIterator[Any]:
            for piece in TRANSPORTS[transport](self.TEXT):
                await asyncio.sleep(0)
                yield piece

        for choice, routing in enumerate(asyncio.run(collect_async(pieces()))):
            check(routing, self.EXPECTED, choice)

    @pytest.mark.parametrize("before", [b"", b"\n"])
    def test_a_comment_that_looks_like_an_event(self, before: bytes) -> None:
        """Cut anywhere in it."""
        comment = before + b': {x} data: {"error": {"message": "no"}}\n'
        for cut in range(len(comment)):
            text = comment + self.TEXT
            check(collect([text[:cut], text[cut:]])[0], self.EXPECTED)

    def test_lines_without_ends_of_which_the_last_has_one(self) -> None:
        first, *others = self.TEXT.split(b"\n\n")[:-2]
        check(collect([b": ping", first, b": ping", *others, b"data: [DONE]\n\n"])[0], self.EXPECTED)

    def test_generated_text_that_looks_like_an_event(self) -> None:
        chunks = stream(told())
        for chunk in chunks:
            chunk["choices"][0]["text"] = 'data: {"choices": [}]\n\ndata: [DONE]\u2028'
        for transport in TRANSPORTS.values():
            check(collect(transport(sse(chunks)))[0], told())

    def test_a_whole_body(self) -> None:
        expected = told()
        for body in (json.dumps(answer(expected)), json.dumps(answer(expected)).encode(), sse(stream(expected))):
            check(collect(body)[0], expected)

    @pytest.mark.parametrize("keep", [1, 300, 2000, -8])
    def test_cut_short(self, keep: int) -> None:
        text = self.TEXT[:keep]
        with pytest.raises(RoutingError, match=r"ended without \[DONE\]"):
            collect([text])

    def test_more_after_the_end(self) -> None:
        with pytest.raises(RoutingError, match=r"after \[DONE\]"):
            collect([self.TEXT + self.TEXT])

    def test_not_json(self) -> None:
        with pytest.raises(RoutingError, match="an event is not JSON"):
            collect([b'data: {"choices": [\n\ndata: [DONE]\n\n'])


def test_an_error_event() -> None:
    chunks = [*stream(told())[:3], {"error": {"message": "the engine died", "code": 500}}]
    with pytest.raises(RoutingError, match="the engine died"):
        collect(sse(chunks))
    with pytest.raises(RoutingError, match="the engine died"):
        collect(chunks[-1])


def test_a_stream_broken_off_keeps_what_came() -> None:
    expected = told()
    collector = Collector()
    for chunk in stream(expected)[:4]:
        collector.take(chunk)
    (routing,) = collector.so_far()
    assert np.array_equal(routing.rows, expected.whole()[: 9 + 3])
    assert routing.token_ids == tuple(expected.token_ids(0)[:4])
    with pytest.raises(RoutingError, match="choice 0 was not finished"):
        collector.finish()


class TestNotWhole:
    """Each change makes an answer that must not be taken for whole."""

    def of(self, change: Callable[[list[dict[str, Any]]], Any], **options: Any) -> list[Routing]:
        chunks = copy.deepcopy(stream(told(**options), piece=2))
        change(chunks)
        return collect(iter(chunks))

    def test_unchanged(self) -> None:
        check(self.of(lambda chunks: None)[0], told())

    def test_a_gap_in_the_prompt(self) -> None:
        with pytest.raises(RoutingError, match="the prompt of choice 0: a gap: rows from 4 on after 2"):
            self.of(lambda chunks: chunks.pop(1))

    def test_a_gap_in_the_generated_rows(self) -> None:
        with pytest.raises(RoutingError, match="choice 0: a gap: rows from 11 on after 10"):
            self.of(lambda chunks: chunks[6]["choices"][0].pop("routed_experts"))

    def test_a_piece_twice(self) -> None:
        with pytest.raises(RoutingError, match="the prompt of choice 0: overlap: rows from 0 on after 2"):
            self.of(lambda chunks: chunks.insert(1, chunks[0]))

    def test_the_first_generated_rows_lost(self) -> None:
        with pytest.raises(RoutingError, match="choice 0: rows from 10 on after a prompt of 9 tokens"):
            self.of(lambda chunks: chunks[5]["choices"][0].pop("routed_experts"))

    def test_the_last_piece_of_the_prompt_lost(self) -> None:
        with pytest.raises(RoutingError, match="the prompt's rows end at 8, its tokens at 9"):
            self.of(lambda chunks: chunks[4].pop("prompt_routed_experts"))

    def test_the_last_rows_lost(self) -> None:
        with pytest.raises(RoutingError, match="rows up to 13, but 9 prompt and 6 generated tokens have rows up to 14"):
            self.of(lambda chunks: chunks[-1]["choices"][0].pop("routed_experts"))

    def test_all_rows_of_a_form_without_positions_lost(self) -> None:
        with pytest.raises(RoutingError, match="rows up to 13"):
            self.of(lambda chunks: chunks[6]["choices"][0].pop("routed_experts"), fmt="npy")

    def test_more_rows_than_tokens(self) -> None:
        with pytest.raises(RoutingError, match="rows up to 14, but 9 prompt and 5 generated tokens"):
            self.of(lambda chunks: chunks[-1]["choices"][0].pop("token_ids"))

    def test_an_aborted_answer_may_have_fewer(self) -> None:
        def abort(chunks: list[dict[str, Any]]) -> None:
            chunks[-1]["choices"][0]["finish_reason"] = "abort"
            del chunks[-1]["choices"][0]["routed_experts"]

        (routing,) = self.of(abort)
        assert routing.end == 13

    def test_another_shape(self) -> None:
        other = told().encode(rows_of(1, layers=2), 10)
        with pytest.raises(RoutingError, match=r"choice 0: rows of shape \(2, 4\), not \(3, 4\)"):
            self.of(lambda chunks: chunks[6]["choices"][0].update(routed_experts=other))

    def test_data_that_is_not_the_shape(self) -> None:
        with pytest.raises(RoutingError, match="choice 0: not an array of expert ids"):
            self.of(lambda chunks: chunks[6]["choices"][0]["routed_experts"].update(shape=[2, 3, 4]))

    def test_missing_that_is_not_true(self) -> None:
        with pytest.raises(RoutingError, match="choice 0: 0 rows are not known, said to be 1"):
            self.of(lambda chunks: chunks[6]["choices"][0]["routed_experts"].update(missing=1))

    def test_another_start_than_asked_for(self) -> None:
        with pytest.raises(RoutingError, match="rows from 4 on, asked for from 3 on"):
            collect(answer(told(start=4)), prompt_start=3)

    def test_no_rows_at_all(self) -> None:
        body = answer(told(layout="joined"))
        del body["choices"][0]["routed_experts"]
        with pytest.raises(RoutingError, match="must ask with return_routed_experts"):
            collect(body)

    def test_no_choices(self) -> None:
        with pytest.raises(RoutingError, match="no choices"):
            collect({"choices": []})

    @pytest.mark.parametrize("left", [[0], [1], [0, 2], []])
    def test_choices_that_did_not_come(self, left: list[int]) -> None:
        body = answer(told(n=3))
        body["choices"] = [body["choices"][index] for index in left]
        with pytest.raises(RoutingError, match=r"not all of the answer's|no choices|share"):
            collect(body, n=3)

    def test_a_prompt_of_its_own_whose_rows_did_not_come(self) -> None:
        """Two prompts are as long: what came of the first is not the second's."""
        prompts = told(9, 4), told(9, 4, first_token=500)
        for taken in (lambda arrays: arrays[0], lambda arrays: arrays[:1]):
            body = answer(*prompts)
            body["prompt_routed_experts"] = taken(body["prompt_routed_experts"])
            with pytest.raises(RoutingError, match="choice 1: the rows of its prompt did not come"):
                collect(body)
        chunks = [chunk for chunk in stream(*prompts) if chunk["choices"][0]["index"] == 0]
        chunks += [
            {key: value for key, value in chunk.items() if key != "prompt_routed_experts"}
            for chunk in stream(*prompts)
            if chunk["choices"][0]["index"] == 1
        ]
        with pytest.raises(RoutingError, match="choice 1: the rows of its prompt did not come"):
            collect(iter(chunks))

    @pytest.mark.parametrize("body", ["{", '{"choices": 5}', '{"choices": "abc"}', json.dumps(answer(told()))[:200]])
    def test_what_is_no_answer(self, body: str) -> None:
        for kind in (str, str.encode, lambda text: bytearray(text.encode())):
            with pytest.raises(RoutingError):
                collect(kind(body))

    @pytest.mark.parametrize("start", [None, "0", 1.0, True])
    def test_a_start_that_is_no_position(self, start: Any) -> None:
        body = answer(told())
        body["prompt_routed_experts"]["start"] = start
        with pytest.raises(RoutingError, match="its first row is at"):
            collect(body)

    def test_raw_without_its_shape(self) -> None:
        with pytest.raises(RoutingError, match="give num_layers and top_k"):
            collect(answer(told(fmt="raw")))

    def test_where_the_prompt_ends_is_not_known(self) -> None:
        body = answer(told(layout="joined"))
        del body["choices"][0]["prompt_token_ids"]
        (routing,) = collect(body)
        assert routing.prompt_len is None
        assert np.array_equal(routing.rows, told().whole())
        with pytest.raises(RoutingError, match="where the prompt ends is not known"):
            _ = routing.generated_rows


def test_unknown_rows_are_counted() -> None:
    expected = told()
    expected.prompt[2:5] = -1
    (routing,) = collect(iter(stream(expected, piece=2)))
    assert routing.missing == 3
    check(routing, expected)
