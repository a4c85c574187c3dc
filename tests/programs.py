"""Starts Python programs as forks of a process that has imported torch and vLLM, which takes a
second of CPU in place of fifteen.

Started as users start them are those for which that makes a difference: on a GPU, with another vLLM,
with variables that are read at import, with `FORK=0`, and where the fork server cannot run. Then a
warning says why.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any

from tests.fork_server import READY

ROOT = Path(__file__).parents[1]
FOLDER = "FORK_SERVER_FOLDER"
"""Of the run of pytest, whose processes have one fork server."""
START_LIMIT_S = 400
SHOWN_CHARS = 3000
"""Of what a program said that should not have failed."""
READ_AT_IMPORT = ("CUDA_", "HF_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH_")
READ_AT_IMPORT += ("TRANSFORMERS_", "VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_", "VLLM_TARGET_DEVICE")
"""Variables that have an effect only in a program that begins with them: how they begin."""


class Forked:
    """What `subprocess.Popen` is for a program: its process, as the fork server tells of it."""

    def __init__(self, connection: socket.socket, arguments: Sequence[str]) -> None:
        self.args = arguments
        self.returncode: int | None = None
        self.connection = connection
        self.pid = self._number()

    def _number(self) -> int:
        number = self.connection.recv(100)
        assert number, "the fork server has ended"
        return int(number)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.connection.settimeout(timeout)
            try:
                self.returncode = self._number()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired([*self.args], timeout or 0) from None
            self.connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = subprocess.Popen[bytes] | Forked


def start(
    arguments: Sequence[str],
    out: int,
    err: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    as_users_do: bool = False,
    python: str = sys.executable,
) -> Process:
    """`python` with these arguments, in a session of its own, with nothing to read.

    Args:
        out: the file descriptor of its standard output, and of its standard error without `err`.
        env: its whole environment; that of this process if not given.
        as_users_do: not as a fork, which another `python` never is.
    """
    environment = dict(os.environ if env is None else env)
    outputs = (out, out if err is None else err)
    is_fork = not as_users_do and python == sys.executable
    if is_fork and (connection := connect(environment)):
        request = {
            "arguments": [*map(str, arguments)],
            "env": environment,
            "cwd": str(cwd or Path.cwd()),
        }
        socket.send_fds(connection, [json.dumps(request).encode()], outputs)
        return Forked(connection, arguments)
    return subprocess.Popen(
        [python, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=outputs[0],
        stderr=outputs[1],
        start_new_session=True,
        env=environment,
        cwd=cwd,
    )


def run(
    arguments: Sequence[str], *, timeout: float = 500, check: bool = False, **how: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of `python` with these arguments, whose outputs are text."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start(arguments, out.fileno(), err.fileno(), **how)
        try:
            status = process.wait(timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    done = subprocess.CompletedProcess([*arguments], status, *texts)
    if check:
        assert status == 0, (done.stdout + done.stderr)[-SHOWN_CHARS:]
    return done


# ---- the fork server of a run ----


@contextmanager
def fork_server() -> Iterator[None]:
    """What a run of pytest is in, so that its processes find the fork server, which the first who
    needs it starts. A run inside another one has that of the other one."""
    if FOLDER in os.environ:
        yield
    else:
        with own_fork_server():
            yield


@contextmanager
def own_fork_server() -> Iterator[None]:
    """What this process and its children then use."""
    before = os.environ.get(FOLDER)
    with tempfile.TemporaryDirectory(prefix="fork-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "pid").write_text(str(os.getpid()))
        (folder / "environment").write_text(json.dumps({**os.environ}))
        os.environ[FOLDER] = name
        try:
            yield
        finally:
            if before is None:
                del os.environ[FOLDER]
            else:
                os.environ[FOLDER] = before


def connect(env: Mapping[str, str]) -> socket.socket | None:
    """To the fork server, if it can run a program with these variables."""
    if FOLDER not in os.environ or not forks():
        return None
    folder = Path(os.environ[FOLDER])
    environment = json.loads((folder / "environment").read_text())
    if _at_import(env) != _at_import(environment):
        return None
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "log").exists():
            _start_server(folder, environment)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(folder / "socket"))
    except OSError as error:
        connection.close()
        said = (folder / "log").read_text()[-2000:]
        warnings.warn(
            f"Without a fork server ({error}), programs take longer.\n{said}", stacklevel=3
        )
        return None
    return connection


@cache
def forks() -> bool:
    """Whether programs are forks: on a CPU, with the vLLM that is installed by default."""
    import torch  # by those alone who start a program
    import vllm

    from routed_experts.capture.engine.versions import INSTALLED_VLLM

    has_gpu, version = torch.cuda.is_available(), vllm.__version__.split("+")[0]
    return os.environ.get("FORK") != "0" and not has_gpu and version == INSTALLED_VLLM


def _at_import(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_IMPORT)}


def _start_server(folder: Path, env: Mapping[str, str]) -> None:
    """Comes back when it can be asked, or has ended."""
    command = [sys.executable, "-m", "tests.fork_server", f"{folder}/socket"]
    command.append((folder / "pid").read_text())
    # its imports must leave it with one thread
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env={**env, **single},
            cwd=ROOT,
        )
    assert server.stdout is not None
    limit = Timer(START_LIMIT_S, server.kill)
    limit.start()
    for line in server.stdout:
        if line.decode().strip() == READY:
            break
    limit.cancel()
