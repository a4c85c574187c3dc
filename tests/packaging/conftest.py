"""The package as users get it: built from a copy of the sources, installed into environments of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("capture", "protocol", "server", "pyproject.toml", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
# Nothing is fetched: what the environments need beside the package, they borrow from this one.
OFFLINE = ("--no-deps", "--no-build-isolation", "--no-index")


@dataclass(frozen=True)
class Environment:
    """A virtual environment with nothing in it but what a test puts there."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    def pip_install(self, *what: str) -> None:
        # `--python` must come before the command.
        run([*PIP, "--python", str(self.python), "install", *OFFLINE, *what])

    def borrow(self, *paths: Path) -> None:
        """Packages in these folders can be imported, after those of the environment itself."""
        self.site_packages.joinpath("borrowed.pth").write_text("".join(f"{path}\n" for path in paths))

    def borrow_everything(self) -> None:
        """All that the tests' own interpreter has, vLLM among it."""
        self.borrow(*(Path(path) for path in sys.path if path.endswith("site-packages")))

    def run(self, *args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """A program of the environment, without the variables that change what it imports."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        command = [str(self.folder / "bin" / args[0]), *args[1:]]
        return subprocess.run(
            command, cwd=cwd or self.folder, env={**kept, **env}, capture_output=True, text=True, check=False
        )

    def python_says(self, code: str, **env: str) -> str:
        """What a program prints, which must succeed."""
        done = self.run("python", "-c", code, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def copy_sources(folder: Path) -> Path:
    """What a distribution is built from. Building leaves files beside the sources, so it happens in a copy."""
    folder.mkdir(parents=True)
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
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
    run([*PIP, "wheel", *OFFLINE, "--wheel-dir", str(folder), str(copy_sources(folder / "sources"))])
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def wheel_environment(new_environment: Callable[[], Environment], wheel: Path) -> Environment:
    """The wheel, and numpy: what the smallest client has."""
    environment = new_environment()
    environment.pip_install(str(wheel))
    numpy_only = environment.folder / "numpy-only"
    numpy_only.mkdir()
    import numpy

    installed = Path(numpy.__file__).parent
    for path in (installed, installed.parent / "numpy.libs"):
        if path.exists():
            (numpy_only / path.name).symlink_to(path)
    environment.borrow(numpy_only)
    return environment


@pytest.fixture(scope="session")
def editable_environment(
    new_environment: Callable[[], Environment], tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    """An editable install, as `make setup` does it, with vLLM at hand."""
    environment = new_environment()
    environment.borrow_everything()  # setuptools too, which writes the install
    environment.pip_install("--editable", str(copy_sources(tmp_path_factory.mktemp("checkout") / "sources")))
    return environment
