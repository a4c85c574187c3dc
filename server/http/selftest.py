"""The self-test: requests that the server sends through its own application before the port
opens."""

import asyncio
import copy
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray
from starlette.datastructures import State
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from routed_experts.capture.engine.connectors import MISSING, on_load
from routed_experts.capture.wire.envelope import SMALL_ARRAY_BYTES
from routed_experts.capture.wire.prefill_rows import PARAM as ROWS_PARAM
from routed_experts.capture.wire.rows import INPUT_FLAG, takes_input
from routed_experts.protocol.codec import UNKNOWN, Rows, decode, encode
from routed_experts.protocol.collect import Routing, RoutingError, collect
from routed_experts.protocol.models import DELIVERY, OPT_IN, PROMPT_START, REPLAY, WEIGHTS
from routed_experts.server.http.connection import reached_route, watch_connections
from routed_experts.server.http.encoding import LINE_BYTES
from routed_experts.server.http.engine import CapturedEngine
from routed_experts.server.http.references import ROWS_PATH
from routed_experts.server.http.request import api_keys
from routed_experts.server.http.seams import STREAMS_CHOICES, scales_out
from routed_experts.server.http.unsupported_routes import INVOCATIONS, other_paths
from routed_experts.server.outputs import prefill_param
from routed_experts.server.outputs.array_store import ArrayStore, StoreError
from routed_experts.server.outputs.npy import NPY_HEADER_BYTES
from routed_experts.server.vllm_api import get_logger

logger = get_logger(__name__)

_NEW_TOKENS = 4
_SHORT = 5
"""Prompt tokens whose rows share a message with other rows."""
_MOST_TOKENS = 256
"""Maximum prompt tokens for a prompt whose rows exceed one line of a stream."""
_SAMPLING = {"max_tokens": _NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
"""Of a request that does not say another."""
_TOKEN_IDS = 1000
"""Prompts use only the first ids of the vocabulary, because ids of image tokens are at its end."""
_LIMIT_S = 600.0
"""Timeout of a request. The first requests may compile kernels."""
_OURS = ("vllm.", "routed_experts.")
_ALWAYS_THERE = (*_OURS, "starlette.middleware.cors", "prometheus_fastapi_instrumentator.")
"""Modules of the middleware that every server of vLLM has."""
USER_AGENT = "routed-experts-self-test"
_FEW_BYTES = 16 << 10
"""More than the arrays take that the self-test stores."""
_DECISIONS = (401, 403, 407, 429)
"""What a middleware answers that does not let a request in."""
_AGREEMENT = 0.5
"""Required share of equal ids for equal tokens in batches of different sizes, where rounding
changes a few."""

_IN_A_BUCKET = 307
"""Where an array is not in a folder, its route leads to the bucket."""
_MESSAGES = [{"role": "user", "content": "Which experts?"}]
_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_GENERATE = "/inference/v1/generate"
_BODIES: dict[str, Callable[..., dict[str, Any]]] = {
    _COMPLETIONS: lambda prompt, **sampling: {"prompt": prompt, **sampling},
    _GENERATE: lambda prompt, **sampling: {"token_ids": prompt, "sampling_params": sampling},
    _CHAT: lambda prompt, **sampling: {"messages": _MESSAGES, **sampling},
}
"""Of requests with the token ids of a prompt, and sampling parameters."""


class SelfTestError(RuntimeError):
    """The self-test failed; the server must not start."""


async def probe(
    app: FastAPI, captured: CapturedEngine, store: ArrayStore, args: Namespace, model: str
) -> None:
    """Checks that every endpoint returns complete and valid routing, and the same experts for the
    same tokens; and that references come through the operator's middleware.

    `app` has its state already, but no server-wide defaults.
    """
    began = time.monotonic()
    config = captured.engine.vllm_config
    parallel = config.parallel_config
    # With an external load balancer, this process reaches only the ranks of its own node.
    ranks = (
        parallel.data_parallel_size_local
        if parallel.local_engines_only
        else parallel.data_parallel_size
    )
    async with AppClient(front_of(app, args), args, model) as client:
        try:
            endpoints = await _endpoints(client, args, config.model_config.max_model_len)
            await _check_endpoints(client, endpoints, captured, other_paths(app))
            for rank in range(ranks):
                await _Rank(client, endpoints, captured, rank if ranks > 1 else None).check()
            await _References(app, captured, store, args, model).check()
        except SelfTestError as error:
            if captured.engine.errored:  # vLLM's own error would not help here
                raise SelfTestError(
                    "The engine stopped during the self-test: read its first error in the log."
                ) from error
            raise
    logger.info("The self-test passed in %.1f s.", time.monotonic() - began)


def front_of(app: FastAPI, args: Namespace) -> FastAPI:
    """`app` with the middleware of vLLM and this server.

    Other middleware is left out: an operator's may reject this client, and HTTP metrics should not
    count it.
    """
    # With VLLM_SERVER_DEV_MODE, vLLM logs rejected requests as errors, and the self-test sends some
    # on purpose.
    quiet = copy.copy(args)
    quiet.log_error_stack = False
    front = copy.copy(app)
    front.state = State({**app.state._state, "args": quiet})
    front.root_path = ""  # as behind a proxy that strips it
    front.user_middleware = [
        layer for layer in app.user_middleware if _module_of(layer).startswith(_OURS)
    ]
    front.middleware_stack = None  # built anew
    watch_connections(front)
    return front


class AppClient:
    """Calls an application without a socket."""

    def __init__(
        self, app: ASGIApp, args: Namespace, model: str, root_path: str = "", raises: bool = True
    ) -> None:
        keys = api_keys(args)
        key = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=raises),
            base_url=f"http://self-test{root_path}",
            headers={"User-Agent": USER_AGENT, **key},
        )
        self._model = model

    async def __aenter__(self) -> "AppClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def post(self, path: str, rank: int | None = None, **body: Any) -> httpx.Response:
        """The response to POST `path`, from a data parallel rank (None: any)."""
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        return await self.send("POST", path, json={"model": self._model, **body}, headers=headers)

    async def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            async with asyncio.timeout(_LIMIT_S):
                return await self._client.request(method, path, timeout=None, **request)
        except TimeoutError:
            raise SelfTestError(
                f"The self-test request to {path} took longer than {_LIMIT_S:.0f} s."
            ) from None
        except Exception as error:
            raise SelfTestError(f"The self-test request to {path} failed: {error!r}") from error


