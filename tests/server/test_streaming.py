"""Rows on the chunks of a stream, with hand-made results in and a generator like vLLM's in between."""

import asyncio
import random
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
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


def stream(aligner: SSERewriter, results: Iterable[Result], generate: Any = None) -> list[Chunk]:
    """The chunks that a client gets, those of the usage and of the end checked and left out."""

    async def buffer() -> AsyncIterator[Result]:
        for item in results:
            yield item

    async def collect() -> list[str]:
        return [chunk async for chunk in aligner.rewrite((generate or generator())(aligner.watch(buffer())))]

    *chunks, usage, done = asyncio.run(collect())
    assert usage == event({"choices": [], "usage": {}})
    assert done == "data: [DONE]\n\n"
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


def test_a_token_a_chunk() -> None:
    engine = Engine(prompt_len=4)
    chunks = stream(aligner_of(), [engine.step(), engine.step(), engine.step(finish="length")])
    assert [prompt_positions(chunk) for chunk in chunks] == [[0, 1, 2, 3], None, None]
    assert [positions(chunk) for chunk in chunks] == [None, [4], [5]]


def test_one_token_has_no_generated_row() -> None:
    (chunk,) = stream(aligner_of(), [Engine(prompt_len=3).step(finish="length")])
    assert prompt_positions(chunk) == [0, 1, 2]
    assert positions(chunk) is None


def test_several_tokens_in_the_first_chunk() -> None:
    engine = Engine(prompt_len=3)
    chunks = stream(aligner_of(), [engine.step(3), engine.step(2, finish="stop")])
    assert [prompt_positions(chunk) for chunk in chunks] == [[0, 1, 2], None]
    assert [positions(chunk) for chunk in chunks] == [[3, 4], [5, 6]]


def test_outputs_merged_for_a_slow_reader() -> None:
    """vLLM's own merging: the rows of both outputs come with the one chunk that is left."""
    engine = Engine(prompt_len=3)
    first = engine.step()
    second = engine.step(2)
    second.add(engine.step(1), aggregate=True)
    assert len(second.outputs[0].token_ids) == 3
    chunks = stream(aligner_of(), [first, second, engine.step(finish="stop")])
    assert [positions(chunk) for chunk in chunks] == [None, [3, 4, 5], [6]]


def test_rows_that_came_early_wait_for_their_tokens() -> None:
    """The buffer is shared, so that it may hold rows of an output that is still in the queue."""
    engine = Engine(prompt_len=3)
    outputs = [engine.step(), engine.step(), engine.step(finish="stop")]
    chunks = stream(aligner_of(), outputs)
    assert [positions(chunk) for chunk in chunks] == [None, [3], [4]]


OPTIONS_AT_RANDOM: list[dict[str, Any]] = [
    {},
    {"layout": "joined"},
    {"prompt_start": 3},
    {"dtype": "uint8"},
    {"histogram": True},
    {"histogram": True, "rows": False},
    {"format": "npy"},
]


@pytest.mark.parametrize(("num_choices", "preface"), [(1, 0), (1, 1), (3, 0), (3, 3), (12, 0)])
@pytest.mark.parametrize("options", OPTIONS_AT_RANDOM, ids=str)
def test_rows_at_random(options: dict[str, Any], num_choices: int, preface: int) -> None:
    """Steps of one token and of several, late rows and surplus ones, and chunks that are held back: each row once, at
    its position."""
    prompt_len = 4

    def stream_of(seed: int) -> tuple[list[Chunk], list[int]]:
        rng, held, outputs = random.Random(seed), random.Random(seed + 1), []
        engines = [Engine(prompt_len, options.get("prompt_start", 0), index) for index in range(num_choices)]
        alive = list(engines)

        def results() -> Iterator[Result]:
            while alive:
                engine = rng.choice(alive)
                ends = engine.tokens > 5 and rng.random() < 0.2
                tokens, late, surplus = rng.choice([1, 1, 1, 1, 2, 3]), rng.random() < 0.1, rng.choice([0, 0, 2])
                outputs.append(
                    engine.step(tokens, "stop", surplus=surplus) if ends else engine.step(tokens, lost=int(late))
                )
                yield outputs[-1]
                if ends:
                    alive.remove(engine)

        made = generator(lambda chunk: held.random() < 0.3, preface, num_choices)
        chunks = stream(aligner_of(num_choices, preface, **options), results(), made)
        assert all(each.routed_experts is None for output in outputs for each in output.outputs)
        return chunks, [engine.tokens for engine in engines]

    for seed in range(30):
        chunks, tokens = stream_of(seed)
        if options.get("format") or not options.get("rows", True):
            continue
        first = 0 if options.get("layout") == "joined" else prompt_len
        for index in range(num_choices):
            own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert own_positions(own) == list(range(first, prompt_len + tokens[index] - 1))


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


