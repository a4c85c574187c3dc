"""The self-test on vLLM's real API process: it passes as the server is configured, and fails where
a method of ours is not called.

A method is dead here as if vLLM had renamed it: ours is taken away, so that vLLM's own is called.
"""

import asyncio
import inspect
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY
from vllm.entrypoints.launchers.app import build_app
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_worker import Worker

from routed_experts.capture.scheduler.scheduler import SchedulerCapture, SchedulerHooks
from routed_experts.capture.worker.worker import WorkerCapture
from routed_experts.server import vllm_api
from routed_experts.server.http.answers.serving import RoutedServingCompletion
from routed_experts.server.http.engine import CapturedEngine
from routed_experts.server.http.process import plugin, selftest
from routed_experts.server.http.process.selftest import SelfTestError
from routed_experts.server.http.vllm_http import OpenAIServingCompletion
from routed_experts.server.outputs.processor import BufferedRequestState
from tests.contract import test_seams
from tests.contract.served import serving, serving_weights
from tests.e2e.harness import SMALL_KV


class Again:
    """Repeats the probe of a server that runs, in its event loop."""

    def __init__(self) -> None:
        self.app: FastAPI
        self.captured: CapturedEngine
        self._loop: asyncio.AbstractEventLoop
        self._given: tuple[Any, ...] = ()

    async def first(self, *args: Any) -> None:
        """The probe that the server starts with."""
        self._loop, self._given = asyncio.get_running_loop(), args
        self.app, self.captured, *_ = args
        await selftest.probe(*args)

    def __call__(self) -> None:
        asyncio.run_coroutine_threadsafe(selftest.probe(*self._given), self._loop).result(120)

    def fails(self, match: str = "") -> None:
        with pytest.raises(SelfTestError, match=match):
            self()


def hits() -> float:
    """Prompt tokens that the engine which started last found in the prefix cache; vLLM forgets what
    others counted."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "vllm:prefix_cache_hits_total")


@pytest.fixture(scope="module")
def again(tiny_model: Path) -> Iterator[Again]:
    probing = Again()
    with ExitStack() as stack:
        with patch.object(plugin, "probe", probing.first):
            stack.enter_context(
                serving(tiny_model, "--enable-scale-out", "--max-num-batched-tokens", "64")
            )
        assert hits()  # or nothing is asked twice
        yield probing
        probing()  # what was taken away is back


# ---- servers that start ----


DEFAULT = ("--routed-experts-default",)
DEFAULTS = {
    "return_routed_experts": True,
    "routed_experts_format": "npy",
    "routed_experts_layout": "joined",
}
SAMPLING = {"temperature": 0.3, "max_new_tokens": 2, "repetition_penalty": 1.2, "top_k": 5}
STARTS = {
    "keys, behind a proxy": ("--api-key", "one", "two", "--root-path", "/llm/"),
    "middleware that refuses": ("--middleware", "tests.contract.middleware.refuses"),
    "short sequences": ("--max-model-len", "8"),
    "small answers": ("--routed-experts-max-response-bytes", "100", "--no-enable-prefix-caching"),
    "defaults, with a path of the API": (*DEFAULT, json.dumps(DEFAULTS), "--root-path", "/v1"),
    "tokens only": ("--tokens-only",),
    "no tokenizer": ("--skip-tokenizer-init", "--enable-scale-out"),
    "one at a time, with drafts": (
        "--max-num-seqs",
        "1",
        "--enable-scale-out",
        *DEFAULT,
        '{"routed_experts_histogram": true}',
        "--speculative-config",
        json.dumps({"method": "ngram", "num_speculative_tokens": 3}),
    ),
    "all that is said, and sampling": (
        *("--generation-config", "vllm", "--override-generation-config", json.dumps(SAMPLING)),
        *(
            "--reasoning-parser",
            "qwen3",
            "--enable-auto-tool-choice",
            "--tool-call-parser",
            "hermes",
        ),
        *(
            "--enable-force-include-usage",
            "--enable-prompt-tokens-details",
            "--enable-log-requests",
        ),
        *("--enable-server-load-tracking", "--enable-request-id-headers"),
    ),
}


@pytest.mark.parametrize("flags", STARTS.values(), ids=STARTS)
def test_servers_that_start(
    tiny_model: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[str] = []

    async def probed(*args: Any) -> None:
        await selftest.probe(*args)
        passed.append("probe")

    monkeypatch.setattr(plugin, "probe", probed)
    with serving(tiny_model, *flags) as server, server.client() as client:
        assert client.get("/health", headers={"x-tenant": "me"}).status_code in (200, 403, 429)
        assert passed


def test_nothing_is_left_of_its_requests(again: Again, caplog: pytest.LogCaptureFixture) -> None:
    again()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert len(again.captured.buffers) == 0
    engine = again.captured.engine.engine_core.core  # type: ignore[attr-defined]
    assert not engine.scheduler.aux_output_connector.distributor.requests.running


# ---- in the API process ----


def overrides(cls: type, base: type) -> list[str]:
    """The methods of `cls` that vLLM calls as those of `base`."""
    own = (
        name
        for name, value in vars(cls).items()
        if getattr(value, "__module__", None) == cls.__module__
    )
    return [name for name in own if inspect.isfunction(getattr(cls, name)) and hasattr(base, name)]


# The other methods only refuse requests, or are of endpoints that the probe does not ask.
DEAD = [
    pytest.param(cls, name, id=f"{cls.__name__}.{name}")
    for cls, base in (
        (RoutedServingCompletion, OpenAIServingCompletion),
        (BufferedRequestState, vllm_api.RequestState),
    )
    for name in overrides(cls, base)
    if name not in ("create_completion", "render_completion_request")
]


@pytest.mark.parametrize(("cls", "name"), DEAD)
def test_a_dead_method_of_the_api_process(
    again: Again, cls: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(cls, name)
    again.fails()


def test_outputs_that_do_not_come_by(again: Again, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own `process_outputs` alone."""
    monkeypatch.delattr(again.captured.engine.output_processor, "process_outputs")
    again.fails()