def _module_of(layer: Middleware) -> str:
    """The module of a middleware's class, or of its function."""
    return str(getattr(layer.kwargs.get("dispatch", layer.cls), "__module__", ""))


async def _endpoints(client: AppClient, args: Namespace, max_model_len: int) -> list[str]:
    """The endpoints of this server that return routing."""
    endpoints = [_COMPLETIONS, _GENERATE] if scales_out(args) else [_COMPLETIONS]
    # vLLM's own endpoint tells whether there is a tokenizer and a chat template.
    tokenized = await client.post("/tokenize", messages=_MESSAGES)
    if tokenized.status_code == 200 and tokenized.json()["count"] + _NEW_TOKENS < max_model_len:
        # Some models render chats in another way; gpt-oss uses special tokens that a small
        # vocabulary lacks.
        plain = await client.post(_CHAT, messages=_MESSAGES, max_tokens=1)
        if plain.status_code == 200:
            endpoints.append(_CHAT)
    return endpoints


async def _check_endpoints(
    client: AppClient, endpoints: list[str], captured: CapturedEngine, others: list[str]
) -> None:
    """Raises `SelfTestError` unless each endpoint rejects invalid routing fields, and each of the
    `others` all."""
    info = await client.send("GET", "/v1/routed_experts")
    if info.status_code != 200 or info.json() != captured.info.model_dump(mode="json"):
        raise SelfTestError(
            "The self-test did not reach this server's routes: vLLM or another plugin replaced them."
        )
    too_late = captured.engine.vllm_config.model_config.max_model_len + 1
    for path in endpoints:
        body = {OPT_IN: True, **_BODIES[path]([1], max_tokens=1)}
        await _check_refusal(client, path, PROMPT_START, **body, **{PROMPT_START: too_late})
        await _check_refusal(
            client, path, prefill_param.FIELD, **body, kv_transfer_params={ROWS_PARAM: "no rows"}
        )
        if path != _GENERATE:
            await _check_refusal(client, path, OPT_IN, **body, use_beam_search=True)
    for path in others:
        await _check_refusal(client, path, OPT_IN, **{OPT_IN: True})


