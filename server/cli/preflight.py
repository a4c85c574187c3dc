"""What vLLM's own errors do not say: why a server cannot have its address, which variable of the
environment cannot be read, and what is wrong with a model's name."""

import errno
import os
import socket
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from routed_experts.server.cli.console import CommandError


def check_address(host: str | None, port: int, uds: str | None) -> None:
    """Raises `CommandError` if the server cannot listen there, before the model is read.

    Several API processes of vLLM would share a port with another server of this user without an
    error.
    """
    try:
        if uds is not None:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(uds)
            os.unlink(uds)
            return
        family = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host or "", port))
    except (OSError, OverflowError) as error:
        where = f"port {port}" if uds is None else f"--uds {uds}"
        where += f" of --host {host}" if host and uds is None else ""
        why = getattr(error, "strerror", None) or error
        hint = (
            "; if no server uses it, remove it"
            if uds and getattr(error, "errno", 0) == errno.EADDRINUSE
            else ""
        )
        raise CommandError(f"The server cannot listen on {where}: {why}{hint}.") from None


_NO_NUMBER = "invalid literal for int()"
_LONGEST_VALUE = 60


def check_environment() -> None:
    """Raises `CommandError` for a variable that vLLM cannot read.

    vLLM reads all of them when an engine starts, and what is wrong with one ends there in a trace.
    """
    for name, read in _vllms_variables().items():
        if name not in os.environ:
            continue
        try:
            read()
        except ImportError:  # of what vLLM imports to read it
            continue
        except Exception as error:  # whatever it raises when it parses a text
            why = str(error).partition("\n")[0].rstrip(".")
            if why.startswith(_NO_NUMBER):
                why = "it must be an integer: of a switch, 1 or 0"
            value = os.environ[name][:_LONGEST_VALUE]
            raise CommandError(
                f"vLLM cannot read {name}={value!r} ({why}): change it, or unset it."
            ) from error


def _vllms_variables() -> dict[str, Callable[[], Any]]:
    """What reads each variable, by its name. From its file, as importing vLLM itself reads some of
    them."""
    vllm = find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        return {}
    spec = spec_from_file_location(
        "vllms_variables", Path(vllm.submodule_search_locations[0]) / "envs.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.environment_variables)


NO_HUB = (
    "{model} is not a local folder, and the Hugging Face hub cannot be reached: check the network (or HF_ENDPOINT), or "
    "use the folder of a checkpoint."
)
NO_SUCH_MODEL = (
    "The Hugging Face hub has no model {model}, or you have no access to it: check the name, or set HF_TOKEN to a "
    "token with access."
)
NO_NAME = "{model} is neither a local folder nor a name on the Hugging Face hub (owner/name): check the spelling."
_SENTENCES = {
    **dict.fromkeys(
        ("RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError"), NO_SUCH_MODEL
    ),
    **dict.fromkeys(("ConnectError", "ConnectionError", "ConnectTimeout"), NO_HUB),
    **dict.fromkeys(("LocalEntryNotFoundError", "OfflineModeIsEnabled"), NO_HUB),
    "HFValidationError": NO_NAME,
}
"""By the classes of errors that the hub's client raises, of which vLLM and transformers make
others."""


def sentence_of(error: BaseException, model: str) -> str:
    """One sentence for an exception that was raised while vLLM or transformers read the model's
    configuration."""
    cause: BaseException | None = error
    while cause is not None:
        if (sentence := _SENTENCES.get(type(cause).__name__)) is not None:
            return sentence.format(model=model)
        cause = cause.__cause__ or cause.__context__
    text = _of_pydantic(error) if callable(getattr(error, "errors", None)) else str(error).strip()
    sentence = text.partition("\n")[0] or "vLLM rejects these arguments without a reason"
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."


def _of_pydantic(error: Any) -> str:
    """The first error, without the link and the value."""
    first = error.errors()[0]
    field, message = ".".join(map(str, first["loc"])), str(first["msg"])
    raised = message.removeprefix("Value error, ")  # by vLLM, which names the field
    return f"{field}: {message}" if field and raised == message else raised
