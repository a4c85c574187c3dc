"""Rows on the chunks of a stream, with hand-made results in and a generator like vLLM's in
between."""

import asyncio
import itertools
import random
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import orjson
import pytest

from routed_experts.capture.wire.envelope import RunRows
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.http.answers.response import CollectedRows
from routed_experts.server.http.answers.streaming import SSERewriter
from routed_experts.server.http.arrays.references import Delivery, ReferenceMaker
from routed_experts.server.inprocess.arrays import ArrayBuffer, ArrayForm
from routed_experts.server.outputs.array_store import ArrayStore
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import CompletionOutput, RequestOutput, RequestOutputKind
from tests.server.known import (
    K,
    L,
    buffer_of,
    choice,
    encoder_of,
    output,
    positions,
    push_from_message,
    rows_of,
)

EXPERTS = 256
DONE = "data: [DONE]\n\n"
Result = RequestOutput | tuple[int, RequestOutput]
Chunk = dict[str, Any]


class Engine:
    """One choice as the engine streams it: `step` gives the output that brings its next tokens.

    Attributes:
        arrived: the position behind the last row that arrived.
        lost: the positions of rows that did not.
    """

    def __init__(self, prompt_len: int, start: int = 0, index: int = 0) -> None:
        self.prompt_len, self.index = prompt_len, index
        self.sent, self.tokens, self.arrived = start, 0, 0
        self.buffer, self.lost = RowBuffer(), set[int]()

    def step(
        self, tokens: int = 1, finish: str | None = None, late: int = 0, surplus: int = 0
    ) -> RequestOutput:
        """An output of `tokens`; `late` of its rows do not come, `surplus` are of tokens that were
        cut off again."""
        self.tokens += tokens
        end = self.prompt_len + self.tokens - 1
        push_from_message(self.buffer, self.sent, rows_of(self.sent, end - late + surplus))
        self.sent = self.arrived = end - late
        return output(self.prompt_len, choice(tokens, self.buffer, self.index, finish))

    def lose(
        self, tokens: int = 1, finish: str | None = None, buffer: RowBuffer | None = None
    ) -> RequestOutput:
        """An output whose rows are lost on the way. Without a buffer, that of the output before
        still holds."""
        self.tokens += tokens
        end = self.prompt_len + self.tokens - 1
        self.lost |= set(range(self.sent, end))
        self.sent = end
        return output(self.prompt_len, choice(tokens, buffer, self.index, finish))


def aligner_of(
    num_choices: int = 1,
    preface: int = 0,
    dtype: Any = "int16",
    max_bytes: int = 1 << 30,
    delivery: Delivery | None = None,
    **options: Any,
) -> SSERewriter:
    requested = RoutingOptions(dtype=dtype, **options)
    encoder = encoder_of(requested, num_experts=EXPERTS)
    return SSERewriter(
        requested,
        encoder,
        num_choices,
        lambda error: f'{{"error":"{error}"}}',
        preface_chunks=preface,
        max_bytes=max_bytes,
        delivery=delivery,
    )


def event(body: Chunk) -> str:
    return f"data: {orjson.dumps(body).decode()}\n\n"


USAGE = event({"choices": [], "usage": {}})


def generator(
    is_held: Callable[[], bool] = lambda: False,
    preface: int = 0,
    num_choices: int = 1,
    note: Callable[[int, int, CompletionOutput | None], None] = lambda *made: None,
) -> Callable[[AsyncIterator[Result]], AsyncIterator[str]]:
    """A generator like vLLM's: `preface` chunks, then one for each choice of a result that is not
    held back."""

    async def generate(results: AsyncIterator[Result]) -> AsyncIterator[str]:
        is_first = True
        async for item in results:
            prompt, output = item if isinstance(item, tuple) else (0, item)
            for index in range(preface if is_first else 0):
                note(prompt, index, None)
                yield event({"choices": [{"index": index, "preface": True}]})
            is_first = False
            for completion in output.outputs:
                assert completion.routed_experts is None, "vLLM would take it for an array"
                if completion.finish_reason or not is_held():
                    index = prompt * num_choices + completion.index
                    note(prompt, index, completion)
                    yield event(
                        {"choices": [{"index": index, "finish_reason": completion.finish_reason}]}
                    )
        yield USAGE
        yield DONE

    return generate


