"""Where this project holds on to vLLM: who may, and what can be told without running it."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
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

from routed_experts.capture.engine import scheduler, worker
from routed_experts.capture.engine.config import UnsupportedConfig
from routed_experts.capture.engine.kv_transfer.connectors import CONNECTORS
from routed_experts.capture.engine.kv_transfer.transfer_params import TransferParamsError
from routed_experts.protocol.codec import CodecError
from routed_experts.protocol.collect import RoutingError
from routed_experts.protocol.models import FieldError
from routed_experts.protocol.sse import EventError
from routed_experts.server import vllm_api
from routed_experts.server.cli.console import CommandError
from routed_experts.server.http import request, serving, vllm_http
from routed_experts.server.http.encoding import LostRowsError
from routed_experts.server.http.selftest import SelfTestError
from routed_experts.server.http.streaming import StreamLimitError
from routed_experts.server.outputs.kv_handoff import HandoffError

ROOT = Path(__file__).parents[2]
VLLM = Path(vllm.__file__).parent
PACKAGES = ("protocol", "server", "capture")
MAY_IMPORT_VLLM = (
    *("capture/engine/", "capture/seams/", "server/vllm_api.py", "server/http/vllm_http.py"),
    *("server/cli/serve.py", "server/inprocess/plugin.py"),
)


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Every file of the three packages: its path below the root, and what is in it."""
    for package in PACKAGES:
        for file in sorted(path for path in (ROOT / package).rglob("*.py") if path.name != "__main__.py"):
            yield str(file.relative_to(ROOT)), ast.parse(file.read_text(encoding="utf-8"))


def module_name(path: str) -> str:
    """Under which name the file at `path` is imported."""
    return "routed_experts." + path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imports(tree: ast.Module) -> set[str]:
    """Names of the modules that a file imports, within functions too."""
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