def test_buffers_do_not_reach_vllm() -> None:
    engine = Engine(prompt_len=2)
    results = [engine.step(), engine.step(finish="stop")]
    stream(aligner_of(), results)
    assert all(output.outputs[0].routed_experts is None for output in results)


def test_chunks_held_back_by_a_parser() -> None:
    engine = Engine(prompt_len=2)
    results = [engine.step() for _ in range(5)] + [engine.step(finish="stop")]
    chunks = stream(aligner_of(), results, generator(held=lambda chunk: chunk in (1, 3, 4)))
    assert [prompt_positions(chunk) for chunk in chunks] == [[0, 1], None, None]
    assert [positions(chunk) for chunk in chunks] == [[2], [3, 4, 5], [6]]


def test_all_chunks_held_back_but_the_last() -> None:
    engine = Engine(prompt_len=2)
    results = [engine.step() for _ in range(3)] + [engine.step(finish="stop")]
    (chunk,) = stream(aligner_of(), results, generator(held=lambda chunk: True))
    assert prompt_positions(chunk) == [0, 1]
    assert positions(chunk) == [2, 3, 4]


@pytest.mark.parametrize("preface", [1, 2])
def test_preface_chunks_have_prompt_rows_only(preface: int) -> None:
    """The chat generator sends the role, and with `echo` a message, after it took a result and before its tokens."""
    engine = Engine(prompt_len=2)
    results = [engine.step(3), engine.step(finish="stop")]
    chunks = stream(aligner_of(preface=preface), results, generator(preface=preface))
    assert [prompt_positions(chunk) for chunk in chunks] == [[0, 1], *([None] * (preface + 1))]
    assert [positions(chunk) for chunk in chunks] == [*([None] * preface), [2, 3], [4]]


def test_preface_chunks_of_several_choices() -> None:
    """Whichever choice comes first, the first chunk has the prompt's rows."""
    engines = [Engine(prompt_len=2, index=index) for index in range(2)]
    results = [engines[1].step(2), engines[0].step(2, finish="stop"), engines[1].step(finish="stop")]
    chunks = stream(aligner_of(2, preface=2), results, generator(preface=2, num_choices=2))
    assert [prompt_positions(chunk) for chunk in chunks] == [[0, 1], None, None, None, None]
    assert [positions(chunk) for chunk in chunks] == [None, None, [2], [2], [3]]


def test_choices_of_one_prompt() -> None:
    engines = [Engine(prompt_len=3, index=index) for index in range(2)]
    both = result(3, engines[1].step().outputs[0], engines[0].step(2).outputs[0])
    results = [both, engines[0].step(finish="stop"), engines[1].step(2, finish="stop")]
    chunks = stream(aligner_of(2), results, generator(num_choices=2))
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [1, 0, 0, 1]
    assert [prompt_positions(chunk) for chunk in chunks] == [[0, 1, 2], None, None, None]
    assert [positions(chunk) for chunk in chunks] == [None, [3], [4], [3, 4]]


def test_a_dozen_choices() -> None:
    """Their numbers have two digits."""
    engines = [Engine(prompt_len=2, index=index) for index in range(12)]
    first = result(2, *(engine.step().outputs[0] for engine in engines))
    second = result(2, *(engine.step(1 + engine.index, finish="stop").outputs[0] for engine in engines))
    chunks = stream(aligner_of(12), [first, second], generator(num_choices=12))
    assert [prompt_positions(chunk) for chunk in chunks] == [[0, 1]] + [None] * 23
    assert [positions(chunk) for chunk in chunks[12:]] == [[2, *range(3, 3 + index)] for index in range(12)]


