"""Rows in the form of vLLM's own capture: of all decoder layers, with zeros in dense layers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.batch import has_dense_layers, spread_layers
from routed_experts.protocol.codec import Rows

BARE_ROWS_KEY = "routed_experts.bare_rows"
"""Key in `VllmConfig.additional_config`: true if the front end is not ours. It opts no request in,
and opens no envelopes; the rows of each request are on its own outputs, in vLLM's form."""


def sends_bare_rows(config: Any) -> bool:
    """Whether an engine's outputs go to a front end that is not ours; `config` is its
    `VllmConfig`."""
    additional = config.additional_config
    return isinstance(additional, dict) and bool(additional.get(BARE_ROWS_KEY))


def vllm_dtype(num_experts: int) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if num_experts <= 256 else np.uint16


def in_vllms_form(
    ids: Rows, layer_ids: Sequence[int], *, num_layers: int, num_experts: int
) -> NDArray[np.integer[Any]]:
    """`ids` ([n, L, K]) as [n, H, K] of all H = `num_layers` decoder layers; `layer_ids` has those
    of the L layers. Unknown rows make it int16, because vLLM's dtype cannot hold -1."""
    is_known = ids.min(initial=0) >= 0
    array: NDArray[np.integer[Any]] = ids.astype(vllm_dtype(num_experts)) if is_known else ids
    if has_dense_layers(layer_ids, num_layers):
        return spread_layers(array, layer_ids, num_layers)
    return array
