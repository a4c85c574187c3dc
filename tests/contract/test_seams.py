"""Every place where this project holds on to vLLM, inspected without an engine: what a new version has to keep."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from vllm.config import VllmConfig
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from routed_experts.capture import rows
from routed_experts.capture.engine import scheduler, worker
from routed_experts.capture.engine.config import UnsupportedConfig
from routed_experts.capture.message import OPT_IN_ARG, OptIn
from routed_experts.protocol import codec
from routed_experts.protocol.codec import CodecError
from routed_experts.protocol.collect import RoutingError
from routed_experts.protocol.models import FieldError
from routed_experts.protocol.sse import EventError
from routed_experts.server import fields, vllm_api, vllm_serving
from routed_experts.server.encoding import LostRowsError
from routed_experts.server.launch import CommandError
from routed_experts.server.plugin import RoutedExpertsPlugin
from routed_experts.server.probe import ProbeError
from routed_experts.server.reference import CompareError
from routed_experts.server.stream import StreamLimitError

ROOT = Path(__file__).parents[2]
VLLM = Path(vllm.__file__).parent
PACKAGES = ("protocol", "server", "capture")
MAY_IMPORT_VLLM = ("capture/engine/", "server/vllm_api.py", "server/launch.py")


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


def assigned(cls: type, attribute: str) -> bool:
    """Whether `cls` has the attribute, or one of its methods sets it."""
    lines = "".join(inspect.getsource(base) for base in cls.__mro__ if base.__module__.startswith("vllm"))
    return hasattr(cls, attribute) or bool(re.search(rf"\bself\.{attribute}\b(: [^=]+)? =", lines))


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


def test_layers() -> None:
    """`protocol` and `capture` know nothing of each other, nor of the server."""
    for path, tree in sources():
        if path.startswith("protocol/"):
            assert not imports_of(tree, "routed_experts.server") | imports_of(tree, "routed_experts.capture"), path
            assert not imports_of(tree, "torch"), path
        if path.startswith("capture/"):
            assert not imports_of(tree, "routed_experts.server") | imports_of(tree, "routed_experts.protocol"), path


def test_both_sides_say_unknown_alike() -> None:
    assert rows.UNKNOWN == codec.UNKNOWN


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
from routed_experts.protocol import batch, collect, histogram
from routed_experts.protocol.codec import decode, encode
rows = np.arange(24, dtype=np.int16).reshape(3, 2, 4)
sent = encode(rows, fmt="object", dtype="int16", start=0)
assert (decode(sent) == rows).all()
answer = {{"choices": [{{"index": 0, "routed_experts": sent, "finish_reason": "stop"}}]}}
(routing,) = collect.collect(answer)
assert batch.align([routing], 5, last=-1).shape == (1, 5, 2, 4)
assert histogram.histogram(rows, 24)["rows"] == 3
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


def test_the_output_handler_looks_up_what_is_replaced_at_each_call() -> None:
    source = inspect.getsource(vllm_api.AsyncLLM._run_output_handler)
    assert "output_processor.process_outputs(" in source
    assert parameters(vllm_api.OutputProcessor.process_outputs)[:2] == ["self", "engine_core_outputs"]


@pytest.mark.parametrize(
    ("cls", "base"),
    [
        (vllm_serving.RoutedServingCompletion, vllm_api.OpenAIServingCompletion),
        (vllm_serving.RoutedServingChat, vllm_api.OpenAIServingChat),
        (vllm_serving.RoutedServingTokens, vllm_api.ServingTokens),
    ],
)
def test_adopting_twice_is_harmless(cls: Any, base: type) -> None:
    instance = object.__new__(base)
    for _ in range(2):
        vllm_serving.adopt(instance, cls, None, 1)
        assert type(instance) is cls
        assert instance.captured is None  # type: ignore[attr-defined]


def test_adopting_another_class_is_refused() -> None:
    class Derived(vllm_api.OpenAIServingChat):
        pass

    for other in (Derived, vllm_api.OpenAIServingCompletion):
        with pytest.raises(TypeError, match="is not the class that RoutedServingChat extends"):
            vllm_serving.adopt(object.__new__(other), vllm_serving.RoutedServingChat, None, 1)


# ---- what is overridden ----

NEW_METHODS = {"routed_experts_info"}
OVERRIDING = [
    (vllm_serving.RoutedServingCompletion, vllm_api.OpenAIServingCompletion),
    (vllm_serving.RoutedServingChat, vllm_api.OpenAIServingChat),
    (vllm_serving.RoutedServingTokens, vllm_api.ServingTokens),
    (fields.RoutedCompletionRequest, vllm_api.CompletionRequest),
    (fields.RoutedChatRequest, vllm_api.ChatCompletionRequest),
    (scheduler._Capture, Scheduler),
    (scheduler._Capture, AsyncScheduler),
    (worker._Capture, Worker),
    (worker._Capture, CPUWorker),
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


def test_nothing_abstract_is_left_in_our_classes() -> None:
    """Else vLLM's process ends where it first makes one."""
    from routed_experts.capture.engine import v1, v2

    found = [cls for module in (scheduler, v1, v2, worker) for cls in vars(module).values()]
    ours = [cls for cls in found if inspect.isclass(cls) and cls.__module__.startswith("routed_experts.")]
    assert v1.OutputWithRows in ours
    assert [cls for cls in ours if inspect.isabstract(cls)] == []


