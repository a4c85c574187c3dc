"""What vLLM's own errors do not say: why a server cannot have its address, which variable of the
environment cannot be read, and what is wrong with a model's name."""

import errno
import json
import linecache
import logging.config
import os
import re
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from routed_experts.server.cli.console import CommandError


def check_address(host: str | None, port: int, uds: str | None) -> None:
    """Raises `CommandError` if the server cannot listen there, before the model is read.

    Several API processes of vLLM would share a port with another server of this user without an
    error.
    """
    if uds is not None:
        _check_socket_file(uds)
    else:
        _check_port(host, port)


def _check_socket_file(path: str) -> None:
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(path)
        os.unlink(path)
    except OSError as error:
        why = error.strerror or str(error)  # one about a long path has no `strerror`
        if error.errno == errno.EADDRINUSE:
            why += "; if no server uses it, remove it"
        raise CommandError(f"The server cannot listen on --uds {path}: {why}.") from None


def _check_port(host: str | None, port: int) -> None:
    try:
        family = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host or "", port))
    except (OSError, OverflowError) as error:
        address = f"port {port} of --host {host}" if host else f"port {port}"
        why = getattr(error, "strerror", None) or str(error)
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            why += "; end the program that uses it, or choose another with --port"
        raise CommandError(f"The server cannot listen on {address}: {why}.") from None


_NO_NUMBER = "invalid literal for int()"
_LONGEST_VALUE = 60
_HOW_TO_MEND = "change it, or unset it."
_LOG_FILE = "VLLM_LOGGING_CONFIG_PATH"
_CONFIGURES_LOG = "VLLM_CONFIGURE_LOGGING"
_OF_VLLMS_LOG = ("VLLM_LOGGING_STREAM", "VLLM_LOGGING_PREFIX")
"""Without effect where vLLM configures no log. The level and the file are checked there too."""


def check_environment() -> None:
    """Raises `CommandError` for a variable that vLLM cannot read, or its log cannot use.

    vLLM reads all of them when an engine starts, and what is wrong with one ends there in a trace.
    """
    variables = _vllms_variables()
    for name, read in variables.items():
        if name not in os.environ:
            continue
        try:
            read()
            is_used = name not in _OF_VLLMS_LOG or variables[_CONFIGURES_LOG]()
            if name in _CHECKS_OF_LOG and is_used:
                _CHECKS_OF_LOG[name](os.environ[name])
        except ImportError:  # of what vLLM imports to read it
            continue
        except Exception as error:  # whatever it raises when it parses a text
            value = _shown(name)
            raise CommandError(
                f"vLLM cannot read {name}={value} ({_reason(error)}): {_HOW_TO_MEND}"
            ) from error


@contextmanager
def loading_vllm() -> Iterator[None]:
    """Raises `CommandError` if what is imported cannot use a variable of the environment.

    PyTorch, the hub's client and others parse variables of their own when they are imported.
    """
    try:
        yield
    except (ImportError, CommandError, OSError):  # as of a full disk, whatever the code reads
        raise
    except Exception as error:
        name = _variable_behind(error)
        if name is None:
            raise
        value = _shown(name)
        raise CommandError(
            f"vLLM cannot be loaded with {name}={value} ({_reason(error)}): {_HOW_TO_MEND}"
        ) from error


def _shown(name: str) -> str:
    return repr(os.environ[name][:_LONGEST_VALUE])


def _reason(error: Exception) -> str:
    why = str(error.__cause__ or error).strip().partition("\n")[0].rstrip(".")
    if why.startswith(_NO_NUMBER):
        return "it must be an integer: of a switch, 1 or 0"
    return why


def _variable_behind(error: Exception) -> str | None:
    """The variable that an error names, or whose name stands in the code that raised it, or whose
    file has the configuration of a log that Python cannot use."""
    # Not the shell's `_`, which stands in much code.
    names = [name for name in os.environ if "_" in name.strip("_")]
    in_message = _first_in(str(error), names, r"\b{}\b")
    if in_message is not None:
        return in_message
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == logging.config.__file__ and _LOG_FILE in names:
            return _LOG_FILE
        in_code = _first_in(_code_of(frame), names, "[\"']{}[\"']")
        if in_code is not None:
            return in_code
    return None


def _first_in(text: str, names: list[str], pattern: str) -> str | None:
    """The first of the names that stands in a text as the pattern says."""
    for name in names:
        if re.search(pattern.format(re.escape(name)), text):
            return name
    return None


def _code_of(frame: traceback.FrameSummary) -> str:
    """The lines of the statement that a frame was in."""
    first = frame.lineno or 0
    last = frame.end_lineno or 0
    return "".join(linecache.getline(frame.filename, number) for number in range(first, last + 1))


def _vllms_folder() -> Path | None:
    """Where vLLM is installed. Does not import it, which reads variables of the environment."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


# ---- the log ----


def _check_log_level(value: str) -> None:
    names = logging.getLevelNamesMapping()
    vllm = _vllms_folder()
    if vllm is not None and (vllm / "config/logging.py").exists():
        # it knows no second names of levels
        names = {name: names[name] for name in names if name not in ("WARN", "FATAL")}
    if value.upper() not in names:
        raise ValueError(f"it must be one of {', '.join(names)}")


def _check_log_stream(value: str) -> None:
    try:
        stream = logging.config.BaseConfigurator({}).convert(value)  # which reads ext://
    except (ValueError, AttributeError):
        stream = None
    if not hasattr(stream, "write"):
        raise ValueError("it must be ext://sys.stdout or ext://sys.stderr")


def _check_log_prefix(value: str) -> None:
    """The prefix is a part of the format of all lines."""
    next_part = "(%(levelname)s"  # after a percent sign, it would be a name
    fields = vars(logging.makeLogRecord({}))
    of_formatters = dict.fromkeys(("message", "asctime", "fileinfo", "vllm_process_name"), "")
    try:
        (value + next_part) % {**fields, **of_formatters}
    except (KeyError, TypeError, ValueError):
        raise ValueError("it is no format of log records: write a percent sign as %%") from None


def _check_log_file(value: str) -> None:
    """Raises `ValueError` for a file with the log's configuration that vLLM cannot read. What it
    says is checked when it is used."""
    if not value:  # which vLLM takes for none
        return
    try:
        content = json.loads(Path(value).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(error.strerror) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the file is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError("the file must hold a JSON object")


_CHECKS_OF_LOG: dict[str, Callable[[str], None]] = {
    "VLLM_LOGGING_LEVEL": _check_log_level,
    "VLLM_LOGGING_STREAM": _check_log_stream,
    "VLLM_LOGGING_PREFIX": _check_log_prefix,
    _LOG_FILE: _check_log_file,
}
"""vLLM takes these as they are. What is wrong with one ends in a trace when the log is set up,
which vLLM does until 0.30 when it is imported, or at each line of the log."""


def _vllms_variables() -> dict[str, Callable[[], Any]]:
    """What reads each variable, by its name. From its file, as importing vLLM itself reads some of
    them."""
    vllm = _vllms_folder()
    if vllm is None:
        return {}
    spec = spec_from_file_location("vllms_variables", vllm / "envs.py")
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
