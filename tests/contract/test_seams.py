"""Where this project holds on to vLLM, as far as can be told without running it."""

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.distributed.eplb.eplb_state import EplbLayerState
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.router import base_router
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from routed_experts.capture.engine import scheduler, v2, worker
from routed_experts.capture.engine.config import UnsupportedConfig
from routed_experts.capture.engine.kv_transfer.connectors import CONNECTORS
from routed_experts.capture.engine.kv_transfer.transfer_params import TransferParamsError
from routed_experts.protocol.codec import CodecError
from routed_experts.protocol.collect import RoutingError
from routed_experts.protocol.fetch import FetchError
from routed_experts.protocol.models import FieldError
from routed_experts.protocol.sse import EventError
from routed_experts.server import vllm_api
from routed_experts.server.cli.console import CommandError
from routed_experts.server.http import request, serving, vllm_http
from routed_experts.server.http.encoding import LostRowsError
from routed_experts.server.http.engine import ServerState
from routed_experts.server.http.recording import FullError
from routed_experts.server.http.selftest import SelfTestError
from routed_experts.server.http.streaming import StreamLimitError
from routed_experts.server.outputs.array_store import ArrayGoneError, StoreError, UnknownArrayError
from routed_experts.server.outputs.prefill_param import PrefillRowsError
from routed_experts.server.settings import SettingsError
from tests.sources import MODULES, nodes

VLLM = Path(vllm.__file__).parent
SCHEDULER = "v1/core/sched/scheduler.py"


