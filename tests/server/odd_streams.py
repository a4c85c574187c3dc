"""Streams of all kinds, each made from a number: what a client gets, byte for byte."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import orjson

from routed_experts.capture.wire.rows import combined
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.http.answers.streaming import SSERewriter
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import CompletionOutput, RequestOutput
from tests.server.known import encoder_of, push_from_message

L, K = 2, 3
UNSIGNED = ("uint8", "uint16")  # which cannot hold -1
DECODER_LAYERS = [1, 3], 4
TEXTS = ("a", "", "七", '"choices":[{"index":0,', '"finish_reason":null', "\u2028\n\\")
ENDS = ("stop", "length", "repetition", "abort")

OWN_FIELD = '"routed_experts":null,'
"""vLLM's own field in a streamed choice of generate."""


def rows_of(first: int, end: int, num_experts: int, with_weights: bool) -> np.ndarray:
    """Rows whose ids are made of their positions, and whose weights now and then have bytes of -1."""
    ids = (np.arange(first, end)[:, None] * 7 + np.arange(L * K)) % num_experts
    rows = ids.astype(np.int16).reshape(-1, L, K)
    if not with_weights:
        return rows
    weights = np.where(ids % 5 == 0, -np.inf, ids / 256).astype(np.float32)
    return combined(rows, weights.reshape(-1, L, K))


class OddStream:
    """A request and its answer; `lines` is what the client gets."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.num_experts = rng.choice([200, 300])
        self.options = self._options()
        self.prompt_lens = [rng.randint(1, 6) for _ in range(rng.choice([1, 1, 2]))]
        if rng.random() < 0.2:  # of more than a line
            self.prompt_lens[0] = rng.randint(2000, 20_000)
        start = rng.choice([0, 0, 1, min(self.prompt_lens)])
        self.options["prompt_start"] = start
        self.num_choices = rng.choice([1, 1, 2, 12])
        self.has_own_field = len(self.prompt_lens) == 1 and rng.random() < 0.3
        has_preface = len(self.prompt_lens) == 1 and not self.has_own_field and rng.random() < 0.3
        self.preface = self.num_choices if has_preface else 0
        self.max_bytes = rng.choice([1 << 30] * 8 + [2000])
        self.buffers = [RowBuffer() for _ in self.prompt_lens for _ in range(self.num_choices)]
        self.tokens = [0] * len(self.buffers)
        self.next_rows = [start] * len(self.buffers)

    def _options(self) -> dict[str, Any]:
        rng = self.rng
        has_rows = rng.random() < 0.9
        layout = rng.choice(["split", "split", "joined"])
        weights = rng.random() < 0.3
        formats = ["object", "object", "object", "npy", "raw", "list"]
        dtypes = ["int16", "int16", "int32", "uint16" if self.num_experts > 256 else "uint8"]
        return {
            "rows": has_rows,
            "histogram": not has_rows or rng.random() < 0.3,
            "weights": weights,
            "layout": layout,
            "format": rng.choice(formats),
            "dtype": rng.choice(dtypes),
            "layers": rng.choice(["moe", "moe", "all"]),
            "at_end": rng.random() < 0.25,
        }

    def lines(self) -> list[str]:
        return asyncio.run(self._lines())

    async def _lines(self) -> list[str]:
        options = RoutingOptions(**self.options)
        rewriter = SSERewriter(
            options,
            encoder_of(
                options,
                (L, K),
                self.num_experts,
                DECODER_LAYERS if options.layers == "all" else None,
            ),
            self.num_choices,
            lambda error: f'{{"error":"{error}"}}',
            preface_chunks=self.preface,
            max_bytes=self.max_bytes,
            has_own_field=self.has_own_field,
        )
        lines = rewriter.rewrite(self._chunks(rewriter.watch(self._results())))
        counts = rewriter.encoder.counts
        return [line async for line in lines] + [f"{counts} {rewriter.encoder.num_bytes}"]

    async def _chunks(self, results: AsyncIterator[Any]) -> AsyncIterator[str]:
        """As vLLM makes them; a parser may hold some back."""
        is_first = True
        async for result in results:
            prompt, output = result if isinstance(result, tuple) else (0, result)
            for index in range(self.preface if is_first else 0):
                yield self._chunk(index, None)
            is_first = False
            for choice in output.outputs:
                if choice.finish_reason or self.rng.random() < 0.8:
                    index = prompt * self.num_choices + choice.index
                    yield self._chunk(index, choice.finish_reason)
        yield 'data: {"id":"1","choices":[],"usage":{"total_tokens":3}}\n\n'
        yield "data: [DONE]\n\n"

    def _chunk(self, index: int, finish: str | None) -> str:
        choice = {"index": index, "text": self.rng.choice(TEXTS), "finish_reason": finish}
        body = {"id": "1", "choices": [choice | {"token_ids": [index]}], "system_fingerprint": "x"}
        text = orjson.dumps(body).decode()
        if self.has_own_field:
            end = text.index('"token_ids"')
            text = text[:end] + OWN_FIELD + text[end:]
        return f"data: {text}\n\n"

    async def _results(self) -> AsyncIterator[Any]:
        running = list(range(len(self.buffers)))
        while running:
            prompt = self.rng.choice(running) // self.num_choices
            of_prompt = [key for key in running if key // self.num_choices == prompt]
            count = self.rng.choice([1, 1, 1, len(of_prompt)])  # outputs of choices may be merged
            keys = self.rng.sample(of_prompt, count)
            choices = [self._step(key) for key in keys]
            ended = {key for key, one in zip(keys, choices, strict=True) if one.finish_reason}
            running = [key for key in running if key not in ended]
            token_ids = [0] * self.prompt_lens[prompt]
            output = RequestOutput("r", None, token_ids, None, choices, finished=False)
            yield (prompt, output) if len(self.prompt_lens) > 1 else output

    def _step(self, key: int) -> CompletionOutput:
        """An output of a choice. Its rows come, come late or twice, are lost, or unknown."""
        rng = self.rng
        num_tokens = rng.choice([1, 1, 1, 1, 2, 3])
        finish = None
        if self.tokens[key] > 3 and rng.random() < 0.25:
            finish = rng.choice(ENDS)
        self.tokens[key] += num_tokens
        end = self.prompt_lens[key // self.num_choices] + self.tokens[key] - 1
        first = self.next_rows[key]
        fate = rng.random()
        if fate < 0.05:  # lost
            self.next_rows[key] = end
        elif fate < 0.1 and finish is None:  # late
            pass
        elif end >= first:
            if fate < 0.15:  # twice
                first = max(first - 1, self.options["prompt_start"])
            rows = rows_of(first, end, self.num_experts, self.options["weights"])
            if fate > 0.92 and self.options["dtype"] not in UNSIGNED:
                rows[-1:] = -1
            push_from_message(self.buffers[key], first, rows)
            self.next_rows[key] = end
        buffer = self.buffers[key]
        return CompletionOutput(
            key % self.num_choices,
            "",
            [0] * num_tokens,
            None,
            None,
            routed_experts=buffer if rng.random() < 0.95 else None,  # type: ignore[arg-type]
            finish_reason=finish,
        )