def test_a_list_of_prompts() -> None:
    engines = [Engine(prompt_len=length) for length in (2, 4)]
    results: list[Result] = [
        (1, engines[1].step()),
        (0, engines[0].step()),
        (1, engines[1].step(finish="stop")),
        (0, engines[0].step(finish="stop")),
    ]
    chunks = stream(aligner_of(), results)
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [1, 0, 1, 0]
    assert [prompt_positions(chunk) for chunk in chunks] == [[0, 1, 2, 3], [0, 1], None, None]
    assert [positions(chunk) for chunk in chunks] == [None, None, [4], [2]]


def test_prompt_start_leaves_rows_out() -> None:
    engine = Engine(prompt_len=5, start=3)
    chunks = stream(aligner_of(prompt_start=3), [engine.step(), engine.step(finish="stop")])
    assert prompt_positions(chunks[0]) == [3, 4]
    assert positions(chunks[1]) == [5]


def test_prompt_start_at_the_end_of_the_prompt() -> None:
    engine = Engine(prompt_len=3, start=3)
    chunks = stream(aligner_of(prompt_start=3), [engine.step(), engine.step(), engine.step(finish="stop")])
    assert [prompt_positions(chunk) for chunk in chunks] == [[], None, None]
    assert chunks[0]["prompt_routed_experts"]["shape"] == [0, L, K]
    assert chunks[0]["prompt_routed_experts"]["start"] == 3
    assert [positions(chunk) for chunk in chunks] == [None, [3], [4]]


def test_joined_layout() -> None:
    engine = Engine(prompt_len=3, start=1)
    results = [engine.step(), engine.step(2), engine.step(finish="stop")]
    chunks = stream(aligner_of(prompt_start=1, layout="joined"), results)
    assert all(prompt_positions(chunk) is None for chunk in chunks)
    assert [positions(chunk) for chunk in chunks] == [[1, 2], [3, 4], [5]]


@pytest.mark.parametrize("first", [1, 2])
def test_joined_layout_without_prompt_rows(first: int) -> None:
    """Turn n of a conversation: a chunk with nothing new has no field."""
    engine = Engine(prompt_len=3, start=3)
    results = [engine.step(first), engine.step(finish="stop")]
    chunks = stream(aligner_of(prompt_start=3, layout="joined"), results)
    assert [positions(chunk) for chunk in chunks] == ([None, [3]] if first == 1 else [[3], [4]])


def test_joined_layout_without_any_rows() -> None:
    """As unstreamed: an empty array, which says that there are none."""
    engine = Engine(prompt_len=3, start=3)
    (chunk,) = stream(aligner_of(prompt_start=3, layout="joined"), [engine.step(finish="stop")])
    assert chunk["choices"][0]["routed_experts"]["shape"] == [0, L, K]
    assert chunk["choices"][0]["routed_experts"]["start"] == 3


def test_rows_of_tokens_behind_a_stop_string_are_not_sent() -> None:
    """The end is found in this process; the engine has gone on, and its rows are in the buffer."""
    engine = Engine(prompt_len=2)
    chunks = stream(aligner_of(), [engine.step(), engine.step(2, finish="stop", surplus=3)])
    assert [positions(chunk) for chunk in chunks] == [None, [2, 3]]


@pytest.mark.parametrize("finish", ["stop", "length", "repetition"])
def test_lost_rows_are_unknown(finish: str) -> None:
    engine = Engine(prompt_len=2)
    chunks = stream(aligner_of(), [engine.step(), engine.step(3, finish=finish, lost=2)])
    assert positions(chunks[1]) == [2, -1, -1]
    assert chunks[1]["choices"][0]["routed_experts"]["missing"] == 2


@pytest.mark.parametrize("histogram", [False, True])
@pytest.mark.parametrize("layout", ["split", "joined"])
@pytest.mark.parametrize("lost", [{0}, {1}, {2}, {0, 1}, {1, 3}])
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


def test_lost_prompt_rows_are_unknown() -> None:
    engine = Engine(prompt_len=3)
    (chunk,) = stream(aligner_of(), [engine.step(2, finish="length", lost=2)])
    assert prompt_positions(chunk) == [0, 1, -1]
    assert positions(chunk) == [-1]


def test_rows_that_are_late_are_not_lost() -> None:
    engine = Engine(prompt_len=2)
    steps: list[dict[str, Any]] = [{}, {"tokens": 2, "lost": 1}, {"finish": "stop"}]
    chunks = stream(aligner_of(), (engine.step(**step) for step in steps))  # each made when it is asked for
    assert [positions(chunk) for chunk in chunks] == [None, [2], [3, 4]]


