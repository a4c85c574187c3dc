"""The self-test: requests that the server sends through its own application before the port opens.

It proves that rows come out of this model with these kernels, in each way in which they travel:
whole and streamed, of a prompt that is computed and of one that hits the prefix cache, alone and
beside others. What needs no model is left to the tests of this project.
"""

import asyncio
import copy
import time
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray
from starlette.middleware import Middleware

from routed_experts.capture.wire.envelope import SMALL_ARRAY_BYTES
from routed_experts.capture.wire.rows import INPUT_FLAG, takes_input
from routed_experts.protocol.codec import UNKNOWN, Rows, encode
from routed_experts.protocol.collect import Routing, RoutingError, collect
from routed_experts.protocol.models import OPT_IN, REPLAY, WEIGHTS
from routed_experts.server.http.drain import DrainMiddleware
from routed_experts.server.http.encoding.encoding import LINE_BYTES
from routed_experts.server.http.engine import CapturedEngine
from routed_experts.server.vllm_api import get_logger

logger = get_logger(__name__)

_NEW_TOKENS = 4
_SHORT = 5
"""Prompt tokens whose rows share a message with other rows."""
_MOST_TOKENS = 256
"""Maximum prompt tokens for a prompt whose rows exceed one line of a stream."""
_TOKEN_IDS = 1000
"""Prompts use only the first ids of the vocabulary, because ids of image tokens are at its end."""
_LIMIT_S = 600.0
"""Timeout of a request. The first requests may compile kernels."""
_AGREEMENT = 0.5
"""Required share of equal ids for equal tokens in batches of different sizes, where rounding
changes a few."""
_COMPLETIONS = "/v1/completions"


class SelfTestError(RuntimeError):
    """The self-test failed; the server must not start."""