@pytest.mark.parametrize(
    ("caller", "names"),
    [
        (
            vllm_api.OpenAIServingCompletion._create_completion,
            ["render_completion_request", "completion_stream_generator", "request_output_to_completion_response"],
        ),
        (
            vllm_api.OpenAIServingChat._create_chat_completion,
            ["render_chat_request", "chat_completion_stream_generator", "chat_completion_full_generator"],
        ),
        (vllm_api.OpenAIServingCompletion.create_completion, ["_create_completion"]),
        (vllm_api.OpenAIServingChat.create_chat_completion, ["_create_chat_completion"]),
    ],
)
def test_overridden_methods_are_called(caller: Callable[..., Any], names: list[str]) -> None:
    source = inspect.getsource(caller)
    for name in names:
        assert f"self.{name}(" in source


def test_methods_that_ours_call() -> None:
    for base in (vllm_api.OpenAIServingCompletion, vllm_api.OpenAIServingChat):
        assert parameters(base._extract_prompt_len) == ["self", "prompt"]
    assert parameters(vllm_api.OpenAIServingChat.get_chat_request_role) == ["self", "request"]
    assert {"method"} <= set(parameters(vllm_api.AsyncLLM.collective_rpc))
    generate = parameters(vllm_api.AsyncLLM.generate)
    assert generate[1:4] == ["prompt", "sampling_params", "request_id"]
    assert "data_parallel_rank" in generate
    assert len(parameters(vllm_api.with_sse_keep_alive)) == 2


def test_fields_of_requests_that_ours_read() -> None:
    for model in (vllm_api.CompletionRequest, vllm_api.ChatCompletionRequest):
        assert {"n", "echo", "use_beam_search", "stream", "routed_experts_prompt_start"} <= set(model.model_fields)
    assert "extra_args" in parameters(SamplingParams)
    assert hasattr(SamplingParams(), "routed_experts_prompt_start")


def test_routing_fields_win_over_vllms_of_the_same_name() -> None:
    for model in (fields.RoutedCompletionRequest, fields.RoutedChatRequest):
        field = model.model_fields["routed_experts_prompt_start"]
        assert field.description == fields.RoutingFields.model_fields["routed_experts_prompt_start"].description


def test_outputs_carry_rows() -> None:
    assert "routed_experts" in vllm_api.EngineCoreOutput.__struct_fields__
    assert "routed_experts" in vllm_api.CompletionOutput.__dataclass_fields__
    assert "aux_output_connector_output" in ModelRunnerOutput.__dataclass_fields__
    assert {
        "aux_output_connector_metadata",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "kv_cache_block_copies",
    } <= set(SchedulerOutput.__dataclass_fields__)


def test_the_plugin_is_one() -> None:
    plugin = RoutedExpertsPlugin()
    assert isinstance(plugin, EndpointPlugin)
    for name in ("attach_router", "init_state"):
        assert parameters(getattr(RoutedExpertsPlugin, name)) == parameters(getattr(EndpointPlugin, name))


def test_state_that_the_plugin_adopts() -> None:
    source = (VLLM / "entrypoints/generate/api_router.py").read_text(encoding="utf-8")
    for name in ("openai_serving_completion", "openai_serving_chat"):
        assert f"state.{name} = (" in source
    assert "state.openai_serving_models = " in (VLLM / "entrypoints/launchers/api_server/app_state.py").read_text(
        encoding="utf-8"
    )


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
    ours_alone = {"add_request", "receive", "num_tracked"}
    ours_alone |= {"max_cache_hit", "cap_external_hit", "request_loading"}  # vLLM 0.32: does not call these
    check_calls(
        scheduler.SchedulerConnector, "v1/core/sched/scheduler.py", "aux_output_connector", ours_alone=ours_alone
    )


