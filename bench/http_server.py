"""One server in a process group of its own, and the CPU time that its API processes take."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple

from routed_experts.capture.wire.rows import INPUT_FLAG

MODEL_NAME = "bench"
# in place of a model, where only the API process is measured
PLAYED = "bench.played_executor.PlayedExecutor"
PLAYED_STEP_MS = "PLAYED_STEP_MS"  # environment variable: how long a step of it takes
PLAYED_SLOTS = 1 << 20  # tokens that its KV cache holds
BEHIND_RUST = ("rust", "rust_off")  # variants
_START_LIMIT_S = 420
_LOADED_TOKENS = "vllm:external_prefix_cache_hits_total"


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    # processes that answer HTTP; one is the process that was started itself, more are its children
    api_servers: int
    # whether it is a proxy, whose children are a server for prefill and one for decode
    apart: bool = False
    # the program of the front end that answers HTTP for it, as a child; none if it does so itself
    front_end: str = ""

    def wait_until_healthy(self) -> None:
        """Returns once the port answers, or exits with the end of the server's log."""
        deadline = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except (OSError, HTTPException):
                time.sleep(0.5)
        raise SystemExit(
            f"the server did not start:\n{self.log.read_text(errors='replace')[-6000:]}"
        )

    def api_pids(self) -> list[int]:
        """The processes that answer HTTP. The engine's are left out."""
        if self.apart:
            proxy = self.process.pid
            return [pid for pid, parent in _session(proxy).items() if proxy in (pid, parent)]
        if self.front_end:
            program = self.front_end.encode() + b"\0"
            return [pid for pid in _session(self.process.pid) if _command(pid).startswith(program)]
        if self.api_servers == 1:
            return [self.process.pid]
        # vLLM gives them titles: VLLM::APIServer_0 and so on.
        pids = [pid for pid in _session(self.process.pid) if b"APIServer" in _command(pid)]
        assert len(pids) == self.api_servers, (
            f"{len(pids)} API processes of {self.api_servers} found"
        )
        return pids

    def api_cpu_seconds(self) -> float:
        """CPU time of the API processes so far, user and system, all threads, in seconds."""
        return sum(cpu_seconds(pid) for pid in self.api_pids())

    def loaded_tokens(self) -> int:
        """Prompt tokens so far whose KV the decode server loaded instead of computing it; 0 if
        there is none."""
        if not self.apart:
            return 0
        connection = HTTPConnection("127.0.0.1", self.port + 2, timeout=30)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        return int(
            sum(float(line.split()[-1]) for line in lines if line.startswith(_LOADED_TOKENS))
        )

    def stop(self) -> None:
        """Ends the whole process group: an engine outlives its parent, and keeps its memory."""
        group = self.process.pid
        try:
            os.killpg(group, signal.SIGTERM)
            deadline = time.monotonic() + 30
            while _session(group) and time.monotonic() < deadline:
                self.process.poll()
                time.sleep(0.2)
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def start(
    variant: str,
    model: Path,
    flags: list[str],
    log: Path,
    api_servers: int,
    gpu: str | None,  # the only one that it sees; None leaves the choice to the environment
    # GPUs of a prefill and a decode server behind a proxy, none for a CPU
    apart: list[str] | None = None,
    front_end: str = "",  # vLLM's program in Rust, for the variants that take it
    tree: Path | None = None,  # another version of this repository, for the variant that takes it
) -> Server:
    """Starts the server of a variant without waiting for it; all else is equal between them.

    `ours` captures, and so does `before`, of another `tree`; `recorded` also writes the routing to
    files beside its log, with `input` requests may say experts, `off` does nothing of this; `vllm`
    is vLLM's own command with its own capture, and `rust` and `rust_off` are it behind vLLM's front
    end in Rust with ours, and without.
    """
    own = launch_of(variant, model, log, front_end)
    env = {**os.environ, **own.env}
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    program = own.program
    if apart is not None:
        devices = ["--devices", *apart] if apart else []
        program = [sys.executable, "examples/prefill_decode.py", str(model), *devices]
    port = free_port(1 if apart is None else 3)
    address = ["--host", "127.0.0.1", "--port", str(port)]
    counts = ["--api-server-count", str(api_servers)]  # or ours would choose
    command = [*program, "--served-model-name", MODEL_NAME, *address, *counts, *flags, *own.flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env | (path_of(tree) if tree else {}),
            cwd=tree,
        )
    return Server(
        process,
        port,
        log,
        api_servers,
        apart=apart is not None,
        front_end=front_end if variant in BEHIND_RUST else "",
    )


class Launch(NamedTuple):
    """What of a server's command is its variant's."""

    program: list[str]
    flags: list[str]
    env: dict[str, str]  # besides that of this process


def launch_of(variant: str, model: Path, log: Path, front_end: str) -> Launch:
    """Of the variants that `start` explains."""
    ours = [sys.executable, "-m", "routed_experts.server.cli", "serve", str(model)]
    vllms = [sys.executable, "-m", "bench.vllm_command", "serve", str(model)]
    behind_rust = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": front_end}
    match variant:
        case "off":
            return Launch(ours, ["--no-enable-return-routed-experts"], {})
        case "recorded":
            return Launch(ours, ["--routed-experts-record", str(log.with_suffix(".files"))], {})
        case "input":
            return Launch(ours, [INPUT_FLAG], {})
        case "vllm":
            # without plugins, so that nothing of ours is in these processes
            return Launch(vllms, ["--enable-return-routed-experts"], {"VLLM_PLUGINS": ""})
        case "rust":
            return Launch(vllms, ["--enable-return-routed-experts"], behind_rust)
        case "rust_off":
            return Launch(vllms, [], behind_rust)
        case _:
            return Launch(ours, [], {})


def path_of(tree: Path) -> dict[str, str]:
    """The environment in which Python finds the package of another version of this repository."""
    tree = tree.resolve()  # the server runs in another folder than this process
    links = tree / ".link"
    subprocess.run([sys.executable, "bench/link_package.py", links.name], cwd=tree, check=True)
    # `bench` too is that version's, for the engine that is played.
    before = [str(links), str(tree), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, before))}


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, user and system, in seconds; what /proc has, in nanoseconds instead of
    ticks of 10 ms."""
    return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED of that process


def _session(leader: int) -> dict[int, int]:
    """The processes of a session that are still running, and the parent of each."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, parent, _, session = (
                    Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:4]
                )
            except (OSError, ValueError):
                continue
            if int(session) == leader and state != "Z":
                parents[int(entry)] = int(parent)
    return parents


def _command(pid: int) -> bytes:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return b""


def free_port(count: int = 1) -> int:
    """A port of this machine that nothing listens on, nor on those right behind it, `count` in all.

    The system gives none of them to a client before a server has started. The tests' servers have
    other ones.
    """
    while True:
        port = random.SystemRandom().randrange(30_000, 32_700)
        with ExitStack() as bound, suppress(OSError):
            for offset in range(count):
                bound.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            return port
