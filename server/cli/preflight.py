"""What is wrong with a model, a port or a flag, said in a sentence before the engine's processes are started."""

import errno
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from routed_experts.server.cli.console import CommandError

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_WITHOUT_FILES = ("dummy", "runai_streamer", "runai_streamer_sharded", "tensorizer", "modelexpress")
"""Load formats that need no weights in the model's folder."""


def check_model_folder(model: str) -> None:
    """Refuses a folder that is not there, or that is no checkpoint. Names on the hub and URLs are left to vLLM.

    Raises:
        CommandError: see above.
    """
    folder = Path(model).expanduser()
    if folder.is_file() or "://" in model:
        return
    if not folder.exists():
        if model.startswith((".", "~")) or folder.is_absolute() or model.count("/") > 1:
            raise CommandError(
                f"The folder {model} does not exist: give a folder with a checkpoint, or the name of a model on the "
                "Hugging Face hub."
            )
        return
    if not any((folder / name).exists() for name in ("config.json", "params.json")) and not _files(folder, ("*.gguf",)):
        raise CommandError(f"The folder {model} has no config.json: give the folder of a whole checkpoint.")


def check_weights(config: Any, memory: int | None, whose: str) -> None:
    """Refuses a folder without weights, and weights that are larger than all memory there is.

    Args:
        config: vLLM's whole configuration.
        memory: all of it in bytes, whoever uses it now; None where it is not known.
        whose: memory it is, in words.

    Raises:
        CommandError: see above.
    """
    model = config.model_config
    folder = Path(model.model)
    if not folder.is_dir() or str(config.load_config.load_format) in _WITHOUT_FILES or model.quantization:
        return
    files = _files(folder, _WEIGHTS)
    if not files:
        raise CommandError(
            f"The folder {folder} has no weights (*.safetensors or *.bin): download the checkpoint again, or add "
            "--load-format dummy for random ones."
        )
    needed = _loaded_bytes(config, files)
    if memory is not None and needed > memory:
        raise CommandError(
            f"The model's weights take {_gib(needed)}, and the memory of {whose} is {_gib(memory)}: spread it over "
            "more GPUs with --tensor-parallel-size, or serve a smaller or quantized model."
        )


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return [file for pattern in patterns for file in folder.glob(pattern)]


def _loaded_bytes(config: Any, files: list[Path]) -> int:
    """What the weights take at least: a checkpoint in both formats counts once."""
    sizes: dict[str, int] = {}
    for file in files:
        sizes[file.suffix] = sizes.get(file.suffix, 0) + file.stat().st_size
    stored = getattr(config.model_config.hf_config, "dtype", None) or config.model_config.dtype
    ratio = config.model_config.dtype.itemsize / stored.itemsize if isinstance(stored, torch.dtype) else 1
    return int(min(sizes.values()) * min(ratio, 1))


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def check_port(host: str | None, port: int) -> None:
    """Refuses an address that cannot be listened at.

    Raises:
        CommandError: the port is in use or not allowed, or the host is not this machine's.
    """
    try:
        family = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host or "", port))
    except OverflowError:
        raise CommandError(f"--port {port} is not a port: give one from 1 to 65535.") from None
    except socket.gaierror:
        raise CommandError(f"--host {host} is not known: give an address of this machine, or leave it out.") from None
    except OSError as error:
        raise CommandError(_why_not(error, host, port)) from None


def _why_not(error: OSError, host: str | None, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} is in use: choose another with --port, or end the program that listens there."
    if error.errno == errno.EACCES:
        return f"Port {port} is not allowed for this user: choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine: give one that is, or leave it out."
    return f"Port {port} cannot be listened at: {error.strerror}."


NO_HUB = (
    "{model} is not a folder here, and the Hugging Face hub cannot be reached: check the network (or HF_ENDPOINT), or "
    "give the folder of a checkpoint."
)
NO_SUCH_MODEL = (
    "The Hugging Face hub has no model {model}, or not for you: check the name, or log in with a token (HF_TOKEN) that "
    "may read it."
)


def sentence_of(error: BaseException, model: str) -> str:
    """One sentence for what vLLM raised while it put its configuration together."""
    causes = list(_causes(error))
    names = {type(cause).__name__ for cause in causes}
    if names & {"RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError"}:
        return NO_SUCH_MODEL.format(model=model)
    if names & {"ConnectError", "ConnectionError", "LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectTimeout"}:
        return NO_HUB.format(model=model)
    if "HFValidationError" in names:
        return f"{model} is neither a folder here nor a name on the Hugging Face hub (owner/name): check the spelling."
    return _first_sentence(str(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_sentence(text: str) -> str:
    """What a message says, without what pydantic and others put around it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 2 and re.match(r"\d+ validation errors? for ", lines[0]) and "Value error, " not in text:
        lines = [f"{lines[1]}: {lines[2]}"]
    said = next((line.partition("Value error, ")[2] for line in lines if "Value error, " in line), "")
    sentence = (said or (lines[0] if lines else "vLLM refuses these arguments without saying why")).partition(
        " [type="
    )[0]
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
