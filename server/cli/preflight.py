"""What vLLM's own errors do not say: why a server cannot have its address, and what is wrong with a model's name."""

import errno
import os
import socket
from typing import Any

from routed_experts.server.cli.console import CommandError


def check_address(host: str | None, port: int, uds: str | None) -> None:
    """Raises `CommandError` if the server cannot listen there, before the model is read.

    Several API processes of vLLM would share a port with another server of this user without an error.
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
        hint = "; if no server uses it, remove it" if uds and getattr(error, "errno", 0) == errno.EADDRINUSE else ""
        raise CommandError(f"The server cannot listen on {where}: {why}{hint}.") from None


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
    **dict.fromkeys(("RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError"), NO_SUCH_MODEL),
    **dict.fromkeys(("ConnectError", "ConnectionError", "ConnectTimeout"), NO_HUB),
    **dict.fromkeys(("LocalEntryNotFoundError", "OfflineModeIsEnabled"), NO_HUB),
    "HFValidationError": NO_NAME,
}
"""By the classes of errors that the hub's client raises, of which vLLM and transformers make others."""


def sentence_of(error: BaseException, model: str) -> str:
    """One sentence for an exception that was raised while vLLM or transformers read the model's configuration."""
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