def test_routes_that_are_vllms_own(again: Again, monkeypatch: pytest.MonkeyPatch) -> None:
    def path_of(route: Any) -> str | None:
        return getattr(route, "path", None)

    ours = again.app.router.routes
    with patch("vllm.plugins.load_endpoint_plugins", lambda _: []):
        stock = {
            path_of(route): route for route in build_app(again.app.state.args, ("generate",)).routes
        }
    completions = "/v1/completions"
    routes = [stock[completions] if path_of(route) == completions else route for route in ours]
    monkeypatch.setattr(again.app.router, "routes", routes)
    again.fails("without complete routing")


# ---- in the engine ----

# What the probe cannot show, as it does not happen with a few requests on any server.
NOT_OF_EVERY_REQUEST = {
    "_get_local_prefix_cache_hit": "caps prefix hits for KV connectors",
    "_connector_finished": "hands rows over with the KV of KV connectors",
    "set_pause_state": "called by /resume",
    "finish_requests": "keeps the order of outputs where a pause ends requests",
    "has_requests": "asks for one more step while rows wait to be sent and nothing else is left to do",
    "compile_or_warm_up_model": "records CUDA graphs",
    "wake_up": "called where an engine wakes up",
    # of the connector's place
    "take_output": "does nothing, as all of a message's outputs are given their rows at once",
    "reset": "called when the prefix cache is reset",
    "max_cache_hit": "gives no limit, as it does when dead",
    "cap_external_hit": "asked about KV connectors' loads only",
    "request_loading": "told of KV connectors' loads only",
    "request_finished": "lets go of a request; dead, `routed_experts_requests_tracked` grows",
}
OF_SCHEDULER, OF_WORKER = overrides(SchedulerCapture, Scheduler), overrides(WorkerCapture, Worker)
OF_CONNECTOR = list(test_seams.calls_on(test_seams.SCHEDULER, "aux_output_connector"))
ENGINE = [
    (SchedulerCapture, OF_SCHEDULER),
    (SchedulerHooks, OF_CONNECTOR),
    (WorkerCapture, OF_WORKER),
]
DEAD_IN_ENGINE = [
    (cls, name) for cls, names in ENGINE for name in names if name not in NOT_OF_EVERY_REQUEST
]


@contextmanager
def nothing_starts() -> Iterator[None]:
    """Where a server must not start; a request that would never be answered is given up soon."""
    with (
        patch.object(selftest, "_LIMIT_S", 20.0),
        pytest.raises((SelfTestError, AttributeError, RuntimeError)),
    ):
        yield


def as_param(cls: type, name: str) -> Any:
    """Those of a worker take a real engine."""
    marks = [pytest.mark.e2e] if cls is WorkerCapture else []
    return pytest.param(cls, name, id=f"{cls.__name__}-{name}", marks=marks)


@pytest.mark.parametrize(("cls", "name"), [as_param(*dead) for dead in DEAD_IN_ENGINE])
def test_a_dead_method_of_the_engine(
    tiny_model: Path, cls: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cls is SchedulerHooks:  # which vLLM's scheduler has no other method in the place of
        monkeypatch.setattr(cls, name, lambda *_: None)
    else:
        monkeypatch.delattr(cls, name)
    with nothing_starts(), ExitStack() as stack:
        if cls is WorkerCapture:
            stack.enter_context(serving_weights(tiny_model, *SMALL_KV, "--max-model-len", "512"))
        else:
            stack.enter_context(serving(tiny_model))


# vLLM 0.32: does not call these
SINCE_33 = {"max_cache_hit", "cap_external_hit", "request_loading"}


def test_no_list_has_what_is_not_there() -> None:
    there = {*OF_SCHEDULER, *OF_CONNECTOR, *OF_WORKER}
    assert NOT_OF_EVERY_REQUEST.keys() - there in (set(), SINCE_33)
    dead = {name for _, name in DEAD_IN_ENGINE}
    assert dead >= {"__init__", "add_request", "update_from_output"}
    assert dead >= {"load_model", "initialize_from_config", "execute_model", "sample_tokens"}
    assert sum(cls is SchedulerHooks for cls, _ in DEAD_IN_ENGINE) >= 1
