"""Rows with weights, or with steps: ids and the others in one array of words, which is moved as rows
of ids are.

A row with weights is [3L, K] int16: the L x K ids, then the L x K float32 of their weights, two
words each. A row with its step is one line of K words higher, two if K is 1; the first two words in
them are the step, uint32. So rows have steps in API processes only: see `envelope`.
A row whose words are all -1 has ids of -1, weights of NaN and no known step. The word of a known
weight may be -1 too: whether a row is known, its ids say.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.codec import Rows, Steps

WEIGHTS_FLAG = "--enable-return-routed-expert-weights"
NO_WEIGHTS_FLAG = "--no-enable-return-routed-expert-weights"
"""As the tiny model has weights without the other."""
WEIGHTS_KEY = "enable_return_routed_expert_weights"
"""In `VllmConfig.additional_config`, which every process of an engine has: true to capture the
routers' weights too."""

INPUT_FLAG = "--enable-routed-experts-input"
INPUT_KEY = "enable_routed_experts_input"
"""In `VllmConfig.additional_config`, likewise: true if requests may say which experts their tokens
take."""

RECOMPUTE_FLAG = "--enable-routed-experts-replay-on-recompute"
RECOMPUTE_KEY = "enable_routed_experts_replay_on_recompute"
"""In `VllmConfig.additional_config`, likewise: true if tokens whose KV is computed again take the
experts that they had."""

_WEIGHT_WORDS = 2  # of a float32
_PLANES = 1 + _WEIGHT_WORDS
_STEP_WORDS = 2  # of a uint32


def captures_weights(config: Any) -> bool:
    """Whether rows of an engine have weights; `config` is its `VllmConfig`."""
    additional = config.additional_config
    return isinstance(additional, dict) and bool(additional.get(WEIGHTS_KEY))


def takes_input(config: Any) -> bool:
    """Whether requests of an engine may say which experts their tokens take."""
    additional = config.additional_config
    return isinstance(additional, dict) and bool(additional.get(INPUT_KEY))


def replays_on_recompute(config: Any) -> bool:
    """Whether tokens of an engine whose KV is computed again take the experts that they had."""
    additional = config.additional_config
    return isinstance(additional, dict) and bool(additional.get(RECOMPUTE_KEY))


def row_shape(
    num_layers: int, top_k: int, with_weights: bool, with_step: bool = False
) -> tuple[int, int]:
    """Shape of a row in words: (L, K), or (3L, K) with weights; higher with its step."""
    height = _PLANES * num_layers if with_weights else num_layers
    return height + _step_lines(top_k) * with_step, top_k


def _step_lines(top_k: int) -> int:
    return -(-_STEP_WORDS // top_k)


def ids_of(rows: NDArray[Any]) -> Rows:
    """The ids [n, L, K] in `rows` with weights; a view."""
    return rows[:, : rows.shape[1] // _PLANES]


def weights_of(rows: Rows) -> NDArray[np.float32]:
    """The weights [n, L, K] in `rows` with weights, NaN where they are unknown; a copy, but of a
    single row."""
    num_rows, height, top_k = rows.shape
    num_layers = height // _PLANES
    words = np.ascontiguousarray(rows[:, num_layers : _PLANES * num_layers])
    return words.reshape(num_rows, num_layers, _WEIGHT_WORDS * top_k).view("<f4")


def combined(ids: NDArray[np.integer[Any]], weights: NDArray[np.float32]) -> Rows:
    """Rows [n, 3L, K] of `ids` ([n, L, K]) and their `weights` ([n, L, K]): undoes `ids_of` and
    `weights_of`."""
    num_rows, num_layers, top_k = ids.shape
    rows = np.empty((num_rows, _PLANES * num_layers, top_k), dtype=np.int16)
    rows[:, :num_layers] = ids
    words = np.ascontiguousarray(weights, dtype="<f4").view(np.int16)
    rows[:, num_layers:] = words.reshape(num_rows, _WEIGHT_WORDS * num_layers, top_k)
    return rows


def with_steps(rows: Rows, steps: Steps) -> Rows:
    """`rows` ([..., height, K]) with their `steps` ([...]); a copy."""
    *shape, height, top_k = rows.shape
    joined = np.zeros((*shape, height + _step_lines(top_k), top_k), dtype=np.int16)
    joined[..., :height, :] = rows
    words = np.ascontiguousarray(steps, "<u4")[..., np.newaxis].view(np.int16)
    for word in range(_STEP_WORDS):
        joined[..., height + word // top_k, word % top_k] = words[..., word]
    return joined


def without_steps(rows: Rows) -> Rows:
    """What `with_steps` was given; a view."""
    return rows[..., : -_step_lines(rows.shape[-1]), :]


def steps_of(rows: Rows) -> Steps:
    """The steps [n] in `rows` ([n, height, K]) that have some; a copy."""
    lines = rows[:, -_step_lines(rows.shape[2]) :]
    words = lines.reshape(len(rows), lines.shape[1] * lines.shape[2])[:, :_STEP_WORDS]
    return np.ascontiguousarray(words).view("<u4")[:, 0]
