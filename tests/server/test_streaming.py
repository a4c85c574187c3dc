"""Rows on the chunks of a stream, with hand-made results in and a generator like vLLM's in between."""

import asyncio
import random
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pytest

from routed_experts.protocol.codec import decode
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.http.encoding import Encoder
from routed_experts.server.http.streaming import SSERewriter
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import CompletionOutput, RequestOutput
from tests.server.turns import another_task

L, K, EXPERTS = 2, 3, 32000
Result = RequestOutput | tuple[int, RequestOutput]
Chunk = dict[str, Any]


def rows_of(first: int, end: int) -> np.ndarray:
    """Rows [n, L, K] that say which position they belong to."""
    return np.repeat(np.arange(first, end, dtype=np.int16), L * K).reshape(-1, L, K)


def result(prompt_len: int, *choices: CompletionOutput) -> RequestOutput:
    return RequestOutput("r", None, list(range(prompt_len)), None, list(choices), finished=False)


def choice(tokens: int, buffer: RowBuffer | None = None, index: int = 0, finish: str | None = None) -> CompletionOutput:
    return CompletionOutput(
        index,
        "",
        list(range(tokens)),
        None,
        None,
        routed_experts=buffer,
        finish_reason=finish,  # type: ignore[arg-type]
    )


class Engine:
    """One choice as the engine streams it: `step` gives the output that brings its next tokens."""

    def __init__(self, prompt_len: int, start: int = 0, index: int = 0) -> None:
        self.prompt_len, self.index = prompt_len, index
        self.sent, self.tokens = start, 0
        self.buffer = RowBuffer()

    def step(self, tokens: int = 1, finish: str | None = None, lost: int = 0, surplus: int = 0) -> RequestOutput:
        """An output of `tokens`; `lost` of its rows do not come, `surplus` are of tokens that were cut off again."""
        self.tokens += tokens
        end = self.prompt_len + self.tokens - 1
        self.buffer.push(self.sent, rows_of(self.sent, end - lost + surplus))
        self.sent = end - lost
        return result(self.prompt_len, choice(tokens, self.buffer, self.index, finish))


def aligner_of(
    num_choices: int = 1, preface: int = 0, dtype: str = "int16", max_bytes: int = 1 << 30, **options: Any
) -> SSERewriter:
    asked = RoutingOptions(**options)
    encoder = Encoder(asked.format, dtype, (L, K), EXPERTS)
    return SSERewriter(asked, encoder, num_choices, lambda error: f'{{"error":"{error}"}}', preface, max_bytes)


def generator(
    held: Callable[[int], bool] = lambda chunk: False, preface: int = 0, num_choices: int = 1
) -> Callable[[AsyncIterator[Result]], AsyncIterator[str]]:
    """A generator like vLLM's: `preface` chunks, then one for each choice of a result that is not held back."""

    async def generate(results: AsyncIterator[Result]) -> AsyncIterator[str]:
        seen = 0
        async for item in results:
            prompt_index, output = item if isinstance(item, tuple) else (0, item)
            if not seen:
                for index in range(preface):
                    yield event({"choices": [{"index": index % num_choices, "preface": True}]})
            for each in output.outputs:
                seen += 1
                if not held(seen) or each.finish_reason:
                    index = prompt_index * num_choices + each.index
                    yield event({"choices": [{"index": index, "finish_reason": each.finish_reason}]})
        yield event({"choices": [], "usage": {}})
        yield "data: [DONE]\n\n"

    return generate


def event(body: Chunk) -> str:
    return f"data: {orjson.dumps(body).decode()}\n\n"


def ended(aligner: SSERewriter, results: Iterable[Result], generate: Any = None) -> list[str]:
    """All events of a stream, which may end with an error."""

    async def feed() -> AsyncIterator[Result]:
        for item in results:
            yield item

    chunks = (generate or generator())(aligner.watch(feed()))

    async def collect() -> list[str]:
        events = [chunk async for chunk in aligner.rewrite(chunks)]
        with pytest.raises(StopAsyncIteration):  # it has ended, or was closed: nothing goes on behind the stream
            await anext(chunks)
        return events

    return asyncio.run(collect())


