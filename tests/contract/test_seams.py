"""Where this project holds on to vLLM, as far as can be told without running it."""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, TypeGuard

import pytest
import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

import routed_experts.capture
import routed_experts.server
from routed_experts.capture.engine.connectors import CONNECTORS
from routed_experts.capture.scheduler import scheduler
from routed_experts.capture.seams.required import API
from routed_experts.capture.seams.required import HTTP as HTTP_NAMES
from routed_experts.capture.seams.required import SCHEDULER as SCHEDULER_NAMES
from routed_experts.capture.seams.required import WORKER as WORKER_NAMES
from routed_experts.capture.worker import v2, worker
from routed_experts.server.http import vllm_http
from routed_experts.server.http.answers import serving
from routed_experts.server.http.engine import ServerState
from routed_experts.server.http.requests import request
from tests.sources import nodes

VLLM = Path(vllm.__file__).parent
SCHEDULER = "v1/core/sched/scheduler.py"


def calls_on(path: str, attribute: str) -> dict[str, set[int]]:
    """The methods that a file of vLLM's calls on `self.<attribute>`, and with how many
    arguments."""
    counts: dict[str, set[int]] = {}
    for node in nodes(VLLM / path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            on = node.func.value
            if isinstance(on, ast.Attribute) and on.attr == attribute:
                counts.setdefault(node.func.attr, set()).add(len(node.args) + len(node.keywords))
    return counts


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
NEW_METHODS = {"routed_experts_info", "routed_experts_profile", "collect"}


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
    methods = {
        name
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    assert methods - NEW_METHODS
    for name in methods - NEW_METHODS:
        theirs = inspect.signature(getattr(base, name)).parameters
        ours = inspect.signature(getattr(cls, name)).parameters
        takes_all = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in ours.values())
        named = [p for p in ours if p not in ("args", "kwargs")]
        assert list(theirs)[: len(named)] == named, f"{base.__name__}.{name}{tuple(theirs)}"
        assert takes_all or len(named) == len(theirs), (
            f"{base.__name__}.{name} has arguments that ours does not take"
        )


def test_our_classes_can_be_made() -> None:
    """None of them leaves a method of vLLM's abstract classes out."""
    classes = list(classes_of_vllms())
    assert len(classes) >= 10
    for cls in classes:
        assert not inspect.isabstract(cls), f"{cls.__name__} lacks {set(cls.__abstractmethods__)}"


# ---- what would not be missed by itself ----

LISTED = (*SCHEDULER_NAMES, *WORKER_NAMES, *API, *HTTP_NAMES)
FOLDERS = [Path(package.__path__[0]) for package in (routed_experts.capture, routed_experts.server)]


def test_every_method_of_vllms_that_is_overridden_is_listed() -> None:
    """Also by a class that is mixed in. If vLLM renames one, ours is never called, and nothing says
    so."""
    listed = {name.short for name in LISTED}
    overridden = {
        (cls, name): bases for cls in classes_of_vllms() for name, bases in overrides(cls).items()
    }
    assert len(overridden) > 25
    unlisted = [
        f"{cls.__name__}.{name}"
        for (cls, name), bases in overridden.items()
        if not any(f"{base.__name__}.{name}" in listed for base in bases)
    ]
    assert unlisted == []


def classes_of_vllms() -> Iterator[type]:
    """Our classes that derive from one of vLLM's."""
    for package in (routed_experts.capture, routed_experts.server):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            # which runs when it is imported; which needs Triton
            if info.name.endswith(("__main__", "engine.v2")):
                continue
            module = importlib.import_module(info.name)
            for cls in vars(module).values():
                if (
                    inspect.isclass(cls)
                    and cls.__module__ == info.name
                    and any(map(is_vllms, cls.__mro__))
                ):
                    yield cls


def is_vllms(cls: type) -> bool:
    return cls.__module__.startswith("vllm.")


def overrides(cls: type) -> dict[str, list[type]]:
    """The names of our functions in a class, and the classes of vLLM's behind them that have one of
    that name too."""
    overridden = {}
    for index, ours in enumerate(cls.__mro__):
        for name in functions_of(ours):
            behind = [base for base in cls.__mro__[index + 1 :] if name in vars(base)]
            bases = [base for base in behind if is_vllms(base)]
            # which calls it, whatever vLLM does
            if bases and behind[-1].__module__ != "argparse":
                overridden[name] = bases
    return overridden


def functions_of(cls: type) -> list[str]:
    """The names of the functions in a class of ours, without those that make an object; of another
    class, none."""
    if not cls.__module__.startswith("routed_experts."):
        return []
    functions = {
        name
        for name, value in vars(cls).items()
        if isinstance(value, FunctionType | property | classmethod)
    }
    return sorted(functions - {"__init__", "model_post_init"})


def test_every_method_of_vllms_that_is_replaced_is_listed() -> None:
    """On an instance, a class or a module: wherever a function is assigned to an attribute of
    another object."""
    replaced = {name for file in our_files() for name in functions_assigned(file)}
    assert {
        "process_outputs",
        "lookup",
        "_compute_routing",
        "beam_search",
        "create_engine_config",
    } <= replaced
    assert replaced - OURS - {name.short.rpartition(".")[2] for name in LISTED} == set()


OURS = {"_has_left"}  # an attribute of our own
OURS |= {"__init__"}  # which every class has
# Of the V2 model runner, whose module is not imported where it is not used. It is read from the
# runner first, which fails if it is not there: see `test_both_model_runners_prepare…`.
OURS |= {"prepare_inputs"}


@pytest.mark.parametrize(
    ("runner", "method"),
    [
        ("v1/worker/gpu_model_runner.py", "_model_forward"),
        ("v1/worker/gpu/model_runner.py", "prepare_inputs"),
    ],
)
def test_both_model_runners_have_the_batch_ready_where_tables_are_filled(
    runner: str, method: str
) -> None:
    """They call the method once, in a step that is no made-up one."""
    calls = [
        function.name
        for function in nodes(VLLM / runner)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func) == f"self.{method}"
    ]
    assert calls == ["execute_model"]


