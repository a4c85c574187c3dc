"""Names the worker and scheduler classes for vLLM, which looks them up by name in every process:
ours, or a program's own with the capture mixed in, as
`routed_experts.capture.engine.classes.package:module:Class`."""

import inspect
from functools import cache
from importlib import import_module
from typing import Any

from vllm.platforms import current_platform

from routed_experts.capture import SCHEDULER, WORKERS
from routed_experts.capture.engine.versions import UnsupportedConfig

_PREFIX = f"{__name__}."


def worker_name(configured: Any) -> str:
    """The value for `worker_cls` where a program names the class `configured`, or has it by name;
    ours for None and for `auto`.

    Raises `UnsupportedConfig` on other devices, and for a class that the capture cannot be mixed
    into.
    """
    if current_platform.is_cpu():
        default = WORKERS["cpu"]
    elif current_platform.is_cuda():
        default = WORKERS["cuda"]
    else:
        raise UnsupportedConfig("Routed experts are captured on CUDA and on CPU only.")
    if configured is None or configured == "auto":
        return default
    return _name("worker_cls", configured, "vllm.v1.worker.gpu_worker.Worker")


def scheduler_name(configured: Any) -> str:
    """As `worker_name`, for `scheduler_cls`."""
    if configured is None:
        return SCHEDULER
    return _name("scheduler_cls", configured, "vllm.v1.core.sched.scheduler.Scheduler")


def is_capturing(worker_cls: str) -> bool:
    """Whether an engine with that `worker_cls` captures."""
    return worker_cls in WORKERS.values() or worker_cls.startswith(_PREFIX)


def _name(argument: str, configured: Any, base_name: str) -> str:
    """The name of the class `configured`, which must derive from vLLM's `base_name`, with the capture
    mixed in. `argument` is vLLM's, for messages."""
    cls = configured
    if isinstance(configured, str):
        if configured in (SCHEDULER, *WORKERS.values()) or configured.startswith(_PREFIX):
            return configured
        cls = _class_named(configured)
    base = _class_named(base_name)  # whose import takes seconds
    if not inspect.isclass(cls) or not _can_be_named(cls):
        raise UnsupportedConfig(
            f"{argument} must be a class at the top of a module that every process can import, or its name, for the "
            f"capture to be mixed in: not {configured!r:.100}."
        )
    if not issubclass(cls, base):
        raise UnsupportedConfig(
            f"{argument} {cls.__qualname__} does not derive from vLLM's {base.__name__}, so the capture cannot be "
            "mixed in: derive it from that class, or leave it out."
        )
    return f"{_PREFIX}{cls.__module__.replace('.', ':')}:{cls.__qualname__}"


def _can_be_named(cls: type) -> bool:
    return (
        cls.__module__ != "__main__"
        and getattr(import_module(cls.__module__), cls.__qualname__, None) is cls
    )


def _class_named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnsupportedConfig(f"{name} cannot be imported: {error}") from error


@cache
def _mixed(name: str) -> type:
    """The class `name` (`package:module:Class`) with the capture mixed in."""
    from vllm.v1.worker.gpu_worker import Worker

    cls = _class_named(name.replace(":", "."))
    capture: type
    if issubclass(cls, Worker):
        from routed_experts.capture.worker.worker import WorkerCapture as capture
    else:
        from routed_experts.capture.scheduler.scheduler import SchedulerCapture as capture
    if issubclass(cls, capture):
        return cls
    return type(cls.__name__, (capture, cls), {"__module__": __name__, "__qualname__": name})


def __getattr__(name: str) -> Any:
    if ":" not in name:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return _mixed(name)