def test_all_rows_lost() -> None:
    """Not one array arrived to tell the shape: the fields are there all the same."""
    results: list[Result] = [result(2, choice(1)), result(2, choice(2, finish="stop"))]
    chunks = stream(aligner_of(), results)
    assert [prompt_positions(chunk) for chunk in chunks] == [None, [-1, -1]]
    assert positions(chunks[1]) == [-1, -1]


def test_an_abort_is_never_padded() -> None:
    engine = Engine(prompt_len=2)
    chunks = stream(aligner_of(), [engine.step(), engine.step(2, finish="abort", lost=1)])
    assert [positions(chunk) for chunk in chunks] == [None, [2]]
    aborted: list[Result] = [result(2, choice(0, finish="abort"))]
    (chunk,) = stream(aligner_of(), aborted)
    assert prompt_positions(chunk) is None
    assert positions(chunk) is None


def ended(aligner: SSERewriter, results: Iterable[Result], generate: Any = None) -> list[str]:
    """All events of a stream that may end with an error."""

    async def buffer() -> AsyncIterator[Result]:
        for item in results:
            yield item

    chunks = (generate or generator())(aligner.watch(buffer()))

    async def collect() -> list[str]:
        events = [chunk async for chunk in aligner.rewrite(chunks)]
        with pytest.raises(StopAsyncIteration):  # it has ended, or was closed: nothing goes on behind the stream
            await anext(chunks)
        return events

    return asyncio.run(collect())


@pytest.mark.parametrize("form", ["object", "npy", "raw", "list"])
def test_uint8_cannot_say_that_a_row_is_lost(form: Any) -> None:
    engine = Engine(prompt_len=2)
    results = [engine.step(), engine.step(2, finish="stop", lost=1)]
    first, error, done = ended(aligner_of(dtype="uint8", format=form), results)
    assert "prompt_routed_experts" in first
    assert "1 rows are not known" in error
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
    engine = Engine(prompt_len=2)
    events = ended(aligner_of(max_bytes=250), [engine.step() for _ in range(10)])
    assert len(events) < 10
    assert "--routed-experts-max-response-bytes" in events[-2]
    assert events[-1] == "data: [DONE]\n\n"
    engine = Engine(prompt_len=2)
    events = ended(aligner_of(max_bytes=500), (engine.step() for _ in range(10)))
    assert 2 < len(events) < 10
    assert "--routed-experts-max-response-bytes" in events[-2]


def pieces_of(chunks: list[Chunk], name: str) -> list[dict[str, Any]]:
    arrays = [chunk.get(name) if name.startswith("prompt") else chunk["choices"][0].get(name) for chunk in chunks]
    return [array for array in arrays if array is not None]


@pytest.mark.parametrize(
    ("prompt_len", "tokens"),
    [(4090, 1), (4060, 1), (4000, 100), (31000, 1), (15000, 15000), (1, 20000), (3000, 3000), (2000, 2089)],
)
def test_no_line_holds_more_than_64_kib_of_routing(prompt_len: int, tokens: int) -> None:
    engine = Engine(prompt_len)
    texts = ended(aligner_of(), [engine.step(tokens), engine.step(finish="stop")])
    chunks = [orjson.loads(text.removeprefix("data: ")) for text in texts[:-1]]
    *lines, last, _usage = chunks
    for chunk in (*lines, last):
        arrays = pieces_of([chunk], "prompt_routed_experts") + pieces_of([chunk], "routed_experts")
        assert sum(len(orjson.dumps(array)) for array in arrays) <= 64 << 10
    assert [chunk["choices"][0]["finish_reason"] for chunk in lines] == [None] * len(lines)
    for name, first, end in (("prompt_routed_experts", 0, prompt_len), ("routed_experts", prompt_len, None)):
        arrays = pieces_of([*lines, last], name)
        assert "routed_experts" not in lines[0] or arrays
        at = first
        for array in arrays:
            assert array["start"] == at
            assert len(decode(array)) > 0
            at += len(decode(array))
        assert at == (end or prompt_len + tokens)
    assert "prompt_routed_experts" in lines[0]