async def _check_refusal(client: AppClient, path: str, param: str, **body: Any) -> None:
    response = await client.post(path, **body)
    if response.status_code == 404:  # the endpoint is off
        return
    error = response.json().get("error") if response.status_code == 400 else None
    if not isinstance(error, dict) or error.get("param") != param:
        raise SelfTestError(
            f"{path} accepted an invalid {param}: vLLM does not call this server's checks."
        )


class _Rank:
    """Tests one data parallel rank."""

    def __init__(
        self, client: AppClient, endpoints: list[str], captured: CapturedEngine, rank: int | None
    ) -> None:
        self._client = client
        self._endpoints = endpoints
        self._captured = captured
        self._rank = rank  # None if there is only one
        config = captured.engine.vllm_config
        self._n = min(2, config.scheduler_config.max_num_seqs)
        self._takes_input = takes_input(config)
        self._loads_lose_rows = config.kv_transfer_config is not None and on_load() == MISSING

    async def check(self) -> None:
        """Raises `SelfTestError` unless all endpoints return the same experts for the same
        tokens."""
        short = self._prompt(_SHORT)
        long = self._prompt(self._long())
        several = {"n": self._n, "temperature": 1.0}
        for path in self._endpoints:
            body = _BODIES[path]
            (first,) = await self._ask(path, body(long))
            # Concurrent, so that they share steps. All but the last hit the prefix cache.
            streamed, whole, _ = await asyncio.gather(
                self._ask(
                    path,
                    body(long, **(several if path != _GENERATE or STREAMS_CHOICES else {})),
                    stream=True,
                ),
                self._ask(path, body(long, **several)),
                self._ask(INVOCATIONS if path == _COMPLETIONS else path, body(short)),
            )
            for choice in (*streamed, *whole):
                self._compare(path, choice.prompt_rows, first.prompt_rows)
            # Send the generated tokens as a prompt and compare the rows.
            choices = [first, *streamed, *whole]
            again = (
                self._ask(_COMPLETIONS, {"prompt": _tokens(choice), "max_tokens": 1})
                for choice in choices
            )
            answers = await asyncio.gather(*again)
            for choice, (answer,) in zip(choices, answers, strict=True):
                rows = answer.rows[: choice.end]
                self._compare(path, choice.prompt_rows, rows[: len(choice.prompt_rows)])
                self._compare(path, choice.generated_rows, rows[len(choice.prompt_rows) :])

        if self._takes_input:
            await self._check_input()

    async def _check_input(self) -> None:
        """Raises `SelfTestError` unless a prompt's tokens take the experts that a request gives, and
        those of another request do not."""
        prompt = self._prompt(_SHORT)
        body = {"prompt": prompt, "max_tokens": 1}
        (natural,) = await self._ask(_COMPLETIONS, dict(body))
        rows = other_rows(natural.prompt_rows, self._captured.num_experts)
        (forced,) = await self._ask(_COMPLETIONS, {**body, REPLAY: encode(rows, start=0)})
        if not np.array_equal(forced.prompt_rows, rows):
            raise SelfTestError(
                "The self-test gave a prompt other experts than it took: please report this, and start without "
                f"{INPUT_FLAG}."
            )
        (again,) = await self._ask(_COMPLETIONS, dict(body))
        self._compare(_COMPLETIONS, again.prompt_rows, natural.prompt_rows)

    async def _ask(self, path: str, body: dict[str, Any], stream: bool = False) -> list[Routing]:
        """Sends a request and returns its choices. Each must be complete and valid."""
        sampling = body.get("sampling_params", body)
        for name, value in _SAMPLING.items():
            sampling.setdefault(name, value)
        response = await self._client.post(
            path, self._rank, **self._routing_fields(), **body, stream=stream
        )
        n = sampling.get("n", 1)
        choices = _choices_of(response, path, n)
        prompt = _prompt_of(body, choices[0])
        if path == _GENERATE:  # which does not repeat the prompt until vLLM 0.30
            choices = [_with_prompt(choice, prompt) for choice in choices]
        if len(choices) != n or not all(_has_tokens(choice, prompt) for choice in choices):
            raise SelfTestError(
                f"The self-test got wrong choices or prompt tokens from {path}: please report this."
            )
        for choice in choices:
            self._check_rows(choice)
        return choices

    def _routing_fields(self) -> dict[str, Any]:
        """What every request asks for: whatever this server captures, with the tokens."""
        fields: dict[str, Any] = {OPT_IN: True}
        if self._captured.info.weights:
            fields[WEIGHTS] = True
        fields["routed_experts_format"] = "object"
        fields["routed_experts_layout"] = "split"
        fields["return_token_ids"] = True
        return fields

    def _check_rows(self, choice: Routing) -> None:
        rows = choice.rows
        num_expected = len(_tokens(choice)) - 1
        if self._loads_lose_rows:
            lost = (rows == UNKNOWN).all(axis=(1, 2))
            rows = rows[~lost]
            num_expected -= int(lost.sum())
        check_rows(rows, num_expected, self._captured.shape, self._captured.num_experts)
        if self._captured.info.weights:
            check_weights(choice.rows, choice.weights)

    def _compare(self, path: str, some: Rows, others: Rows) -> None:
        if agreement(some, others) < _AGREEMENT:
            raise SelfTestError(
                f"The self-test got different experts for the same tokens from {path}: please report this."
            )

    def _long(self) -> int:
        """Length of a prompt whose rows have a message of their own, and of which other requests
        hit a prefix."""
        layers, top_k = self._captured.shape
        row_bytes = 2 * layers * top_k
        of_more_than_a_line = min(LINE_BYTES // row_bytes, _MOST_TOKENS)
        block = self._captured.engine.vllm_config.cache_config.block_size
        return max(SMALL_ARRAY_BYTES // row_bytes + 1, of_more_than_a_line, block + 2)

    def _prompt(self, length: int) -> Any:
        """Random token ids, so that no KV store has them from an earlier start."""
        model = self._captured.engine.vllm_config.model_config
        length = max(min(length, model.max_model_len - _NEW_TOKENS - 1), 1)
        return (
            np.random.default_rng()
            .integers(min(model.get_vocab_size(), _TOKEN_IDS), size=length)
            .tolist()
        )


class _Door:
    """The application as clients reach it: with all middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.reached_route = False  # whether the last request reached a route of ours

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            self.reached_route = reached_route(scope)


class _References:
    """Tests references, through the operator's middleware too.

    What that answers by itself is its own matter: it may need credentials that the self-test has
    not, or let few requests in. But what our routes answer has to come out.
    """

    def __init__(
        self, app: FastAPI, captured: CapturedEngine, store: ArrayStore, args: Namespace, model: str
    ) -> None:
        names = [_module_of(layer) for layer in app.user_middleware]
        self._others = sorted({name for name in names if not name.startswith(_ALWAYS_THERE)})
        # Its own middleware, as it is: some must not be made twice. Without any, HTTP metrics need
        # not count this.
        self._door = _Door(app if self._others else front_of(app, args))
        root_path = (app.root_path or "").rstrip("/") if self._others else ""
        self._client = AppClient(self._door, args, model, root_path, raises=False)
        self._captured = captured
        self._store = store

    async def check(self) -> None:
        """Raises `SelfTestError` if responses do not come out as our routes gave them."""
        async with self._client:
            inline = await self._choice("inline")
            if inline is None:
                return
            try:
                await self._store.reader.run(self._store.make_room, _FEW_BYTES)
            except StoreError as error:
                logger.warning("The self-test asked for no reference: %s", error)
                return
            by_reference = await self._choice("reference")
            if by_reference is not None:
                await self._check_arrays(by_reference, inline)

    async def _choice(self, delivery: str) -> dict[str, Any] | None:
        """The rows of a prompt and of its choice; None if a middleware let no request in."""
        body: dict[str, Any] = {
            "prompt": [1, 2],
            "max_tokens": 2,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        body |= {OPT_IN: True, "routed_experts_format": "object", "routed_experts_layout": "split"}
        body[DELIVERY] = delivery
        response = await self._client.post(_COMPLETIONS, **body)
        if not self._is_let_in(response, _COMPLETIONS):
            return None
        try:
            answer = response.json()
            (choice,) = answer["choices"]
            return {
                name: said[name]
                for said, name in ((answer, "prompt_routed_experts"), (choice, "routed_experts"))
            }
        except (ValueError, KeyError, TypeError) as error:
            raise self._failure(_COMPLETIONS, f"without its routed experts ({error!r})") from error

    async def _check_arrays(self, references: dict[str, Any], inline: dict[str, Any]) -> None:
        try:
            for name, reference in references.items():
                path = f"/v1/{reference['url']}"
                if "uri" in reference:  # the url leads to the bucket
                    path = f"{ROWS_PATH}/{reference['id']}"
                response = await self._client.send("GET", path)
                if not self._is_let_in(response, path):
                    return
                content = response.content
                if response.status_code == _IN_A_BUCKET:
                    content = await self._store.reader.run(self._read, reference["id"])
                num_rows, num_layers, top_k = reference["shape"]
                rows = (
                    np.frombuffer(content, np.int16)
                    .reshape(num_layers, num_rows, top_k)
                    .swapaxes(0, 1)
                )
                if agreement(rows, decode(inline[name]).astype(np.int16)) < _AGREEMENT:
                    raise self._failure(path, "with other experts than came inline")
        except (KeyError, TypeError, ValueError) as error:
            raise self._failure(_COMPLETIONS, f"without whole references ({error!r})") from error
        finally:
            for reference in references.values():
                with suppress(LookupError, StoreError, TypeError):
                    await self._store.reader.run(self._store.delete, reference["id"])

    def _read(self, key: str) -> bytes:
        return self._store.read(key, [(NPY_HEADER_BYTES, self._store.size(key))])

    def _is_let_in(self, response: httpx.Response, path: str) -> bool:
        """Raises `SelfTestError` if the response to a request that reached our routes is not
        theirs."""
        if self._door.reached_route and response.status_code in (200, _IN_A_BUCKET):
            return True
        if self._others and (not self._door.reached_route or response.status_code in _DECISIONS):
            logger.warning(
                "The self-test was not let in by middleware (%s), which answered %s with status %d. What else that "
                "does to responses is not tested.",
                ", ".join(self._others),
                path,
                response.status_code,
            )
            return False
        raise self._failure(path, f"with status {response.status_code}: {response.text:.300}")

    def _failure(self, path: str, how: str) -> SelfTestError:
        if not self._others:
            return SelfTestError(
                f"The self-test got a response from {path} {how}: please report this."
            )
        return SelfTestError(
            f"Behind the middleware of {', '.join(self._others)}, the self-test got a response from {path} {how}. "
            "Middleware must let responses with routed experts out as they are: change it, leave it out of "
            "--middleware, or serve without routed experts (--no-enable-return-routed-experts)."
        )


def _choices_of(response: httpx.Response, path: str, n: int) -> list[Routing]:
    """Raises `SelfTestError` unless the response is a success, and its routing can be read."""
    if response.status_code != 200:
        raise SelfTestError(
            f"The self-test request to {path} got status {response.status_code}: "
            f"{response.text:.500}"
        )
    try:
        return collect(response.content, n=n)
    except RoutingError as error:
        raise SelfTestError(
            f"The self-test got a response from {path} without complete routing: {error}."
        ) from error


def _with_prompt(choice: Routing, prompt: tuple[int, ...]) -> Routing:
    """The choice as it is, if it says its prompt itself."""
    return replace(choice, prompt_token_ids=choice.prompt_token_ids or prompt)


def _has_tokens(choice: Routing, prompt: tuple[int, ...]) -> bool:
    """Whether a choice has this prompt, and generated tokens."""
    return choice.prompt_token_ids == prompt and bool(choice.token_ids)


def _prompt_of(body: dict[str, Any], choice: Routing) -> tuple[int, ...]:
    """The token ids that were asked for. The body of a chat has none; its response has."""
    return tuple(body.get("prompt") or body.get("token_ids") or choice.prompt_token_ids or ())


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