def stream(aligner: SSERewriter, results: Iterable[Result], generate: Any = None) -> list[Chunk]:
    """The chunks that a client gets, those of the usage and of the end checked and left out."""
    *chunks, usage, done = ended(aligner, results, generate)
    assert (usage, done) == (event({"choices": [], "usage": {}}), "data: [DONE]\n\n")
    assert all(chunk.endswith("}\n\n") for chunk in chunks)
    return [orjson.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def prompt_positions(chunk: Chunk) -> list[int] | None:
    return _positions(chunk.get("prompt_routed_experts"))


def positions(chunk: Chunk) -> list[int] | None:
    return _positions(chunk["choices"][0].get("routed_experts"))


def own_positions(chunks: list[Chunk]) -> list[int]:
    return [position for chunk in chunks for position in positions(chunk) or ()]


def _positions(array: Any) -> list[int] | None:
    """The positions that the rows of `array` belong to, -1 where not known; None without an array."""
    if array is None:
        return None
    rows = decode(array)
    assert rows.shape[1:] == (L, K)
    assert array["missing"] == int((rows[:, 0, 0] == -1).sum())
    known = [int(row[0, 0]) for row in rows]
    assert all(value in (-1, array["start"] + index) for index, value in enumerate(known))
    return known


@dataclass
class Emitted:
    """A chunk of the generator, and what is known when it is made.

    Attributes:
        tokens: of the choice, so far; 0 before its text.
        arrived: the position behind the last row that arrived.
    """

    prompt: int
    choice: int
    tokens: int
    arrived: int
    finish: str | None


class Play:
    """A request whose choices get tokens in random order and steps; some rows are late, lost, or surplus."""

    def __init__(self, rng: random.Random, options: dict[str, Any]) -> None:
        self.rng, self.options = rng, options
        self.prompt_lens = [rng.randint(2, 5) for _ in range(rng.choice([1, 1, 2]))]
        self.start = rng.choice([0, 1, min(self.prompt_lens)])
        self.num_choices = rng.choice([1, 2, 12])
        self.preface = rng.choice([0, self.num_choices]) if len(self.prompt_lens) == 1 else 0
        self.engines = [
            Engine(length, self.start, index) for length in self.prompt_lens for index in range(self.num_choices)
        ]
        self.lost: list[set[int]] = [set() for _ in self.engines]
        self.arrived = [0] * len(self.engines)
        self.emitted: list[Emitted] = []
        self.outputs: list[RequestOutput] = []

    def run(self) -> list[Chunk]:
        rewriter = aligner_of(self.num_choices, self.preface, **self.options, prompt_start=self.start)
        return stream(rewriter, self._results(), self._generate)

    def _results(self) -> Iterator[Result]:
        alive = list(range(len(self.engines)))
        while alive:
            output, place = None, self.rng.choice(alive)
            prompt = place // self.num_choices
            for each in {place, *(self.rng.choice(alive) for _ in range(self.rng.choice([0, 0, 2])))}:
                if each // self.num_choices == prompt:  # outputs of one prompt's choices may come together
                    step = self._step(each)
                    if step.outputs[0].finish_reason:
                        alive.remove(each)
                    output = step if output is None else result(output.prompt_len, *output.outputs, *step.outputs)
                    output.prompt_len = self.prompt_lens[prompt]
            assert output is not None
            self.outputs.append(output)
            yield (prompt, output) if len(self.prompt_lens) > 1 else output

    def _step(self, place: int) -> Any:
        engine, rng = self.engines[place], self.rng
        tokens, ends = rng.choice([1, 1, 1, 2, 3]), engine.tokens > 4 and rng.random() < 0.3
        reason = rng.choice(["stop", "length", "repetition", "abort"]) if ends else None
        if engine.tokens and self.options.get("dtype") != "uint8" and rng.random() < 0.1:  # a message is lost
            engine.tokens += tokens
            end = engine.prompt_len + engine.tokens - 1
            self.lost[place] |= set(range(engine.sent, end))
            engine.sent = end
            output = result(engine.prompt_len, choice(tokens, engine.buffer, engine.index, reason))
        else:
            late = int(not ends and engine.tokens > 0 and rng.random() < 0.1)
            output = engine.step(tokens, reason, late, rng.choice([0, 2]) if ends else 0)
            self.arrived[place] = max(engine.sent, engine.prompt_len + engine.tokens - 1 - late)
        output.prompt_len = engine.prompt_len
        return output

    async def _generate(self, results: AsyncIterator[Result]) -> AsyncIterator[str]:
        first = True
        async for item in results:
            prompt, output = item if isinstance(item, tuple) else (0, item)
            for index in range(self.preface if first else 0):
                self.emitted.append(Emitted(prompt, index, 0, 0, None))
                yield event({"choices": [{"index": index, "preface": True}]})
            first = False
            for each in output.outputs:
                assert each.routed_experts is None, "vLLM would take it for an array"
                if self.rng.random() < 0.7 or each.finish_reason:  # a parser holds some text back
                    place = prompt * self.num_choices + each.index
                    tokens = self.engines[place].tokens
                    self.emitted.append(Emitted(prompt, place, tokens, self.arrived[place], each.finish_reason))
                    yield event({"choices": [{"index": place, "finish_reason": each.finish_reason}]})
        yield event({"choices": [], "usage": {}})
        yield "data: [DONE]\n\n"


@pytest.mark.parametrize("layout", ["split", "joined"])
@pytest.mark.parametrize(
    ("dtype", "histogram"), [("int16", False), ("uint8", False), ("int32", False), ("int16", True)]
)
def test_every_row_once_with_its_tokens(layout: str, dtype: str, histogram: bool) -> None:
    """The prompt's rows with its first chunk; then, with each chunk, all rows that its tokens made known."""
    for seed in range(10 if histogram else 60):
        play = Play(random.Random(seed), {"layout": layout, "dtype": dtype, "histogram": histogram})
        chunks = play.run()
        begun, ended = set(), set()
        next_row = [play.start if layout == "joined" else engine.prompt_len for engine in play.engines]
        for chunk, made in zip(chunks, play.emitted, strict=True):
            prompt_len, lost = play.prompt_lens[made.prompt], play.lost[made.choice]
            prompt = list(range(play.start, prompt_len))
            is_first = made.prompt not in begun and layout == "split"
            assert prompt_positions(chunk) == (prompt if is_first else None)
            begun.add(made.prompt)
            end = prompt_len + made.tokens - 1 if made.tokens else 0
            known = end if made.finish and made.finish != "abort" else min(end, made.arrived)
            own = [-1 if at in lost else at for at in range(next_row[made.choice], known)]
            if not own and not (layout == "joined" and made.finish and known == play.start):
                assert positions(chunk) is None
            else:
                assert positions(chunk) == own
                assert chunk["choices"][0]["routed_experts"]["start"] == next_row[made.choice]
            next_row[made.choice] = max(next_row[made.choice], known)
            counted = chunk["choices"][0].get("routed_experts_histogram")
            assert (counted is not None) == (histogram and made.finish is not None)
            of_prompt = chunk.get("prompt_routed_experts_histogram")
            assert (of_prompt is not None) == (counted is not None and made.prompt not in ended)
            if counted is not None:
                ended.add(made.prompt)
                rows = [at for at in range(prompt_len, known) if at not in lost]
                assert (counted["rows"], counted["missing"]) == (known - prompt_len, known - prompt_len - len(rows))
                assert [np.flatnonzero(layer).tolist() for layer in counted["counts"]] == [rows] * L
            if of_prompt is not None:
                assert (of_prompt["rows"], of_prompt["missing"]) == (len(prompt), 0)
                assert [np.flatnonzero(layer).tolist() for layer in of_prompt["counts"]] == [prompt] * L


def test_a_histogram_alone() -> None:
    engine = Engine(prompt_len=3)
    chunks = stream(aligner_of(rows=False, histogram=True), [engine.step(2), engine.step(finish="stop")])
    assert [(prompt_positions(chunk), positions(chunk)) for chunk in chunks] == [(None, None)] * 2
    assert chunks[1]["choices"][0]["routed_experts_histogram"]["rows"] == 2


@pytest.mark.parametrize("layout", ["split", "joined"])
@pytest.mark.parametrize(
    ("prompt_len", "tokens"),
    [(4060, 1), (4090, 1), (31000, 1), (15000, 15000), (1, 20000), (2000, 2089)],
)
def test_no_line_has_more_than_64_kib_of_routing(prompt_len: int, tokens: int, layout: str) -> None:
    async def results() -> AsyncIterator[Result]:
        engine = Engine(prompt_len)
        yield engine.step(tokens)
        yield engine.step(finish="stop")

    async def run() -> tuple[list[str], int]:
        rewriter = aligner_of(layout=layout)
        async with another_task() as turns:
            return [text async for text in rewriter.rewrite(generator()(rewriter.watch(results())))], turns.count

    texts, turns = asyncio.run(run())
    chunks = [orjson.loads(text.removeprefix("data: ")) for text in texts[:-2]]
    assert turns >= len(chunks) - 4
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    ends = {"prompt_routed_experts": (0, prompt_len), "routed_experts": (prompt_len, prompt_len + tokens)}
    for name, (first, end) in ends.items() if layout == "split" else [("routed_experts", (0, prompt_len + tokens))]:
        at = first
        for chunk in chunks:
            array = (chunk if name.startswith("prompt") else chunk["choices"][0]).get(name)
            if array is not None:
                assert array["start"] == at
                assert len(decode(array)) > 0
                assert len(orjson.dumps(array)) <= 64 << 10
                at += len(decode(array))
        assert at == end
    for chunk in chunks:
        arrays = [chunk.get("prompt_routed_experts"), chunk["choices"][0].get("routed_experts")]
        assert sum(len(orjson.dumps(array)) for array in arrays if array) <= 64 << 10
    if (prompt_len, tokens) == (4060, 1):
        assert len(chunks) == 2, "what fits a line is one piece"


def test_what_waits_keeps_no_message_of_the_engine() -> None:
    """One that is held back, or counted, would keep the rows of all that ran beside it."""
    messages: list[weakref.ref[np.ndarray]] = []
    engine = Engine(prompt_len=2)

    def pushed(first: int, end: int) -> np.ndarray:
        message = rows_of(0, 100).copy()  # so that a view of it keeps it
        messages.append(weakref.ref(message))
        return message[first:end]

    def results() -> Iterator[Result]:
        for token in range(20):
            engine.tokens += 1
            first = 0 if token == 0 else token + 1
            engine.buffer.push(first, pushed(first, token + 2))
            yield result(2, choice(1, engine.buffer, finish="stop" if token == 19 else None))
            assert sum(message() is not None for message in messages) <= 2, "kept beside the one under way"

    made = generator(held=lambda chunk: 3 < chunk < 15)
    chunks = stream(aligner_of(histogram=True), results(), made)
    assert own_positions(chunks) == list(range(2, 21))
    engine, messages = Engine(prompt_len=2), []
    chunks = stream(aligner_of(), results(), made)
    assert own_positions(chunks) == list(range(2, 21))


def test_an_output_without_a_buffer_uses_the_one_seen_before() -> None:
    engine = Engine(prompt_len=2)
    results = [engine.step(), engine.step(), engine.step(finish="stop")]
    results[2].outputs[0].routed_experts = None
    assert [positions(chunk) for chunk in stream(aligner_of(), results)] == [None, [2], [3]]


@pytest.mark.parametrize("histogram", [False, True])
@pytest.mark.parametrize("layout", ["split", "joined"])
@pytest.mark.parametrize("lost", [{0}, {1}, {1, 3}])
def test_a_message_that_is_lost_leaves_a_gap_at_its_place(lost: set[int], layout: str, histogram: bool) -> None:
    """Rows of the tokens after it do not move there: not into the prompt, and not to another token."""
    buffer, outputs = RowBuffer(), []

    def results() -> Iterator[Result]:
        for token in range(5):
            first, end = (0, 2) if token == 0 else (token + 1, token + 2)
            if token not in lost:
                buffer.push(first, rows_of(first, end))
            outputs.append(result(2, choice(1, buffer, finish="stop" if token == 4 else None)))
            yield outputs[-1]

    chunks = stream(
        aligner_of(layout=layout, histogram=histogram), results()
    )  # each row is checked to be its position's
    sent = [*(at for chunk in chunks for at in prompt_positions(chunk) or ()), *own_positions(chunks)]
    gaps = {at for token in lost for at in ((0, 1) if token == 0 else (token + 1,))}
    assert sent == [-1 if at in gaps else at for at in range(6)]
    if histogram:
        counted = chunks[-1]["prompt_routed_experts_histogram"], chunks[-1]["choices"][0]["routed_experts_histogram"]
        assert [each["missing"] for each in counted] == [2 * (0 in lost), len(lost - {0})]


def test_all_rows_lost() -> None:
    """Not one array arrived to tell the shape: the fields are there all the same."""
    results: list[Result] = [result(2, choice(1)), result(2, choice(2, finish="stop"))]
    chunks = stream(aligner_of(), results)
    assert [prompt_positions(chunk) for chunk in chunks] == [None, [-1, -1]]
    assert positions(chunks[1]) == [-1, -1]


def test_uint8_cannot_say_that_a_row_is_lost() -> None:
    engine = Engine(prompt_len=2)
    results = [engine.step(), engine.step(2, finish="stop", lost=1)]
    first, error, done = ended(aligner_of(dtype="uint8"), results)
    assert "prompt_routed_experts" in first
    assert "1 rows are unknown" in error
    assert "uint8 cannot hold" in error
    assert done == "data: [DONE]\n\n"


def test_an_error_in_encoding_ends_the_stream_with_an_event() -> None:
    class Failing(Encoder):
        def text(self, rows: np.ndarray, start: int) -> str:
            raise MemoryError("no more")

    engine = Engine(prompt_len=2)
    aligner = aligner_of()
    aligner._encoder = Failing("object", "int16", (L, K), EXPERTS)
    closed: list[bool] = []

    async def generate(results: AsyncIterator[Result]) -> AsyncIterator[str]:
        try:
            async for chunk in generator()(results):
                yield chunk
        finally:
            closed.append(True)

    assert ended(aligner, [engine.step(), engine.step(finish="stop")], generate) == [
        'data: {"error":"no more"}\n\n',
        "data: [DONE]\n\n",
    ]
    assert closed == [True]


def test_a_stream_that_grows_too_large_ends_with_an_event() -> None:
    for max_bytes, least in ((250, 2), (500, 3)):
        engine = Engine(prompt_len=2)
        events = ended(aligner_of(max_bytes=max_bytes), (engine.step() for _ in range(10)))
        assert least <= len(events) < 10
        assert "--routed-experts-max-response-bytes" in events[-2]
        assert events[-1] == "data: [DONE]\n\n"


def test_pieces_bring_no_text_and_say_nothing_twice() -> None:
    body = {
        "id": "cmpl-1",
        "model": "m",
        "choices": [
            {"index": 0, "text": "a", "logprobs": {"tokens": ["a"]}, "finish_reason": "stop", "token_ids": [1]}
        ],
        "usage": {"total_tokens": 3},
        "system_fingerprint": "x",
    }
    engine = Engine(6000)

    async def generate(results: AsyncIterator[Result]) -> AsyncIterator[str]:
        async for _ in results:
            yield event({"choices": body["choices"], **body})

    *pieces, last = [orjson.loads(text[6:]) for text in ended(aligner_of(), [engine.step(finish="stop")], generate)]
    assert len(pieces) == 1
    piece = pieces[0]
    assert piece["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": None, "token_ids": []}]
    assert (piece["id"], piece["model"]) == ("cmpl-1", "m")
    assert not {"usage", "system_fingerprint"} & piece.keys()
    assert last["choices"][0]["text"] == "a"
    assert last["usage"] == {"total_tokens": 3}


