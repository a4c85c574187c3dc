"""Answers as the server sends them, made from rows that are known beforehand."""

import base64
import json
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from routed_experts.protocol.codec import UNKNOWN_STEP, UNKNOWN_WEIGHT, Format, count_missing
from routed_experts.protocol.expert_load import Histogram, count_experts
from tests.protocol.forms import encode

EXPERTS, LAYERS, TOP_K = 60, 3, 4

NUMBERS = [
    -(10**400),
    -(2**70),
    -1,
    0,
    1,
    2,
    255,
    2**15,
    2**31,
    2**53,
    2**70,
    10**9,
    10**18,
    10**400,
    0.5,
    1e308,
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(["", "x", "\ud800", "stop", "k05VTVBZ", *NUMBERS])
    | st.floats()
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["index", "data"]), inner, max_size=2)
    ),
    max_leaves=5,
)
"""Any value."""


def peak_of(run: Callable[[], Any]) -> tuple[Any, int]:
    """What `run` returns, and how much memory it takes at most."""
    tracemalloc.start()
    try:
        return run(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def histogram(rows: np.ndarray, num_experts: int) -> Histogram:
    return {
        "counts": count_experts(rows, num_experts).tolist(),
        "rows": len(rows),
        "missing": count_missing(rows),
    }


def rows_of(
    count: int, seed: int = 0, experts: int = EXPERTS, layers: int = LAYERS, top_k: int = TOP_K
) -> np.ndarray:
    """Rows [count, L, K] that a router could have chosen: K different experts in each layer."""
    scores = np.random.default_rng(seed).random((count, layers, experts))
    return np.argsort(scores, axis=2)[:, :, :top_k].astype(np.int16)


def weights_of(rows: Any) -> np.ndarray:
    """Weights of `rows` that differ where ids do; unknown where an id is."""
    ids = np.array(rows, np.int16)
    return np.where(ids < 0, UNKNOWN_WEIGHT, ids.astype(np.float32) / 64)


def step_of(position: int) -> int:
    """The first four positions are of one step, and each other of the next."""
    return 7 + max(position - 3, 0)


def steps_object(rows: np.ndarray, start: int) -> dict[str, Any]:
    """The steps beside rows: unknown where they are."""
    steps = np.array([step_of(at) for at in range(start, start + len(rows))], dtype="<u4")
    is_unknown = (rows < 0).any(axis=(1, 2))
    steps[is_unknown] = UNKNOWN_STEP
    data = base64.b64encode(steps.tobytes()).decode()
    fields = {"shape": [len(rows)], "dtype": "uint32", "start": start}
    return {"data": data, **fields, "missing": int(is_unknown.sum())}


@dataclass
class RoutedPrompt:
    """One prompt and its choices, from which every form of an answer is made.

    Attributes:
        prompt: rows [P, L, K]. choices: for each, rows [G - 1, L, K]. Those of other choices than
        the first differ from the first token on. first_token: of the prompt, so that different
        prompts have different tokens.
    """

    prompt: np.ndarray
    choices: list[np.ndarray]
    start: int = 0
    first_token: int = 100
    fmt: Format = "object"
    dtype: str = "int16"
    layout: str = "split"
    weights: bool = False
    steps: bool = False  # those of `step_of`

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(range(self.first_token, self.first_token + len(self.prompt)))

    def token_ids(self, choice: int) -> list[int]:
        return [1000 * choice + i for i in range(len(self.choices[choice]) + 1)]

    def whole(self, choice: int = 0) -> np.ndarray:
        """Rows [P + G - 1 - start, L, K]"""
        return np.concatenate([self.prompt, self.choices[choice]])[self.start :]

    def encode(self, rows: np.ndarray, start: int) -> Any:
        return encode(rows, fmt=self.fmt, dtype=self.dtype, start=start)

    def arrays(self, rows: np.ndarray, start: int, prefix: str = "") -> dict[str, Any]:
        """The fields of some rows."""
        arrays = {f"{prefix}routed_experts": self.encode(rows, start)}
        if self.weights:
            arrays[f"{prefix}routed_expert_weights"] = self.encode(weights_of(rows), start)
        if self.steps:
            arrays[f"{prefix}routed_experts_steps"] = steps_object(rows, start)
        return arrays


def answer(*prompts: RoutedPrompt, is_list: bool = False) -> dict[str, Any]:
    """An unstreamed completion; several prompts are a list of prompts."""
    body: dict[str, Any] = {"choices": []}
    for routed in prompts:
        for choice in range(len(routed.choices)):
            body["choices"].append({"index": len(body["choices"]), **_choice(routed, choice)})
    if not prompts or prompts[0].layout == "joined":
        return body
    of_prompts = [
        routed.arrays(routed.prompt[routed.start :], routed.start, "prompt_") for routed in prompts
    ]
    for name in of_prompts[0]:
        arrays = [arrays_of_prompt[name] for arrays_of_prompt in of_prompts]
        body[name] = arrays if is_list or len(arrays) > 1 else arrays[0]
    return body


def _choice(routed: RoutedPrompt, choice: int) -> dict[str, Any]:
    if routed.layout == "joined":
        arrays = routed.arrays(routed.whole(choice), routed.start)
    else:
        arrays = routed.arrays(routed.choices[choice], len(routed.prompt))
    return {
        "finish_reason": "length",
        "prompt_token_ids": routed.prompt_token_ids,
        "token_ids": routed.token_ids(choice),
        **arrays,
    }


def stream(*prompts: RoutedPrompt, piece: int = 10**6, per_chunk: int = 1) -> list[dict[str, Any]]:
    """The chunks of a streamed completion, in pieces of at most `piece` rows; the choices take
    turns.

    Each chunk brings `per_chunk` tokens and the rows that became known with them.
    """
    choices = [(routed, choice) for routed in prompts for choice in range(len(routed.choices))]
    queues = [
        [*_chunks(*routed_and_choice, index, piece, per_chunk)]
        for index, routed_and_choice in enumerate(choices)
    ]
    chunks = []
    while any(queues):
        chunks += [chunk for queue in queues if queue for chunk in queue.pop(0)]
    return chunks


def _chunks(
    routed: RoutedPrompt, choice: int, index: int, piece: int, per_chunk: int
) -> Iterator[list[dict[str, Any]]]:
    """For each output of the engine the chunks that it becomes: pieces first, the one with the
    tokens last."""
    tokens = routed.token_ids(choice)
    prompt_len = len(routed.prompt)
    whole = np.concatenate([routed.prompt, routed.choices[choice]])
    is_joined = routed.layout == "joined"
    num_sent = routed.start if is_joined else prompt_len
    for first in range(0, len(tokens), per_chunk):
        new = tokens[first : first + per_chunk]
        num_known = prompt_len + first + len(new) - 1
        chunks: list[dict[str, Any]] = []
        if first == 0 and choice == 0 and not is_joined:
            chunks += _chunks_of_prompt(routed, index, piece)
        if num_known > num_sent:
            for position, rows in _cut(whole[num_sent:num_known], num_sent, piece):
                chunks.append({"choices": [{"index": index, **routed.arrays(rows, position)}]})
            num_sent = num_known
        if not chunks:
            chunks.append({"choices": [{"index": index}]})
        chunks[-1]["choices"][0] |= {
            "text": "x" * len(new),
            "token_ids": new,
            "finish_reason": "length" if first + len(new) == len(tokens) else None,
            "prompt_token_ids": routed.prompt_token_ids if first == 0 else None,
        }
        yield chunks


def _chunks_of_prompt(routed: RoutedPrompt, index: int, piece: int) -> Iterator[dict[str, Any]]:
    for position, rows in _cut(routed.prompt[routed.start :], routed.start, piece):
        yield {"choices": [{"index": index}], **routed.arrays(rows, position, "prompt_")}


def _cut(rows: np.ndarray, start: int, piece: int) -> list[tuple[int, np.ndarray]]:
    return [(start + at, rows[at : at + piece]) for at in range(0, max(len(rows), 1), piece)]


def sse(chunks: list[dict[str, Any]]) -> bytes:
    """The text of a stream."""
    events = [b"data: " + json.dumps(chunk, separators=(",", ":")).encode() for chunk in chunks]
    return b"\n\n".join([*events, b"data: [DONE]", b""])
