"""What the tests of GPUs need of the machine."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from routed_experts.capture.engine.config import REFUSALS

NEW_FUNCTIONS = ("ncclCommSuspend", "ncclCommResume", "ncclCommMemStats")
"""What vLLM's binding looks for, for its sleep mode alone, and NCCL before 2.29 does not have."""

LIMIT_S = 500
"""For one test, with the start of its server beside others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (
            Path(__file__).parent in item.path.parents
            and item.get_closest_marker("timeout") is None
        ):
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Skips a configuration that this version of vLLM cannot have, and that its server refused with
    a sentence."""
    report = yield
    said = str(call.excinfo.value) if report.failed and call.excinfo is not None else ""
    for refusal in REFUSALS:
        if "vLLM 0." in refusal.message and refusal.message in said:
            report.outcome, report.longrepr = (
                "skipped",
                (str(item.path), 0, f"Skipped: {refusal.message}"),
            )
    return report


@pytest.fixture(scope="session", autouse=True)
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where NCCL lacks the functions, one that has them, as errors: data parallelism does not start
    without."""
    from vllm.utils.nccl import find_nccl_library

    try:
        library = ctypes.CDLL(find_nccl_library())
    except (OSError, ValueError):  # no NCCL at all: whatever needs it says so itself
        yield
        return
    compiler = shutil.which("cc") or shutil.which("gcc")
    if all(hasattr(library, name) for name in NEW_FUNCTIONS) or compiler is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "VLLM_NCCL_SO_PATH",
            str(_shim(compiler, _path_of(library), tmp_path_factory.mktemp("nccl"))),
        )
        yield


def _shim(compiler: str, nccl: Path, folder: Path) -> Path:
    """A library that is `nccl` with the new functions, all of which fail."""
    source, shim = folder / "shim.c", folder / "libnccl-shim.so"
    source.write_text(
        "".join(
            f"int {name}(void) {{ return 3; /* ncclInternalError */ }}\n" for name in NEW_FUNCTIONS
        )
    )
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-o",
        str(shim),
        str(source),
        "-Wl,--no-as-needed",
        str(nccl),
    ]
    subprocess.run([*command, f"-Wl,-rpath,{nccl.parent}"], check=True)
    return shim


def _path_of(library: ctypes.CDLL) -> Path:
    """Where a library that is loaded lies."""
    name = os.path.basename(library._name)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split()[-1] for line in maps if name in line}
    return Path(min(paths))