def our_files() -> Iterator[Path]:
    """Those that have to do with vLLM."""
    for folder in FOLDERS:
        yield from (
            file
            for file in folder.rglob("*.py")
            if not {"tools", "page"} & {*file.relative_to(folder).parts}
        )


def functions_assigned(file: Path) -> Iterator[str]:
    parsed = list(nodes(file))
    functions = {
        node.name for node in parsed if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for node in parsed:
        if is_call_of("replace_once", node):
            yield ast.literal_eval(node.args[1])
        if isinstance(node, ast.Assign) and is_function(node.value, functions):
            yield from attributes_of_others(node.targets)


def is_call_of(name: str, node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def is_function(value: ast.expr, functions: set[str]) -> bool:
    """Whether a value is a function: a lambda, a partial, or one with a name in `functions`."""
    if isinstance(value, ast.Attribute):
        return value.attr in functions
    if isinstance(value, ast.Name):
        return value.id in functions
    return isinstance(value, ast.Lambda) or is_call_of("partial", value)


def attributes_of_others(targets: list[ast.expr]) -> Iterator[str]:
    """The attributes among the targets of an assignment, but for those of `self`."""
    for target in targets:
        if isinstance(target, ast.Attribute):
            is_own = isinstance(target.value, ast.Name) and target.value.id == "self"
            if not is_own:
                yield target.attr


def test_every_attribute_of_vllms_that_is_read_with_a_default_is_listed() -> None:
    """If vLLM renames one, the default is read for ever."""
    read = {name for file in our_files() for name in names_with_defaults(file)}
    assert {"_tower_model_names", "expert_substitution", "prefix_replay_tokens"} <= read
    assert read - OTHERS - {name.short.rpartition(".")[2] for name in LISTED} == set()


# Of our own objects, of Python's and Starlette's, of uvicorn's, and fields that OpenAI names.
OTHERS = {
    "routed_experts_record",
    "final_only",
    "write",
    "__dict__",
    "model",
    "request_id",
}
OTHERS |= {
    "_json",
    "_body",
    "_routed_experts",
    "strerror",
    "errno",
    "errors",
    "__module__",
    "aclose",
    "endpoint",
    "args",
}
OTHERS |= {
    "server",
    "servers",
    "started",
    "cycle",
    "scope",
    "transport",
    "additional_config",
    "__dataclass_fields__",
}
OTHERS |= {"disconnected", "__self__", "POLLRDHUP"}  # uvicorn's object for a request, and `select`
OTHERS |= {"decoder_replay_layers"}  # in a module that needs CUDA: see the next test
# Each version has one of two: `seams/arguments.py`. A request has `stream` or is never streamed.
OTHERS |= {"aux_output_config", "enable_return_routed_experts", "stream"}


def test_the_model_that_replays_says_so() -> None:
    """DeepSeek-V4.1 runs some layers on a part of a prompt only; it is refused by what it has for
    that."""
    models = [*VLLM.glob("models/deepseek_v41/*/model.py")]
    assert all(
        "self.decoder_replay_layers" in model.read_text()
        for model in models
        if "amd" not in model.parts
    )


def names_with_defaults(file: Path) -> Iterator[str]:
    for node in nodes(file):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            is_default = node.func.id == "hasattr" or (
                node.func.id == "getattr" and len(node.args) == 3
            )
            if is_default and isinstance(node.args[1], ast.Constant):
                yield node.args[1].value


# Methods of the connector that are called by us, or by one of the supported versions only.
CALLED_BY_US = {"add", "receive", "distribute", "track_external_kv", "truncate_prefix_hit"}
# vLLM 0.32: does not call these
CALLED_BY_US |= {"max_cache_hit", "cap_external_hit", "request_loading"}


@pytest.mark.parametrize(
    ("cls", "path", "attribute"),
    [
        (scheduler.SchedulerHooks, SCHEDULER, "aux_output_connector"),
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
    assert public - (CALLED_BY_US if cls is scheduler.SchedulerHooks else set()) <= set(calls)


def test_leases_are_as_long_as_vllms_where_no_flag_says_it() -> None:
    """NIXL, which vLLM's modules import, is not installed everywhere."""
    text = (VLLM / "distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py").read_text()
    (default,) = re.findall(r'"kv_lease_duration", (\d+)', text)
    leases = {known.lease_s for name, known in CONNECTORS.items() if name.startswith("Nixl")}
    assert leases == {int(default)}
