"""The package as users get it: built from a copy of the sources, installed into environments of its
own."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("capture", "protocol", "server", "pyproject.toml", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@dataclass(frozen=True)
class Environment:
    """A virtual environment with nothing in it but what a test puts there."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return (
            self.folder
            / "lib"
            / f"python{sys.version_info.major}.{sys.version_info.minor}"
            / "site-packages"
        )

    def _pip(self, *args: str) -> list[str]:
        """The pip of the tests, on this environment."""
        # `--python` must come before the command
        return [*PIP, "--python", str(self.python), *args]

    def install(self, *what: str) -> None:
        run(self._pip("install", "--no-index", *what))

    def check(self) -> str:
        """What `pip check` says."""
        env = without_pip_settings()
        return subprocess.run(
            self._pip("check"), env=env, capture_output=True, text=True, check=False
        ).stdout

    def packages(self) -> set[str]:
        """Names and versions of what is installed."""
        return set(run(self._pip("list", "--format=freeze")).split())

    def run(
        self, *args: str, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """A program of the environment, without the variables that change what it imports."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        command, env = [str(self.folder / "bin" / args[0]), *args[1:]], {**inherited, **env}
        return subprocess.run(
            command, cwd=cwd or self.folder, env=env, capture_output=True, text=True, check=False
        )

    def python_says(self, code: str, **env: str) -> str:
        """What a program prints, which must succeed."""
        done = self.run("python", "-c", code, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def run(command: list[str]) -> str:
    """What a command prints, which must succeed."""
    done = subprocess.run(
        command, env=without_pip_settings(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def without_pip_settings() -> dict[str, str]:
    """The environment in which pip finds only the packages that a command names."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return {**inherited, "PIP_CONFIG_FILE": os.devnull}


def copy_sources(folder: Path, *more: str) -> Path:
    """What a distribution is built from. Building leaves files beside the sources, so it happens in
    a copy."""
    folder.mkdir(parents=True)
    for name in (*SOURCES, *more):
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def new_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Environment]:
    def make() -> Environment:
        folder = tmp_path_factory.mktemp("environment")
        run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        return Environment(folder)

    return make


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    run(
        [*PIP, "wheel", *offline, "--wheel-dir", str(folder), str(copy_sources(folder / "sources"))]
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def wheel_environment(
    new_environment: Callable[[], Environment],
    wheel: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Environment:
    """The wheel with its dependencies, from an index that has nothing else: what a client
    installs."""
    environment = new_environment()
    index = index_of_base(tmp_path_factory)
    environment.install(f"--find-links={index}", str(wheel))
    return environment


def pack_installed(folder: Path, name: str) -> None:
    """The wheel that an installed package came from."""
    package = distribution(name)
    with zipfile.ZipFile(folder / f"{name}-{package.version}-py3-none-any.whl", "w") as archive:
        for file in package.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                archive.write(file.locate(), str(file))


def index_of_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package index with what the wheel itself depends on."""
    index = tmp_path_factory.mktemp("index")
    for name in ("msgspec", "numpy", "orjson"):
        pack_installed(index, name)
    return index


@pytest.fixture(scope="session")
def beside_vllm(
    new_environment: Callable[[], Environment],
    wheel: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Environment:
    """vLLM and its dependencies, as links to the packages of the tests. Then the wheel is
    installed."""
    environment = new_environment()
    (vllm,) = set(packages_distributions()["vllm"])
    for name in sorted({canonicalize_name(vllm), *brought_by(vllm)}):
        try:
            files = distribution(name).files or ()
        except PackageNotFoundError:  # of another platform, or left out in requirements-cpu.txt
            continue
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            link = environment.site_packages / top
            if not link.exists():
                link.symlink_to(Path(str(distribution(name).locate_file(top))))
    environment.install(f"--find-links={index_of_base(tmp_path_factory)}", str(wheel))
    return environment


def brought_by(
    name: str, known: set[str] | None = None, extras: frozenset[str] = frozenset()
) -> set[str]:
    """The names of what an installed distribution requires, of what that requires, and so on."""
    known = set() if known is None else known
    try:
        requirements = [Requirement(text) for text in requires(name) or ()]
    except PackageNotFoundError:
        return known
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        wanted = any(
            requirement.marker is None or requirement.marker.evaluate({"extra": e})
            for e in ("", *extras)
        )
        if wanted and (name not in known or requirement.extras):
            known.add(name)
            brought_by(name, known, frozenset(requirement.extras))
    return known