def ended(aligner: SSERewriter, results: Iterable[Result], generate: Any = None) -> list[str]:
    """All events of a stream, which may end with an error."""

    async def feed() -> AsyncIterator[Result]:
        for item in results:
            yield item

    chunks = (generate or generator())(aligner.watch(feed()))

    async def collect() -> list[str]:
        events = [chunk async for chunk in aligner.rewrite(chunks)]
        # it has ended, or was closed: nothing goes on behind the stream
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)
        return events

    return asyncio.run(collect())


def stream(aligner: SSERewriter, results: Iterable[Result], generate: Any = None) -> list[Chunk]:
    """The chunks that a client gets, those of the usage and of the end checked and left out."""
    *chunks, usage, done = ended(aligner, results, generate)
    assert (usage, done) == (USAGE, DONE)
    assert all(chunk.endswith("}\n\n") for chunk in chunks)
    return [orjson.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def arrays_of(chunk: Chunk) -> tuple[Any, Any]:
    """The array of the prompt and of the choice; None for one that is not there."""
    return chunk.get("prompt_routed_experts"), chunk["choices"][0].get("routed_experts")


def placed(chunk: Chunk) -> tuple[list[int] | None, list[int] | None]:
    """The positions of the rows in both arrays, checked to begin at `start`."""
    arrays = arrays_of(chunk)
    known = tuple(None if array is None else positions(array) for array in arrays)
    for array, values in zip(arrays, known, strict=True):
        assert all(
            value in (-1, array["start"] + index) for index, value in enumerate(values or ())
        )
    return known  # type: ignore[return-value]


def own_start(chunk: Chunk) -> int | None:
    _, own = arrays_of(chunk)
    return None if own is None else own["start"]


def prompt_positions(chunks: list[Chunk]) -> list[int]:
    return [position for chunk in chunks for position in placed(chunk)[0] or ()]


def own_positions(chunks: list[Chunk]) -> list[int]:
    return [position for chunk in chunks for position in placed(chunk)[1] or ()]


class Made(NamedTuple):
    """A chunk of the generator, and what is known then: the choice's tokens, 0 before its text;
    where rows end."""

    prompt: int
    choice: int
    tokens: int
    arrived: int
    finish: str | None


class Play:
    """A request whose choices get tokens in random order and steps; some rows are late, lost, or
    surplus."""

    def __init__(self, rng: random.Random, options: dict[str, Any]) -> None:
        self.rng, self.options = rng, options
        self.prompt_lens = [rng.randint(2, 5) for _ in range(rng.choice([1, 1, 2]))]
        self.start = rng.choice([0, 1, min(self.prompt_lens)])
        self.num_choices = rng.choice([1, 2, 12])
        self.preface = rng.choice([0, self.num_choices]) if len(self.prompt_lens) == 1 else 0
        self.engines = [
            Engine(length, self.start, at)
            for length in self.prompt_lens
            for at in range(self.num_choices)
        ]
        self.made: list[Made] = []

    def run(self) -> list[Chunk]:
        def holds_back() -> bool:
            return self.rng.random() > 0.7  # as a parser

        rewriter = aligner_of(
            self.num_choices, self.preface, **self.options, prompt_start=self.start
        )
        return stream(
            rewriter,
            self._results(),
            generator(holds_back, self.preface, self.num_choices, self._note),
        )

    def _note(self, prompt: int, engine_index: int, choice: CompletionOutput | None) -> None:
        engine = self.engines[engine_index]
        if choice is None:  # of a chunk before the text
            self.made.append(Made(prompt, engine_index, tokens=0, arrived=0, finish=None))
        else:
            made = Made(prompt, engine_index, engine.tokens, engine.arrived, choice.finish_reason)
            self.made.append(made)

    def _results(self) -> Iterator[Result]:
        alive = list(range(len(self.engines)))
        while alive:
            choices: list[CompletionOutput] = []
            engine_index = self.rng.choice(alive)
            prompt = engine_index // self.num_choices
            others = [self.rng.choice(alive) for _ in range(self.rng.choice([0, 0, 2]))]
            for stepping in {engine_index, *others}:
                # outputs of one prompt's choices may come together
                if stepping // self.num_choices == prompt:
                    choices += self._step(self.engines[stepping]).outputs
                    if choices[-1].finish_reason:
                        alive.remove(stepping)
            result = output(self.prompt_lens[prompt], *choices)
            yield (prompt, result) if len(self.prompt_lens) > 1 else result

    def _step(self, engine: Engine) -> RequestOutput:
        rng = self.rng
        tokens = rng.choice([1, 1, 1, 2, 3])
        ends = engine.tokens > 4 and rng.random() < 0.3
        reason = rng.choice(["stop", "length", "repetition", "abort"]) if ends else None
        if engine.tokens and self.options.get("dtype") != "uint8" and rng.random() < 0.1:
            buffers = [engine.buffer] if self.options.get("at_end") else [engine.buffer, None]
            return engine.lose(tokens, reason, rng.choice(buffers))
        late = int(not ends and engine.tokens > 0 and rng.random() < 0.1)
        return engine.step(tokens, reason, late, rng.choice([0, 2]) if ends else 0)


class Counted(NamedTuple):
    """What a histogram counts: positions of known rows, and the number of all."""

    known: list[int]
    num_rows: int


class Due:
    """What is due with each chunk of a play, asked for chunk by chunk: positions of rows, -1 for
    those that were lost; None for no array."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self._is_joined = play.options["layout"] == "joined"
        self._has_rows = play.options["rows"]
        self._has_histogram = play.options["histogram"]
        self._at_end = play.options.get("at_end", False)
        self._sent_prompts: set[int] = set()
        self._counted_prompts: set[int] = set()
        self._next_row = [
            play.start if self._is_joined else engine.prompt_len for engine in play.engines
        ]

    def _prompt(self, made: Made) -> list[int]:
        return list(range(self._play.start, self._play.prompt_lens[made.prompt]))

    def _end(self, made: Made) -> int:
        """The position behind the last row that is due: of a choice that has ended, all rows of its
        tokens; else those that had arrived."""
        if not made.tokens:
            return 0
        end = self._play.prompt_lens[made.prompt] + made.tokens - 1
        has_all = made.finish is not None and made.finish != "abort"
        return end if has_all else min(end, made.arrived)

    def prompt_rows(self, made: Made) -> list[int] | None:
        """With the first chunk of any of a prompt's choices that has rows."""
        if self._is_joined or not self._has_rows or made.prompt in self._sent_prompts:
            return None
        if self._at_end and not made.finish:
            return None
        self._sent_prompts.add(made.prompt)
        return self._prompt(made)

    def first_row(self, made: Made) -> int:
        return self._next_row[made.choice]

    def own_rows(self, made: Made) -> list[int] | None:
        if self._at_end and not made.finish:
            return None
        first = self._next_row[made.choice]
        end = self._end(made)
        self._next_row[made.choice] = max(first, end)
        if not self._has_rows:
            return None
        lost = self._play.engines[made.choice].lost
        rows = [-1 if position in lost else position for position in range(first, end)]
        # a joined response without rows has an array
        is_there = self._is_joined and made.finish is not None and end == self._play.start
        return rows if rows or is_there else None

    def of_prompt(self, made: Made) -> Counted | None:
        """With the last chunk of the first choice that ends."""
        if not self._has_histogram or not made.finish or made.prompt in self._counted_prompts:
            return None
        self._counted_prompts.add(made.prompt)
        prompt = self._prompt(made)
        return Counted(prompt, len(prompt))

    def of_own(self, made: Made) -> Counted | None:
        if not self._has_histogram or not made.finish:
            return None
        lost = self._play.engines[made.choice].lost
        generated = range(self._play.prompt_lens[made.prompt], self._end(made))
        known = [position for position in generated if position not in lost]
        return Counted(known, len(generated))


OPTIONS: dict[str, dict[str, Any]] = {
    "rows": {},
    "rows, of a type that cannot say that one is lost": {"dtype": "uint8"},
    "rows that are converted": {"dtype": "int32"},
    "rows at the end": {"at_end": True},
    "rows and histograms": {"histogram": True},
    "histograms": {"histogram": True, "rows": False},
}


@pytest.mark.parametrize("layout", ["split", "joined"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_row_once_with_its_tokens(layout: str, options: dict[str, Any]) -> None:
    """The prompt's rows with its first chunk; then, with each chunk, all rows that its tokens made
    known."""
    for seed in range(40):
        play = Play(
            random.Random(seed), {"layout": layout, "histogram": False, "rows": True, **options}
        )
        chunks = play.run()
        due = Due(play)
        for chunk, made in zip(chunks, play.made, strict=True):
            assert own_start(chunk) in (None, due.first_row(made))
            assert placed(chunk) == (due.prompt_rows(made), due.own_rows(made))
            check_histogram(chunk.get("prompt_routed_experts_histogram"), due.of_prompt(made))
            check_histogram(chunk["choices"][0].get("routed_experts_histogram"), due.of_own(made))


def check_histogram(histogram: dict[str, Any] | None, expected: "Counted | None") -> None:
    if histogram is None or expected is None:
        assert histogram is expected
        return
    num_known = len(expected.known)
    assert histogram["rows"] == expected.num_rows
    assert histogram["missing"] == expected.num_rows - num_known
    assert [np.flatnonzero(layer).tolist() for layer in histogram["counts"]] == [expected.known] * L


@pytest.mark.parametrize("histogram", [False, True])
def test_what_waits_keeps_no_message_of_the_engine(histogram: bool) -> None:
    """One that is held back, or counted, would keep the rows of all that ran beside it."""
    messages: list[weakref.ref[np.ndarray]] = []
    engine, count = Engine(prompt_len=2), itertools.count(1)

    def results() -> Iterator[Result]:
        for token in range(20):
            message = rows_of(0, 100).copy()  # so that a view of it keeps it
            messages.append(weakref.ref(message))
            if token == 0:
                engine.buffer.push(0, message[:2])
            else:
                engine.buffer.push_from(RunRows(message[:, np.newaxis]), token + 1, token + 1)
            del message
            yield output(2, choice(1, engine.buffer, finish="stop" if token == 19 else None))
            assert sum(message() is not None for message in messages) <= 2, (
                "kept beside the one under way"
            )

    held = generator(lambda: 3 < next(count) < 15)
    assert own_positions(stream(aligner_of(histogram=histogram), results(), held)) == list(
        range(2, 21)
    )


@pytest.mark.parametrize("layout", ["split", "joined"])
@pytest.mark.parametrize("lost", [{0}, {1, 3}, {0, 1, 2, 3, 4}])
def test_a_message_that_is_lost_leaves_a_gap_at_its_place(lost: set[int], layout: str) -> None:
    """Rows of the tokens after it do not move there: not into the prompt, and not to another token.
    Where not one array arrived to tell the shape, the fields are there all the same."""
    engine = Engine(prompt_len=2)
    steps = [engine.lose if token in lost else engine.step for token in range(5)]
    finishes = [None, None, None, None, "stop"]
    results = (step(1, finish) for step, finish in zip(steps, finishes, strict=True))
    chunks = stream(aligner_of(layout=layout, histogram=True), results)
    sent = prompt_positions(chunks) + own_positions(chunks)
    assert sent == [-1 if at in engine.lost else at for at in range(6)]
    last = chunks[-1]
    of_prompt = last["prompt_routed_experts_histogram"]
    own = last["choices"][0]["routed_experts_histogram"]
    assert of_prompt["missing"] == (2 if 0 in lost else 0)
    assert own["missing"] == len(lost - {0})


def test_a_prompt_whose_last_row_is_late_comes_before_the_rows_of_its_choice() -> None:
    engine = Engine(prompt_len=2)
    steps: list[dict[str, Any]] = [{"late": 1}, {}, {"finish": "stop"}]
    chunks = stream(aligner_of(), (engine.step(**step) for step in steps))
    assert [placed(chunk) for chunk in chunks] == [(None, None), ([0, 1], [2]), (None, [3])]
    only = stream(aligner_of(histogram=True), [Engine(prompt_len=2).step(finish="stop")])
    assert [placed(chunk) for chunk in only] == [([0, 1], None)]


@pytest.mark.parametrize("prompt_len", [1, 4085, 8169])
def test_lines_of_many_rows_are_short_and_the_first_begins_with_the_prompt(prompt_len: int) -> None:
    """Of 8,170 rows, which fill two lines but for the words around an array."""
    step = Engine(prompt_len).step(8171 - prompt_len, "length")
    events = ended(aligner_of(at_end=True), [step])
    assert len(events) > 3
    assert max(map(len, events)) <= 64 << 10
    of_prompt, _ = placed(orjson.loads(events[0].removeprefix("data: ")))
    assert of_prompt is not None
    assert of_prompt[0] == 0


def test_a_joined_answer_without_rows_has_an_empty_array() -> None:
    """The last token has no row, and those of the prompt were not asked for."""
    rewriter = aligner_of(layout="joined", prompt_start=2)
    [chunk] = stream(rewriter, [Engine(prompt_len=2, start=2).step(finish="length")])
    assert placed(chunk) == (None, [])


@pytest.mark.parametrize("at_end", [False, True])
def test_a_prompt_comes_from_a_choice_that_has_it(at_end: bool) -> None:
    """Not from one that is complete without it, as its rows were lost."""
    merged = output(4, choice(1, buffer_of((0, rows_of(0, 4))), 1), choice(1, RowBuffer(), 0))
    chunks = stream(aligner_of(2, at_end=at_end), [merged])
    assert [placed(chunk)[0] for chunk in chunks] == [[0, 1, 2, 3], None]


def test_errors_end_the_stream_with_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(prompt_len=2)
    first, error, done = ended(
        aligner_of(dtype="uint8"), [engine.step(), engine.step(2, finish="stop", late=1)]
    )
    assert "prompt_routed_experts" in first
    assert "1 rows are unknown" in error
    assert "uint8 cannot hold" in error
    assert done == DONE
    engine = Engine(prompt_len=2)
    failing = aligner_of()
    monkeypatch.setattr(failing.encoder, "fields", Mock(side_effect=MemoryError("no more")))
    assert ended(failing, [engine.step(), engine.step(finish="stop")]) == [
        'data: {"error":"no more"}\n\n',
        DONE,
    ]
    for max_bytes, least in ((250, 2), (500, 3)):
        engine = Engine(prompt_len=2)
        events = ended(aligner_of(max_bytes=max_bytes), (engine.step() for _ in range(10)))
        assert least <= len(events) < 10
        assert "--routed-experts-max-response-bytes" in events[-2]
        assert events[-1] == DONE


def test_pieces_bring_no_text_and_say_nothing_twice() -> None:
    said = {"id": "cmpl-1", **dict.fromkeys(("usage", "prompt_token_ids", "kv_transfer_params"), 3)}

    async def generate(results: AsyncIterator[Result]) -> AsyncIterator[str]:
        async for _ in results:
            yield event(
                {
                    "choices": [
                        {"index": 0, "text": "a", "finish_reason": "stop", "token_ids": [1]}
                    ],
                    **said,
                }
            )

    texts = ended(aligner_of(), [Engine(6000).step(finish="stop")], generate)
    piece, last = [orjson.loads(text.removeprefix("data: ")) for text in texts]
    del piece["prompt_routed_experts"]
    blank = {"index": 0, "text": "", "finish_reason": None, "token_ids": []}
    assert piece == {"choices": [blank], "id": "cmpl-1"}
    assert said.items() <= last.items()


def test_what_is_before_a_choice_may_differ_between_its_chunks() -> None:
    """As usage does at vLLM's route for tokens. The first choice's last row comes late, with text
    that was held back and no token, behind chunks of the other whose usage is a digit longer."""
    engines = [Engine(4, index=index) for index in range(2)]

    def results() -> Iterator[RequestOutput]:
        for number in [0, 1, *[1] * 8, *[0] * 7]:
            yield engines[number].step()
        yield engines[0].step(late=1)
        yield engines[1].step()
        yield engines[0].step(0)
        for engine in engines:
            yield engine.step(finish="stop")

    async def generate(results: AsyncIterator[Result]) -> AsyncIterator[str]:
        num_tokens = [0, 0]
        async for result in results:
            assert isinstance(result, RequestOutput)
            (completion,) = result.outputs
            num_tokens[completion.index] += len(completion.token_ids)
            shown = {"index": completion.index, "finish_reason": completion.finish_reason}
            yield event({"usage": num_tokens[completion.index], "choices": [shown]})
        yield USAGE
        yield DONE

    aligner = aligner_of(2)
    chunks = stream(aligner, results(), generate)
    assert [chunk["usage"] for chunk in chunks[-5:]] == [9, 10, 9, 10, 11]
    for index, engine in enumerate(engines):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own_positions(own) == [*range(4, 4 + engine.tokens - 1)]


def test_a_stream_keeps_no_more_than_its_choices() -> None:
    engine = Engine(4)
    kept = []

    async def generate(results: AsyncIterator[Result]) -> AsyncIterator[str]:
        async for _ in results:
            kept.append(len(aligner._choices_by_head))
            yield event({"usage": engine.tokens, "choices": [{"index": 0, "finish_reason": None}]})
        yield USAGE
        yield DONE

    aligner = aligner_of()
    stream(aligner, (engine.step() for _ in range(50)), generate)
    assert kept[-1] == 1


def test_other_events_are_left_as_they_are() -> None:
    events = [": keep-alive\n\n", event({"error": {"message": "x"}}), DONE, "data: {}\n\n"]

    async def generate(results: AsyncIterator[Result]) -> AsyncIterator[str]:
        for event in events:
            yield event

    assert ended(aligner_of(), [], generate) == events


@pytest.mark.parametrize("finish", ["stop", "abort", "error", "a reason that vLLM adds"])
def test_a_row_that_is_missing_is_the_same_streamed_whole_and_in_a_program(finish: str) -> None:
    """Whatever ends a choice: -1 for its last row, or for an abort none."""

    def ends() -> RequestOutput:
        return output(3, choice(4, buffer_of((0, rows_of(0, 5))), finish=finish))

    chunks = stream(aligner_of(), [ends()])
    whole = CollectedRows(RoutingOptions(), (L, K))
    whole.collect(ends())
    model = SimpleNamespace(get_num_experts=lambda: EXPERTS, get_total_num_hidden_layers=lambda: L)
    form = ArrayForm(model)
    form.learn({"num_layers": L, "top_k": K, "layer_ids": list(range(L))})
    program = ArrayBuffer(form, "a", start=0, prompt_len=3, kind=RequestOutputKind.FINAL_ONLY)
    program.push(0, rows_of(0, 5))
    array, _ = program.arrays_of(ends().outputs[0])
    rows = np.concatenate([*whole.prompts[0], *whole.choices[0][1]])[:, 0, 0].tolist()
    assert rows == [0, 1, 2, 3, 4] + [-1] * (finish not in ("abort", "error"))
    assert own_positions(chunks) == rows[3:]
    assert array[:, 0, 0].tolist() == rows


class TwoByReference:
    """A stream of two choices, whose arrays are stored in a folder. The first ends at once, the
    second when `goes_on` is set.

    Attributes:
        was_closed: whether the generator that vLLM has there has ended.
    """

    def __init__(self, folder: Path) -> None:
        self.goes_on = asyncio.Event()
        self.was_closed = False
        maker = ReferenceMaker(ArrayStore(folder, 1 << 20))
        self._rewriter = aligner_of(2, delivery=maker, by_reference=True, at_end=True)
        self._choices = [Engine(3, index=index) for index in range(2)]

    def lines(self) -> AsyncIterator[str]:
        return self._rewriter.rewrite(generator()(self._rewriter.watch(self._results())))

    async def _results(self) -> AsyncIterator[Result]:
        first, second = self._choices
        try:
            yield first.step(finish="length")
            await self.goes_on.wait()
            yield second.step(finish="length")
        finally:
            self.was_closed = True


def test_a_choice_does_not_wait_for_another_once_its_array_is_stored(tmp_path: Path) -> None:
    async def read() -> list[str]:
        two = TwoByReference(tmp_path / "store")
        lines = two.lines()
        first = await anext(lines)
        two.goes_on.set()
        return [first, *[line async for line in lines]]

    *chunks, usage, done = asyncio.run(asyncio.wait_for(read(), 60))
    choices = [orjson.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert all("url" in choice["routed_experts"] for choice in choices)
    assert (usage, done) == (USAGE, DONE)


def test_a_client_that_leaves_between_two_choices_ends_the_stream(tmp_path: Path) -> None:
    """While the next event is waited for."""

    async def leave() -> bool:
        two = TwoByReference(tmp_path / "store")
        lines: Any = two.lines()
        await anext(lines)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(lines), 0.1)  # clock: it is cancelled
        return two.was_closed

    assert asyncio.run(asyncio.wait_for(leave(), 60))
