"""Rows of engines that capture weights too: ids and weights in one array of words, which is moved
as rows of ids are.

Such a row is [3L, K] int16: the L x K ids, then the L x K float32 of their weights, two words each.
A row whose words are all -1 has ids of -1 and weights of NaN. The word of a known weight may be -1
too: whether a row is known, its ids say.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.codec import UNKNOWN, Rows

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


def row_shape(num_layers: int, top_k: int, with_weights: bool) -> tuple[int, int]:
    """Shape of a row in words: (L, K), or (3L, K) with weights."""
    height = _PLANES * num_layers if with_weights else num_layers
    return height, top_k


def ids_shape(row_shape: tuple[int, int]) -> tuple[int, int]:
    """(L, K) of rows with weights, whose `row_shape` is (3L, K)."""
    height, top_k = row_shape
    return height // _PLANES, top_k


def ids_of(rows: NDArray[Any]) -> Rows:
    """The ids [n, L, K] in `rows` ([n, 3L, K]); a view."""
    return rows[:, : rows.shape[1] // _PLANES]


def weights_of(rows: Rows) -> NDArray[np.float32]:
    """The weights [n, L, K] in `rows` ([n, 3L, K]), NaN where they are unknown; a copy, but of a
    single row."""
    num_rows, height, top_k = rows.shape
    num_layers = height // _PLANES
    words = np.ascontiguousarray(rows[:, num_layers:])
    return words.reshape(num_rows, num_layers, _WEIGHT_WORDS * top_k).view("<f4")


def missing_weights(
    rows: NDArray[Any], indexes: NDArray[np.int64] | slice = slice(None)
) -> NDArray[np.bool_]:
    """Which of `rows` ([n, 3L, K], contiguous) at `indexes` have no weights, perhaps beside ids that
    are known: those handed over without. Looks at the first weight of each row only."""
    num_rows, height, top_k = rows.shape
    first = height // _PLANES * top_k  # behind the ids
    words = rows.reshape(num_rows, height * top_k)[indexes, first : first + _WEIGHT_WORDS]
    unknown: NDArray[np.bool_] = (words == UNKNOWN).all(axis=1)
    return unknown


def combined(ids: NDArray[np.integer[Any]], weights: NDArray[np.float32]) -> Rows:
    """Rows [n, 3L, K] of `ids` ([n, L, K]) and their `weights` ([n, L, K]): undoes `ids_of` and
    `weights_of`."""
    num_rows, num_layers, top_k = ids.shape
    rows = np.empty((num_rows, _PLANES * num_layers, top_k), dtype=np.int16)
    rows[:, :num_layers] = ids
    words = np.ascontiguousarray(weights, dtype="<f4").view(np.int16)
    rows[:, num_layers:] = words.reshape(num_rows, _WEIGHT_WORDS * num_layers, top_k)
    return rows
