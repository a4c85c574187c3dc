"""What the rows of a streamed token take of the API process, part by part: CPU time in a loop that does nothing else.

No engine and no sockets: outputs and chunks are made up, everything between them is real. In a server the same parts
take longer, because all else that it does for a token puts them out of the processor's caches.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from bench.http_table import commit_and_device, described
from bench.long_answers import EXPERTS, K, L, encoder_of, output_of
from routed_experts.capture.rows import joined
from routed_experts.protocol.models import RoutingOptions
from routed_experts.server.http.streaming import SSERewriter
from routed_experts.server.outputs.row_buffer import RowBuffer
from routed_experts.server.vllm_api import RequestOutput

OPTIONS, WITH_WEIGHTS, AT_END = RoutingOptions(), RoutingOptions(weights=True), RoutingOptions(at_end=True)
TOKENS, PROMPT, HELD_ROWS = 2000, 16, 64
CHUNK = (
    'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1763750000,"model":"served","choices":'
    '[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null,'
    '"prompt_token_ids":null}],"usage":null}\n\n'
)


def fastest(repeats: int, function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of CPU time of the fastest call, and what the last one returned."""
    times = []
    for _ in range(repeats):
        began = time.thread_time()
        result = function()
        times.append(time.thread_time() - began)
    return min(times), result


class Stream:
    """A stream of made-up tokens, with or without their rows, and with weights if `options` ask for them."""

    def __init__(self, repeats: int, options: RoutingOptions = OPTIONS) -> None:
        self._repeats = repeats
        self._options = options
        dice = np.random.default_rng(0)
        self._rows = dice.integers(0, EXPERTS, (PROMPT + TOKENS, L, K), dtype=np.int16)
        if options.weights:
            self._rows = joined(self._rows, dice.random(self._rows.shape, dtype=np.float32))

    async def _outputs(self, buffer: RowBuffer | None) -> AsyncIterator[RequestOutput]:
        prompt = [0] * PROMPT
        for token in range(TOKENS):
            if buffer is not None and (not self._options.at_end or token % HELD_ROWS == 0 or token == TOKENS - 1):
                start, end = max(buffer.end, 0), PROMPT + token
                buffer.push(start, self._rows[start:end])
            yield output_of(prompt, buffer, 1, "length" if token == TOKENS - 1 else None)

    async def _chunks(self, outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[str]:
        async for _ in outputs:
            yield CHUNK

    async def _timed(self, chunks: Callable[[], AsyncIterator[str]]) -> float:
        best = float("inf")
        for _ in range(self._repeats):
            began = time.thread_time()
            async for _ in chunks():
                pass
            best = min(best, time.thread_time() - began)
        return 1e6 * best / TOKENS

    async def figures(self) -> dict[str, float]:
        """Microseconds of a token above a stream without rows: of all, and of what can be told apart."""

        def whole() -> AsyncIterator[str]:
            aligner = SSERewriter(self._options, encoder_of(self._options), 1, str)
            return aligner.rewrite(self._chunks(aligner.watch(self._outputs(RowBuffer()))))

        off = await self._timed(lambda: self._chunks(self._outputs(None)))
        if self._options.at_end:
            return {"all": await self._timed(whole) - off}
        return {"all": await self._timed(whole) - off, "of it encoding": self._encoding()}

    def _encoding(self) -> float:
        encoder, row = encoder_of(self._options), self._rows[:1]

        def encode_all() -> None:
            for position in range(TOKENS):
                encoder.fields("routed_experts", row, position)

        return 1e6 * fastest(self._repeats, encode_all)[0] / TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=25, help="the fastest counts")
    args = parser.parse_args()
    about = commit_and_device("cpu", None)
    print(described(about))
    for what, options in (("ids", OPTIONS), ("ids and weights", WITH_WEIGHTS), ("ids at the end", AT_END)):
        for name, us in asyncio.run(Stream(args.repeats, options).figures()).items():
            print(f"| {what}, {name} | {us:.1f} µs |")


if __name__ == "__main__":
    main()
