"""What the rows that are handed over with a prompt's KV take of each process that they pass: CPU time, no engine.

Sizes are those of 48 layers that choose 8 of 128 experts. The proxy's part is what it does for any answer of a prefill
instance: parse, and write the decode instance's request.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import msgspec
import numpy as np

from bench.http_table import commit_and_device, described
from bench.long_answers import EXPERTS, K, L
from bench.streamed_token import fastest
from routed_experts.capture import prefill_rows
from routed_experts.capture.engine.kv_transfer.tracker import KVLoad
from routed_experts.capture.host_cache import Cause, HostCache
from routed_experts.server.http.request import unpacked
from routed_experts.server.outputs.prefill_param import PARAMS, parse_prefill_rows, to_wire

PROMPTS = (2048, 16384, 32768, 131072)
BLOCK = 16
_HEAD = "| tokens | as | size | engine that computed it | its API process | proxy | decode API process | its engine |"


def row_of(tokens: int, packed: bool, repeats: int) -> str:
    coded = msgspec.msgpack if packed else msgspec.json
    rows = np.random.default_rng(0).integers(0, EXPERTS, (tokens, L, K), dtype=np.int16)
    times = []

    def step(function: Callable[[], Any]) -> Any:
        took, result = fastest(repeats, function)
        times.append(f"{1e3 * took:.1f} ms")
        return result

    blocks = np.random.default_rng(1).permutation(tokens // BLOCK)
    cache = HostCache(len(blocks), BLOCK)
    slots = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    cache.write(slots, rows)
    sent = step(lambda: prefill_rows.encode(partial(cache.read, blocks), tokens, (L, K), until=1e9))
    answer = step(lambda: coded.encode({PARAMS: to_wire({prefill_rows.PARAM: sent}, packed)}))
    request = step(lambda: coded.encode(coded.decode(answer)))
    read = unpacked if packed else coded.decode
    taken = step(lambda: parse_prefill_rows(read(request)[PARAMS][prefill_rows.PARAM], (L, K), EXPERTS))
    step(lambda: KVLoad(slots, prefill_rows.decode(taken), Cause.KV_TRANSFER).apply(cache))
    assert np.array_equal(prefill_rows.decode(taken).rows, rows)
    form = "MessagePack" if packed else "JSON"
    return f"| {tokens:,} | {form} | {len(answer) / 1e6:.1f} MB | {' | '.join(times)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="the fastest counts")
    args = parser.parse_args()
    about = commit_and_device("cpu", None)
    print(f"{described(about)}\n\n{_HEAD}")
    print("| --- " * (_HEAD.count("|") - 1) + "|")
    for tokens, packed in product(PROMPTS, (False, True)):
        print(row_of(tokens, packed, args.repeats), flush=True)


if __name__ == "__main__":
    main()