def test_joined_rows_come_in_pieces_too() -> None:
    engine = Engine(10000)
    chunks = stream(aligner_of(layout="joined"), [engine.step(), engine.step(finish="stop")])
    assert len(chunks) > 3
    arrays = pieces_of(chunks, "routed_experts")
    assert all(len(orjson.dumps(array)) <= 64 << 10 for array in arrays)
    assert [array["start"] for array in arrays] == np.cumsum(
        [0, *(array["shape"][0] for array in arrays[:-1])]
    ).tolist()
    assert [at for chunk in chunks for at in positions(chunk) or ()] == list(range(10001))


def test_nobody_waits_for_all_pieces() -> None:
    """Between two of them another task gets its turn, though nothing has to be waited for."""

    async def results() -> AsyncIterator[Result]:
        yield Engine(50_000).step(finish="stop")

    async def run() -> tuple[int, int]:
        async with another_task() as turns:
            aligner = aligner_of()
            pieces = [chunk async for chunk in aligner.rewrite(generator()(aligner.watch(results())))]
        return len(pieces), turns.count

    num_chunks, num_turns = asyncio.run(run())
    assert num_chunks > 10
    assert num_turns >= num_chunks - 3


def test_what_fits_a_line_is_one_piece() -> None:
    engine = Engine(4060)
    first, _last = stream(aligner_of(), [engine.step(), engine.step(finish="stop")])
    assert len(first["prompt_routed_experts"]["data"]) > 60 << 10


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


def test_histograms_come_with_the_end_of_a_choice() -> None:
    engines = [Engine(prompt_len=3, index=index) for index in range(2)]
    both = result(3, engines[1].step().outputs[0], engines[0].step(2).outputs[0])
    results = [both, engines[0].step(finish="stop"), engines[1].step(2, finish="stop")]
    chunks = stream(aligner_of(2, rows=False, histogram=True), results, generator(num_choices=2))
    assert all(prompt_positions(chunk) is None and positions(chunk) is None for chunk in chunks)
    assert ["prompt_routed_experts_histogram" in chunk for chunk in chunks] == [False, False, True, False]
    of_prompt = chunks[2]["prompt_routed_experts_histogram"]
    assert (of_prompt["rows"], of_prompt["missing"]) == (3, 0)
    assert [np.flatnonzero(counts).tolist() for counts in of_prompt["counts"]] == [[0, 1, 2]] * L
    own = [chunk["choices"][0].get("routed_experts_histogram") for chunk in chunks]
    assert own[:2] == [None, None]
    assert [np.flatnonzero(each["counts"][0]).tolist() for each in own[2:]] == [[3, 4], [3, 4]]
    assert [each["rows"] for each in own[2:]] == [2, 2]


def test_a_histogram_comes_once_behind_the_pieces() -> None:
    *pieces, last = stream(aligner_of(histogram=True), [Engine(6000).step(finish="stop")])
    assert len(pieces) == 1
    assert last["choices"][0]["routed_experts_histogram"]["rows"] == 0
    for piece in pieces:
        assert "prompt_routed_experts_histogram" not in piece
        assert "routed_experts_histogram" not in piece["choices"][0]


def test_a_histogram_alone_brings_no_rows_in_any_layout() -> None:
    engine = Engine(prompt_len=3)
    aligner = aligner_of(rows=False, histogram=True, layout="joined")
    chunks = stream(aligner, [engine.step(2), engine.step(finish="stop")])
    assert [positions(chunk) for chunk in chunks] == [None, None]


def test_histograms_beside_rows() -> None:
    engine = Engine(prompt_len=3)
    chunks = stream(aligner_of(histogram=True, layout="joined"), [engine.step(2), engine.step(finish="stop")])
    assert [positions(chunk) for chunk in chunks] == [[0, 1, 2, 3], [4]]
    assert chunks[1]["prompt_routed_experts_histogram"]["rows"] == 3
    assert chunks[1]["choices"][0]["routed_experts_histogram"]["rows"] == 2


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


@pytest.mark.parametrize("form", ["npy", "raw", "list"])
def test_other_forms(form: Any) -> None:
    engine = Engine(prompt_len=2)
    chunks = stream(aligner_of(format=form), [engine.step(), engine.step(finish="stop")])
    arrays = chunks[0]["prompt_routed_experts"], chunks[1]["choices"][0]["routed_experts"]
    assert np.array_equal(decode(arrays[0], num_layers=L, top_k=K), rows_of(0, 2))
    assert np.array_equal(decode(arrays[1], num_layers=L, top_k=K), rows_of(2, 3))


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