def imports_of(tree: ast.Module, package: str) -> set[str]:
    return {name for name in imports(tree) if name == package or name.startswith(package + ".")}


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def calls_on(path: str, attribute: str) -> dict[str, set[int]]:
    """The methods that a file of vLLM's calls on `self.<attribute>`, and with how many arguments."""
    found: dict[str, set[int]] = {}
    for node in ast.walk(ast.parse((VLLM / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            on = node.func.value
            if isinstance(on, ast.Attribute) and on.attr == attribute:
                found.setdefault(node.func.attr, set()).add(len(node.args) + len(node.keywords))
    return found


# ---- our side: who may know vLLM ----


def test_only_the_named_files_import_vllm() -> None:
    found = {path for path, tree in sources() if imports_of(tree, "vllm")}
    assert [path for path in found if not path.startswith(MAY_IMPORT_VLLM)] == []


def test_the_clients_modules_need_numpy_only(tmp_path: Path) -> None:
    """In an interpreter that finds nothing but the standard library, numpy and `protocol`."""
    site = Path(np.__file__).parents[1]
    for entry in (*site.glob("numpy"), *site.glob("numpy.libs")):
        (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "routed_experts").mkdir()
    (tmp_path / "routed_experts/protocol").symlink_to(ROOT / "protocol")
    code = f"""
import sys
sys.path.append({str(tmp_path)!r})
import numpy as np
from routed_experts.protocol import batch, collect
from routed_experts.protocol import expert_load
from routed_experts.protocol.codec import decode
rows = np.arange(24, dtype=np.int16).reshape(3, 2, 4)
sent = rows.tolist()
assert (decode(sent) == rows).all()
answer = {{"choices": [{{"index": 0, "routed_experts": sent, "finish_reason": "stop"}}]}}
(routing,) = collect.collect(answer)
assert batch.align([routing], 5, last=-1).shape == (1, 5, 2, 4)
assert expert_load.histogram(rows, 24)["rows"] == 3
heavy = {{"torch", "vllm", "pydantic", "fastapi", "orjson", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=60)


def test_the_bare_capture_does_not_load_vllm() -> None:
    code = """
import sys
from routed_experts.capture import capturer, device_cache, host_cache, message, pipeline, split
assert "vllm" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


# ---- what is replaced ----


@pytest.mark.parametrize(
    ("cls", "base"),
    [
        (serving.RoutedServingCompletion, vllm_http.OpenAIServingCompletion),
        (serving.RoutedServingChat, vllm_http.OpenAIServingChat),
        (serving.RoutedServingTokens, vllm_http.ServingTokens),
    ],
)
def test_adopting_twice_is_harmless(cls: Any, base: type) -> None:
    instance = object.__new__(base)
    for _ in range(2):
        serving.rebind_class(instance, cls, None, 1)
        assert type(instance) is cls
        assert instance.captured is None  # type: ignore[attr-defined]


def test_adopting_another_class_is_refused() -> None:
    class Derived(vllm_http.OpenAIServingChat):
        pass

    for other in (Derived, vllm_http.OpenAIServingCompletion):
        with pytest.raises(TypeError, match="RoutedServingChat does not extend"):
            serving.rebind_class(object.__new__(other), serving.RoutedServingChat, None, 1)


# ---- what is overridden ----

NEW_METHODS = {"routed_experts_info"}
OVERRIDING = [
    (serving.RoutedServingCompletion, vllm_http.OpenAIServingCompletion),
    (serving.RoutedServingChat, vllm_http.OpenAIServingChat),
    (serving.RoutedServingTokens, vllm_http.ServingTokens),
    (request.RoutedCompletionRequest, vllm_http.CompletionRequest),
    (request.RoutedChatRequest, vllm_http.ChatCompletionRequest),
    (scheduler.SchedulerCapture, Scheduler),
    (scheduler.SchedulerCapture, AsyncScheduler),
    (worker.WorkerCapture, Worker),
    (worker.WorkerCapture, CPUWorker),
]


@pytest.mark.parametrize(("cls", "base"), OVERRIDING)
def test_overridden_methods_are_vllms_and_take_its_arguments(cls: type, base: type) -> None:
    """Each method of ours takes at least the positional arguments of vLLM's, by the same names."""
    methods = {name for name, value in vars(cls).items() if inspect.isfunction(value) and not name.startswith("_")}
    methods -= NEW_METHODS | {"collect", "_collecting"}
    assert methods
    for name in methods:
        theirs = inspect.signature(getattr(base, name)).parameters
        ours = inspect.signature(getattr(cls, name)).parameters
        takes_all = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in ours.values())
        named = [p for p in ours if p not in ("args", "kwargs")]
        assert list(theirs)[: len(named)] == named, f"{base.__name__}.{name}{tuple(theirs)}"
        assert takes_all or len(named) == len(theirs), f"{base.__name__}.{name} has arguments that ours does not take"


# ---- the connector's place ----


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def check_calls(cls: type, path: str, attribute: str, ours_alone: set[str] | None = None) -> None:
    """All that a file of vLLM's calls, `cls` has, with those arguments; and all that `cls` has is called there.

    Args:
        ours_alone: methods that are called by us, or by one of the supported versions only.
    """
    calls = calls_on(path, attribute)
    for name, counts in calls.items():
        for count in counts:
            inspect.signature(getattr(cls, name)).bind("self", *range(count))
    assert public(cls) - (ours_alone or set()) <= set(calls)


def test_calls_on_the_schedulers_connector() -> None:
    ours_alone = {
        "add_request",
        "receive",
        "num_tracked",
        "add_stats",
        "follow_loads",
        "truncate_prefix_hit",
        "prefill_again",
    }
    ours_alone |= {"receive_rows", "export_rows", "fail_late_pulls", "weights_may_differ"}
    ours_alone |= {"max_cache_hit", "cap_external_hit", "request_loading"}  # vLLM 0.32: does not call these
    check_calls(
        scheduler.SchedulerConnector, "v1/core/sched/scheduler.py", "aux_output_connector", ours_alone=ours_alone
    )


def test_calls_on_the_runners_connector() -> None:
    from routed_experts.capture.engine import v2

    check_calls(v2.V2Adapter, "v1/worker/gpu/model_runner.py", "aux_output_connector")
    check_calls(v2.V2Pending, "v1/worker/gpu/async_utils.py", "pending_aux_output")


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

AT_START = {CommandError, SelfTestError, UnsupportedConfig}
"""The process ends with the sentence."""
ANSWERED = {CodecError, FieldError}
"""Become a `VLLMValidationError` with the field's name, and in a stream an error event."""
IN_STREAMS = {LostRowsError, StreamLimitError}
"""Failures of the server: an error event in a stream, and 500 before its first byte."""
TURNED = {HandoffError, TransferParamsError}
"""Become a `VLLMValidationError` where they are caught."""
CLIENTS = {EventError, RoutingError}
"""Raised in clients only."""


def test_every_exception_of_ours_is_in_one_of_the_lists() -> None:
    found = set()
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not path.startswith("capture/seams"):
                module = importlib.import_module(module_name(path))
                cls = vars(module).get(node.name)
                if isinstance(cls, type) and issubclass(cls, BaseException):
                    found.add(cls)
    assert found == AT_START | ANSWERED | TURNED | IN_STREAMS | CLIENTS
    assert not AT_START & ANSWERED


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