async def probe(app: FastAPI, captured: CapturedEngine, model: str) -> None:
    """Checks on each data parallel rank that routing is complete and valid, and the same for the
    same tokens.

    `app` has its state already, but no server-wide defaults.
    """
    began = time.monotonic()
    parallel = captured.engine.vllm_config.parallel_config
    # With an external load balancer, this process reaches only the ranks of its own node.
    ranks = (
        parallel.data_parallel_size_local
        if parallel.local_engines_only
        else parallel.data_parallel_size
    )
    transport = httpx.ASGITransport(_without_middleware(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://self-test") as client:
        try:
            for rank in range(ranks):
                await _Rank(client, captured, model, rank if ranks > 1 else None).check()
        except SelfTestError as error:
            if captured.engine.errored:  # vLLM's own error would not help here
                raise SelfTestError(
                    "The engine stopped during the self-test: read its first error in the log."
                ) from error
            raise
    logger.info("The self-test passed in %.1f s.", time.monotonic() - began)


def _without_middleware(app: FastAPI) -> FastAPI:
    """`app` for a client that has no key: middleware may reject it, and should not count it."""
    front = copy.copy(app)
    front.root_path = ""  # as behind a proxy that strips it
    front.user_middleware = [Middleware(DrainMiddleware, app.state.routed_experts.drain)]
    front.middleware_stack = None  # built anew
    return front


class _Rank:
    """Tests one data parallel rank."""

    def __init__(
        self, client: httpx.AsyncClient, captured: CapturedEngine, model: str, rank: int | None
    ) -> None:
        self._client = client
        self._captured = captured
        self._model = model
        self._headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        config = captured.engine.vllm_config
        self._n = min(2, config.scheduler_config.max_num_seqs)
        self._takes_input = takes_input(config)

    async def check(self) -> None:
        """Raises `SelfTestError` unless the same tokens get the same experts, however they are
        asked for."""
        prompt = self._prompt(self._long())
        several = {"n": self._n, "temperature": 1.0}
        (first,) = await self._ask(prompt)
        # Concurrent, so that they share steps. All but the last hit the prefix cache.
        streamed, whole, _ = await asyncio.gather(
            self._ask(prompt, stream=True, **several),
            self._ask(prompt, **several),
            self._ask(self._prompt(_SHORT)),
        )
        choices = [first, *streamed, *whole]
        # Send the generated tokens as a prompt and compare the rows.
        answers = await asyncio.gather(
            *(self._ask(_tokens(choice), max_tokens=1) for choice in choices)
        )
        for choice, (answer,) in zip(choices, answers, strict=True):
            self._compare(choice.prompt_rows, first.prompt_rows)
            rows = answer.rows[: choice.end]
            self._compare(choice.prompt_rows, rows[: len(choice.prompt_rows)])
            self._compare(choice.generated_rows, rows[len(choice.prompt_rows) :])
        if self._takes_input:
            await self._check_input()

    async def _check_input(self) -> None:
        """Raises `SelfTestError` unless a prompt's tokens take the experts that a request gives, and
        those of another request do not."""
        prompt = self._prompt(_SHORT)
        (natural,) = await self._ask(prompt, max_tokens=1)
        rows = other_rows(natural.prompt_rows, self._captured.num_experts)
        (forced,) = await self._ask(prompt, max_tokens=1, **{REPLAY: encode(rows, start=0)})
        if not np.array_equal(forced.prompt_rows, rows):
            raise SelfTestError(
                "The self-test gave a prompt other experts than it took: please report this, and start without "
                f"{INPUT_FLAG}."
            )
        (again,) = await self._ask(prompt, max_tokens=1)
        self._compare(again.prompt_rows, natural.prompt_rows)

    async def _ask(self, prompt: list[int], **fields: Any) -> list[Routing]:
        """Sends a request and returns its choices. Each must be complete and valid."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": _NEW_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            OPT_IN: True,
            **fields,
        }
        if self._captured.info.weights:
            body[WEIGHTS] = True
        n = body.get("n", 1)
        choices = _choices_of(await self._post(body), n)
        if len(choices) != n or not all(
            choice.prompt_token_ids == tuple(prompt) and choice.token_ids for choice in choices
        ):
            raise SelfTestError(
                "The self-test got wrong choices or prompt tokens: please report this."
            )
        for choice in choices:
            self._check_rows(choice)
        return choices

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        try:
            async with asyncio.timeout(_LIMIT_S):
                return await self._client.post(
                    _COMPLETIONS, json=body, headers=self._headers, timeout=None
                )
        except TimeoutError:
            raise SelfTestError(
                f"A request of the self-test took longer than {_LIMIT_S:.0f} s."
            ) from None
        except Exception as error:
            raise SelfTestError(f"A request of the self-test failed: {error!r}") from error

    def _check_rows(self, choice: Routing) -> None:
        num_expected = len(_tokens(choice)) - 1
        check_rows(choice.rows, num_expected, self._captured.shape, self._captured.num_experts)
        if self._captured.info.weights:
            check_weights(choice.rows, choice.weights)

    def _compare(self, some: Rows, others: Rows) -> None:
        if agreement(some, others) < _AGREEMENT:
            raise SelfTestError(
                "The self-test got different experts for the same tokens: please report this."
            )

    def _long(self) -> int:
        """Length of a prompt whose rows have a message of their own, and of which other requests
        hit a prefix."""
        layers, top_k = self._captured.shape
        row_bytes = 2 * layers * top_k
        of_more_than_a_line = min(LINE_BYTES // row_bytes, _MOST_TOKENS)
        block = self._captured.engine.vllm_config.cache_config.block_size
        return max(SMALL_ARRAY_BYTES // row_bytes + 1, of_more_than_a_line, block + 2)

    def _prompt(self, length: int) -> list[int]:
        """Random token ids, so that no KV store has them from an earlier start."""
        model = self._captured.engine.vllm_config.model_config
        length = max(min(length, model.max_model_len - _NEW_TOKENS - 1), 1)
        num_ids = min(model.get_vocab_size(), _TOKEN_IDS)
        ids: list[int] = np.random.default_rng().integers(num_ids, size=length).tolist()
        return ids


def _choices_of(response: httpx.Response, n: int) -> list[Routing]:
    """Raises `SelfTestError` unless the response is a success, and its routing can be read."""
    if response.status_code != 200:
        raise SelfTestError(
            f"A request of the self-test got status {response.status_code}: {response.text:.500}"
        )
    try:
        return collect(response.content, n=n)
    except RoutingError as error:
        raise SelfTestError(
            f"The self-test got a response without complete routing: {error}."
        ) from error


def _tokens(choice: Routing) -> list[int]:
    return [*(choice.prompt_token_ids or ()), *(choice.token_ids or ())]


def agreement(some: Rows, others: Rows) -> float:
    """Share of known ids of `some` [n, L, K] that are in the same row and layer of `others`; 1 if
    there are none."""
    if some.shape != others.shape:
        return 0.0
    known = (some != UNKNOWN) & (others != UNKNOWN)
    is_in_other = (some[..., None] == others[..., None, :]).any(axis=3)
    return float(is_in_other[known].mean()) if known.any() else 1.0


def other_rows(rows: Rows, num_experts: int) -> Rows:
    """Rows like `rows` [n, L, K], of experts that are not in them as far as there are others."""
    num_rows, num_layers, top_k = rows.shape
    is_chosen = np.zeros((num_rows, num_layers, num_experts), bool)
    np.put_along_axis(is_chosen, rows.astype(np.int64), True, axis=2)
    others_first = is_chosen.argsort(axis=2, kind="stable")
    return others_first[:, :, :top_k].astype(np.int16)


def check_weights(rows: Rows, weights: NDArray[np.float32] | None) -> None:
    """Raises `SelfTestError` unless all known ids of `rows` [n, L, K] have weights."""
    if weights is None or weights.shape != rows.shape:
        raise SelfTestError("The self-test got no weights: please report this.")
    silent = np.flatnonzero(
        ((weights.view(np.int32) == UNKNOWN) & (rows != UNKNOWN)).any(axis=(0, 2))
    )
    if len(silent):
        raise SelfTestError(
            f"MoE layers {silent.tolist()} wrote no weights for some tokens: choose another kernel with --moe-backend."
        )


def check_rows(
    rows: NDArray[np.int16], expected_rows: int, shape: tuple[int, int], num_experts: int
) -> None:
    """Raises `SelfTestError` unless `rows` has the expected shape and valid expert ids."""
    expected = (expected_rows, *shape)
    if rows.shape != expected:
        raise SelfTestError(
            f"The self-test got routing of shape {rows.shape}, not {expected}: please report this."
        )
    if not len(rows):
        return
    if (rows == UNKNOWN).all():
        raise SelfTestError(
            "The self-test got no routing: the engine's worker or scheduler is not ours."
        )
    silent = np.flatnonzero((rows == UNKNOWN).any(axis=(0, 2)))
    if len(silent):
        raise SelfTestError(
            f"MoE layers {silent.tolist()} wrote no ids for some tokens: their kernel routes by itself, at least for "
            "some batch sizes. Choose another kernel with --moe-backend."
        )
    if rows.min() < 0 or rows.max() >= num_experts:
        raise SelfTestError(
            f"The self-test got expert ids outside 0 to {num_experts - 1}: please report this."
        )
    ordered = np.sort(rows, axis=2)
    if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
        raise SelfTestError(
            "The self-test got the same expert twice for one token: please report this."
        )