def test_calls_on_the_runners_connector() -> None:
    from routed_experts.capture.engine import v2

    check_calls(v2.V2Adapter, "v1/worker/gpu/model_runner.py", "aux_output_connector")
    check_calls(v2.V2Pending, "v1/worker/gpu/async_utils.py", "pending_aux_output")


def test_attributes_of_the_engine() -> None:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.worker.block_table import BlockTable, MultiGroupBlockTable
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for cls, names in {
        Scheduler: ["kv_cache_manager", "requests", "aux_output_connector"],
        KVCacheCoordinator: ["single_type_managers"],
        SingleTypeKVCacheManager: ["req_to_blocks"],
        GPUModelRunner: ["input_batch", "max_num_tokens", "get_model"],
        InputBatch: ["req_ids", "block_table"],
        MultiGroupBlockTable: ["__getitem__"],
        BlockTable: ["slot_mapping"],
        Worker: ["model_runner", "use_v2_model_runner", "device", "vllm_config"],
        MoERunner: ["layer_id", "is_monolithic", "moe_config", "router"],
        BaseRouter: ["capture_fn", "top_k"],
        VllmConfig: ["max_concurrent_batches"],
    }.items():
        for name in names:
            assert assigned(cls, name), f"{cls.__name__}.{name}"


def test_routers_capture_logical_ids() -> None:
    """Before expert load balancing maps them to physical ones."""
    assert parameters(BaseRouter.set_capture_fn) == ["self", "capture_fn"]
    source = inspect.getsource(BaseRouter)
    assert source.index("self.capture_fn(topk_ids)") < source.index("topk_ids = self._apply_eplb_mapping(topk_ids)")


# ---- the connector on real configurations and requests ----


def kv_cache_config(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)
SLIDING = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=16)


def request_with(extra_args: dict[str, Any] | None) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(extra_args=extra_args), None)


def opt_in(prompt_start: int) -> dict[str, Any]:
    return {OPT_IN_ARG: OptIn(prompt_start, bytes(16), shared=False).encode()}


@pytest.mark.parametrize(("prompt_start", "next_row"), [(0, 0), (2, 2), (3, 3)])
def test_requests_that_opted_in_are_tracked(prompt_start: int, next_row: int) -> None:
    connector = scheduler.SchedulerConnector(SimpleNamespace(), kv_cache_config(FULL), has_drafts=False)
    connector.add_request(request_with(opt_in(prompt_start)))
    assert connector._tracked["r"].next_row == next_row


@pytest.mark.parametrize(
    "extra_args", [None, {}, {"other": 1}, *({OPT_IN_ARG: v} for v in (0, 1, True, "1", -1, [0], 1.5, None, {}))]
)
def test_whatever_clients_of_other_endpoints_set_is_not_an_opt_in(extra_args: dict[str, Any] | None) -> None:
    """`vllm_xargs` of /v1/responses ends in `extra_args`; an exception here would end the engine."""
    connector = scheduler.SchedulerConnector(SimpleNamespace(), kv_cache_config(FULL), has_drafts=False)
    connector.add_request(request_with(extra_args))
    assert connector._tracked == {}


# ---- errors ----

AT_START = {CompareError, CommandError, ProbeError, UnsupportedConfig}
"""The process ends with the sentence."""
ANSWERED = {CodecError, FieldError}
"""Become a `VLLMValidationError` with the field's name, and in a stream an error event."""
IN_STREAMS = {LostRowsError, StreamLimitError}
"""Failures of the server: an error event in a stream, and 500 before its first byte."""
CLIENTS = {EventError, RoutingError}
"""Raised in clients only."""


def test_every_exception_of_ours_is_in_one_of_the_lists() -> None:
    found = set()
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                module = importlib.import_module(module_name(path))
                cls = vars(module).get(node.name)
                if isinstance(cls, type) and issubclass(cls, BaseException):
                    found.add(cls)
    assert found == AT_START | ANSWERED | IN_STREAMS | CLIENTS
    assert not AT_START & ANSWERED


def test_answered_errors_are_bad_requests() -> None:
    error = create_error_response(vllm_api.VLLMValidationError("no", parameter="routed_experts_dtype")).error
    assert (error.code, error.type, error.param) == (400, "BadRequestError", "routed_experts_dtype")
    for cls in ANSWERED:
        raised = cls("routed_experts_dtype", "no") if cls is FieldError else cls("no")
        assert create_error_response(raised).error.code == 400