def calls_on(path: str, attribute: str) -> dict[str, set[int]]:
    """The methods that a file of vLLM's calls on `self.<attribute>`, and with how many arguments."""
    found: dict[str, set[int]] = {}
    for node in nodes(VLLM / path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            on = node.func.value
            if isinstance(on, ast.Attribute) and on.attr == attribute:
                found.setdefault(node.func.attr, set()).add(len(node.args) + len(node.keywords))
    return found


SERVING: list[tuple[type[Any], type]] = [
    (serving.RoutedServingCompletion, vllm_http.OpenAIServingCompletion),
    (serving.RoutedServingChat, vllm_http.OpenAIServingChat),
    (serving.RoutedServingTokens, vllm_http.ServingTokens),
]
HTTP = [
    *SERVING,
    (request.RoutedCompletionRequest, vllm_http.CompletionRequest),
    (request.RoutedChatRequest, vllm_http.ChatCompletionRequest),
]
ENGINE = [
    (scheduler.SchedulerCapture, Scheduler),
    (scheduler.SchedulerCapture, AsyncScheduler),
    (worker.WorkerCapture, Worker),
    (worker.WorkerCapture, CPUWorker),
]
NEW_METHODS = {"routed_experts_info", "collect"}


def test_adopting_twice_is_harmless_and_another_class_is_refused() -> None:
    for cls, base in SERVING:
        instance = object.__new__(base)
        for _ in range(2):
            serving.rebind_class(instance, cls, ServerState())
            assert type(instance) is cls
            assert instance.captured is None
    derived = type("Derived", (vllm_http.OpenAIServingChat,), {})
    for other in (derived, vllm_http.OpenAIServingCompletion):
        with pytest.raises(TypeError, match="RoutedServingChat does not extend"):
            serving.rebind_class(object.__new__(other), serving.RoutedServingChat, ServerState())


@pytest.mark.parametrize(("cls", "base"), [*HTTP, *ENGINE])
def test_overridden_methods_are_vllms_and_take_its_arguments(cls: type, base: type) -> None:
    """By the same names, in the same places."""
    methods = {name for name, value in vars(cls).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert methods - NEW_METHODS
    for name in methods - NEW_METHODS:
        theirs = inspect.signature(getattr(base, name)).parameters
        ours = inspect.signature(getattr(cls, name)).parameters
        takes_all = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in ours.values())
        named = [p for p in ours if p not in ("args", "kwargs")]
        assert list(theirs)[: len(named)] == named, f"{base.__name__}.{name}{tuple(theirs)}"
        assert takes_all or len(named) == len(theirs), f"{base.__name__}.{name} has arguments that ours does not take"


# Methods of the connector that are called by us, or by one of the supported versions only.
CALLED_BY_US = {"add_request", "receive", "distribute", "track_external_kv", "truncate_prefix_hit"}
CALLED_BY_US |= {"max_cache_hit", "cap_external_hit", "request_loading"}  # vLLM 0.32: does not call these


@pytest.mark.parametrize(
    ("cls", "path", "attribute"),
    [
        (scheduler.SchedulerConnector, SCHEDULER, "aux_output_connector"),
        (v2.V2Adapter, "v1/worker/gpu/model_runner.py", "aux_output_connector"),
        (v2.V2Pending, "v1/worker/gpu/async_utils.py", "pending_aux_output"),
    ],
)
def test_calls_in_vllm_on_classes_of_ours(cls: type, path: str, attribute: str) -> None:
    """All that vLLM calls is there, with those arguments; and all that is there is called."""
    calls = calls_on(path, attribute)
    for name, counts in calls.items():
        for count in counts:
            inspect.signature(getattr(cls, name)).bind("self", *range(count))
    public = {name for name in vars(cls) if not name.startswith("_")}
    assert public - (CALLED_BY_US if cls is scheduler.SchedulerConnector else set()) <= set(calls)


def test_routers_capture_logical_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before expert load balancing maps them to physical ones, which vLLM's own code for CPUs does not do."""

    class Router(BaseRouter):
        routing_method_type = RoutingMethodType.Custom

        def _compute_routing(self, hidden_states: Any, router_logits: Any, indices_type: Any, **_: Any) -> Any:
            return router_logits.topk(2)

    def to_physical(topk_ids: torch.Tensor, logical_to_physical_map: torch.Tensor, **_: Any) -> torch.Tensor:
        return logical_to_physical_map[topk_ids, 0]

    monkeypatch.setattr(base_router, "eplb_map_to_physical_and_record", to_physical)
    unused = torch.zeros(1)
    state = EplbLayerState(unused, torch.tensor([[0], [3], [1], [2]]), unused, unused, [unused])
    router = Router(2, 4, state)
    captured: list[torch.Tensor] = []
    router.set_capture_fn(captured.append)
    _, ids = router.select_experts(torch.zeros(1, 8), torch.tensor([[0.1, 0.4, 0.3, 0.2]]))
    assert ids.tolist() == [[3, 1]]
    assert [each.tolist() for each in captured] == [[[1, 2]]]


# ---- errors ----

ANSWERED = {CodecError, FieldError}
"""Become a `VLLMValidationError` with the field's name, and in a stream an error event."""
OTHERS = {
    *(CommandError, SelfTestError, SettingsError, UnsupportedConfig),  # the process ends with the sentence
    *(LostRowsError, StreamLimitError),  # the server's fault: an error event in a stream, 500 before its first byte
    *(PrefillRowsError, TransferParamsError),  # become a `VLLMValidationError` where they are caught
    StoreError,  # 507, or arrays come inline; with a folder of the user's, the process ends
    *(UnknownArrayError, ArrayGoneError),  # 404 and 410
    FullError,  # a prompt is not recorded, and counted
    *(EventError, FetchError, RoutingError),  # raised in clients only
}


def test_every_exception_of_ours_is_in_one_of_the_lists() -> None:
    found = set()
    for module, path in MODULES.items():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and "capture/seams" not in str(path):
                cls = vars(importlib.import_module(module)).get(node.name)
                if isinstance(cls, type) and issubclass(cls, BaseException):
                    found.add(cls)
    assert found == ANSWERED | OTHERS


def test_answered_errors_are_bad_requests() -> None:
    error = vllm_http.create_error_response(vllm_api.VLLMValidationError("no", parameter="routed_experts_dtype")).error
    assert (error.code, error.type, error.param) == (400, "BadRequestError", "routed_experts_dtype")
    for cls in ANSWERED:
        raised = cls("routed_experts_dtype", "no") if cls is FieldError else cls("no")
        assert vllm_http.create_error_response(raised).error.code == 400


def test_leases_are_as_long_as_vllms_where_no_flag_says_it() -> None:
    """NIXL, which vLLM's modules import, is not installed everywhere."""
    text = (VLLM / "distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py").read_text()
    (default,) = re.findall(r'"kv_lease_duration", (\d+)', text)
    leases = {known.lease_s for name, known in CONNECTORS.items() if name.startswith("Nixl")}
    assert leases == {int(default)}
