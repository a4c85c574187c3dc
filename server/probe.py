"""A few tiny requests through the real path, before the port answers."""

import asyncio

import numpy as np
from numpy.typing import NDArray

from routed_experts.protocol.codec import UNKNOWN
from routed_experts.server.captured_engine import CapturedEngine
from routed_experts.server.row_feeds import RowFeed, opt_in
from routed_experts.server.vllm_api import RequestOutputKind, SamplingParams, tokens_input

_PROMPTS = ((5,), (2, 7, 12))
"""Lengths of the prompts that are sent at once: one alone, then several, which share steps of prefill and of decoding.
None fills a block of the usual size, so that nothing of them stays in the prefix cache."""
_NEW_TOKENS = 4


class ProbeError(RuntimeError):
    """The capture does not bring back what it should; the server must not start."""


async def probe(captured: CapturedEngine) -> None:
    """Raises `ProbeError` unless every request brings back its routing, complete and possible."""
    parallel = captured.engine.vllm_config.parallel_config
    # Where something else balances the load, this process reaches the ranks of its own node only.
    ranks = parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size
    for rank in range(ranks):
        for lengths in _PROMPTS:
            prompts = [_prompt(captured, length) for length in lengths]
            names = [f"routed-experts-probe-{rank}-{length}" for length in lengths]
            at_rank = rank if ranks > 1 else None
            answers = (_rows_of_a_request(captured, *request, at_rank) for request in zip(names, prompts, strict=True))
            for prompt, rows in zip(prompts, await asyncio.gather(*answers), strict=True):
                check_rows(rows, len(prompt) + _NEW_TOKENS - 1, captured.shape, captured.num_experts)


def _prompt(captured: CapturedEngine, length: int) -> list[int]:
    model = captured.engine.vllm_config.model_config
    length = min(length, model.max_model_len - _NEW_TOKENS)
    return [(7 * i + length) % model.get_vocab_size() for i in range(length)]


async def _rows_of_a_request(
    captured: CapturedEngine, request_id: str, prompt: list[int], rank: int | None
) -> NDArray[np.int16] | None:
    params = SamplingParams(
        max_tokens=_NEW_TOKENS,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    opt_in(params, prompt_start=0)
    outputs = captured.engine.generate(tokens_input(prompt), params, request_id, data_parallel_rank=rank)
    feed: RowFeed | None = None
    async for output in outputs:
        if isinstance(output.outputs[0].routed_experts, RowFeed):
            feed = output.outputs[0].routed_experts
    arrays = feed.take(0, len(prompt) + _NEW_TOKENS) if feed is not None else []
    return np.concatenate(arrays) if arrays else None


def check_rows(rows: NDArray[np.int16] | None, expected_rows: int, shape: tuple[int, int], num_experts: int) -> None:
    """Raises `ProbeError`, saying what is wrong, unless `rows` are as many as expected and could be a router's."""
    if rows is None:
        raise ProbeError("The startup probe got no routing back: the engine's worker or scheduler is not ours.")
    if rows.shape != (expected_rows, *shape):
        raise ProbeError(
            f"The startup probe got routing of shape {rows.shape}, not {(expected_rows, *shape)}: please report this."
        )
    silent = np.flatnonzero((rows == UNKNOWN).any(axis=(0, 2)))
    if len(silent):
        raise ProbeError(
            f"The MoE layers at rows {silent.tolist()} wrote no ids for some of the tokens: their kernel routes by "
            "itself, if only in batches of some sizes. Choose another one with --moe-backend."
        )
    if rows.min() < 0 or rows.max() >= num_experts:
        raise ProbeError(f"The startup probe got expert ids outside 0 to {num_experts - 1}: please report this.")
    ordered = np.sort(rows, axis=2)
    if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
        raise ProbeError("The startup probe got the same expert twice for one token: please report this.")