def test_a_histogram_comes_once_behind_the_pieces() -> None:
    *pieces, last = stream(aligner_of(histogram=True), [Engine(6000).step(finish="stop")])
    assert len(pieces) == 1
    assert last["choices"][0]["routed_experts_histogram"]["rows"] == 0
    for piece in pieces:
        assert "prompt_routed_experts_histogram" not in piece
        assert "routed_experts_histogram" not in piece["choices"][0]


def test_vllms_own_field_is_taken_away() -> None:
    """Its token-in, token-out chunks have it, null; a second one of the same name would win with many parsers."""
    aligner = aligner_of()
    aligner._has_own_field = True
    engine = Engine(prompt_len=2)

    async def generate(results: AsyncIterator[Result]) -> AsyncIterator[str]:
        async for _ in results:
            yield event({"choices": [{"index": 0, "token_ids": [1], "routed_experts": None, "text": "x"}]})

    texts = ended(aligner, [engine.step(), engine.step(finish="stop")], generate)
    assert all("null" not in text for text in texts)
    assert [positions(orjson.loads(text[6:])) for text in texts] == [None, [2]]


def test_other_events_are_left_as_they_are() -> None:
    events = [": keep-alive\n\n", event({"error": {"message": "x"}}), "data: [DONE]\n\n", "data: {}\n\n"]

    async def generate() -> AsyncIterator[str]:
        for each in events:
            yield each

    async def collect() -> list[str]:
        return [chunk async for chunk in aligner_of().rewrite(generate())]

    assert asyncio.run(collect()) == events


def test_a_failing_engine_fails_the_stream() -> None:
    engine = Engine(prompt_len=2)

    async def results() -> AsyncIterator[Result]:
        yield engine.step()
        raise RuntimeError("engine")

    async def collect() -> list[Result]:
        return [item async for item in aligner_of().watch(results())]

    with pytest.raises(RuntimeError, match="engine"):
        asyncio.run(collect())
