"""Checks the server's address before the engine starts, and words vLLM's errors in one sentence."""

import errno
import os
import re
import socket
from collections.abc import Iterator

from routed_experts.server.cli.console import CommandError


def check_port(host: str | None, port: int) -> None:
    """Raises `CommandError` if the server cannot listen on the address."""
    try:
        family = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host or "", port))
    except OverflowError:
        raise CommandError(f"--port {port} is not a port: use one from 1 to 65535.") from None
    except socket.gaierror:
        raise CommandError(
            f"--host {host} cannot be resolved: use an address of this machine, or omit --host."
        ) from None
    except OSError as error:
        raise CommandError(_why_not(error, host, port)) from None


def check_socket(path: str) -> None:
    """Raises `CommandError` if the server cannot listen on a Unix socket, whose file it makes itself."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(path)
        os.unlink(path)
    except OSError as error:
        exists = error.errno == errno.EADDRINUSE
        why = "it exists; remove it if no server uses it" if exists else error.strerror or error
        raise CommandError(f"--uds {path} cannot be used: {why}.") from None


def _why_not(error: OSError, host: str | None, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} is in use: choose another with --port, or stop the program that listens on it."
    if error.errno == errno.EACCES:
        return f"Port {port} is not allowed for this user: choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine: use one, or omit --host."
    return f"The server cannot listen on port {port}: {error.strerror}."


NO_HUB = (
    "{model} is not a local folder, and the Hugging Face hub cannot be reached: check the network (or HF_ENDPOINT), or "
    "use the folder of a checkpoint."
)
NO_SUCH_MODEL = (
    "The Hugging Face hub has no model {model}, or you have no access to it: check the name, or set HF_TOKEN to a "
    "token with access."
)


def sentence_of(error: BaseException, model: str) -> str:
    """One sentence for an exception that was raised while vLLM or transformers read the model's configuration."""
    causes = list(_causes(error))
    names = {type(cause).__name__ for cause in causes}
    if names & {"RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError"}:
        return NO_SUCH_MODEL.format(model=model)
    if names & {"ConnectError", "ConnectionError", "LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectTimeout"}:
        return NO_HUB.format(model=model)
    if "HFValidationError" in names:
        return f"{model} is neither a local folder nor a name on the Hugging Face hub (owner/name): check the spelling."
    return _first_sentence(str(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_sentence(text: str) -> str:
    """The first sentence of a message, without the text that pydantic adds."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 2 and re.match(r"\d+ validation errors? for ", lines[0]) and "Value error, " not in text:
        lines = [f"{lines[1]}: {lines[2]}"]
    said = next((line.partition("Value error, ")[2] for line in lines if "Value error, " in line), "")
    sentence = (said or (lines[0] if lines else "vLLM rejects these arguments without a reason")).partition(" [type=")[
        0
    ]
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
