"""Where this project holds on to vLLM, as far as can be told without running it."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from routed_experts.capture.engine import scheduler, v2, worker
from routed_experts.capture.engine.kv_transfer.connectors import CONNECTORS
from routed_experts.server.http import request, serving, vllm_http
from routed_experts.server.http.engine import ServerState
from tests.sources import nodes

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


def test_leases_are_as_long_as_vllms_where_no_flag_says_it() -> None:
    """NIXL, which vLLM's modules import, is not installed everywhere."""
    text = (VLLM / "distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py").read_text()
    (default,) = re.findall(r'"kv_lease_duration", (\d+)', text)
    leases = {known.lease_s for name, known in CONNECTORS.items() if name.startswith("Nixl")}
    assert leases == {int(default)}
