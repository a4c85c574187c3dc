"""The process that the tests fork programs from: it has imported what takes a program ten seconds.

    python -m tests.fork_server SOCKET PID

`tests/programs.py` starts it and asks it. A request is a message of JSON (`arguments` of Python,
`env` and `cwd`) with two file descriptors: standard output and standard error. The answer is a
message with the program's process id and, once it has ended, one with its exit status. A program
whose client is gone is killed with its process group, and this process ends with that of PID.
"""

import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import context
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

MODULES = (
    "routed_experts.capture.scheduler.scheduler",
    "routed_experts.capture.worker.worker",
    "routed_experts.server.cli.main",
    "routed_experts.server.cli.serve",
    "routed_experts.server.http.process.plugin",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)
"""What a server for the tiny model imports. One that a version of vLLM does not have is imported by
the programs."""
MAX_REQUEST_BYTES = 1 << 20
READY = "ready"
"""What it prints when it can be asked."""


class Program(NamedTuple):
    """One that runs: its process, and who asked for it."""

    pid: int
    pidfd: int
    client: socket.socket


def main(path: str, tests: int) -> None:
    ended = os.pidfd_open(tests)
    for name in MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        sys.exit(f"{threads} threads run after the imports: a fork would have one of them")
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen(64)
        print(READY, flush=True)
        Forks(listening).run(until=ended)


class Forks:
    def __init__(self, listening: socket.socket) -> None:
        self.listening = listening
        self.programs: dict[int, Program] = {}  # by both of its descriptors
        self.poll = select.poll()
        self.poll.register(listening, select.POLLIN)

    def run(self, until: int) -> None:
        """Until a descriptor says something."""
        self.poll.register(until, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in self.poll.poll()}
            for descriptor in ready:
                if program := self.programs.get(descriptor):
                    self.end(program, is_client_gone=descriptor == program.client.fileno())
            if until in ready:
                return self.end_all()
            if self.listening.fileno() in ready:  # the last, as it takes numbers that became free
                self.start()

    def start(self) -> None:
        client, _ = self.listening.accept()
        content, descriptors, _, _ = socket.recv_fds(client, MAX_REQUEST_BYTES, 2)
        pid = os.fork()
        if pid == 0:
            self.close()
            client.close()
            run_program(descriptors, **json.loads(content))
        for descriptor in descriptors:
            os.close(descriptor)
        program = Program(pid, os.pidfd_open(pid), client)
        for descriptor in (program.pidfd, client.fileno()):
            self.programs[descriptor] = program
            self.poll.register(descriptor, select.POLLIN)
        tell(client, pid)

    def end_all(self) -> None:
        for program in {*self.programs.values()}:
            self.end(program, is_client_gone=True)

    def end(self, program: Program, is_client_gone: bool) -> None:
        if is_client_gone:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
        _, status = os.waitpid(program.pid, 0)
        tell(program.client, os.waitstatus_to_exitcode(status))
        for descriptor in (program.pidfd, program.client.fileno()):
            del self.programs[descriptor]
            self.poll.unregister(descriptor)
        os.close(program.pidfd)
        program.client.close()

    def close(self) -> None:
        """What a fork has of this process, and must not keep open."""
        self.listening.close()
        for program in {*self.programs.values()}:
            os.close(program.pidfd)
            program.client.close()


def tell(client: socket.socket, number: int) -> None:
    with suppress(OSError):  # it is gone
        client.send(str(number).encode())


def run_program(
    outputs: Sequence[int], arguments: list[str], env: dict[str, str], cwd: str
) -> NoReturn:
    """What `python` does with these arguments, in a session of its own."""
    status: Any = 1
    try:
        os.setsid()
        with open(os.devnull) as nothing:
            for descriptor, source in enumerate((nothing.fileno(), *outputs)):
                os.dup2(source, descriptor)
        for source in outputs:
            os.close(source)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        forget_what_imports_decided()
        execute(arguments)
        status = 0
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except BaseException:  # noqa: BLE001 the last to see it
        traceback.print_exc()
    finally:
        end_process(status)


def forget_what_imports_decided() -> None:
    """What would be otherwise in a process that begins with this environment."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if envs := sys.modules.get("vllm.envs"):
        getattr(envs, "disable_envs_cache", lambda: None)()
    # Processes of this one are its forks, too. vLLM asks for others, which would import all anew.
    contexts: dict[str, Any] = context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]
    if registry := sys.modules.get("vllm.model_executor.models.registry"):
        # which would import all anew to look at a model's class
        registry._run_in_subprocess = lambda function: function()
    values = sys.modules.get("prometheus_client.values")
    if values is not None:
        # Whether processes share their numbers: vLLM sets the variable before it forks.
        os.register_at_fork(
            after_in_child=lambda: setattr(values, "ValueClass", values.get_value_class())
        )


def execute(arguments: list[str]) -> None:
    """As Python does: `-m MODULE`, `-c CODE` or a file, each with arguments of its own."""
    kind, *rest = arguments
    program = sys.modules["__main__"] = ModuleType("__main__")
    program.__dict__["__builtins__"] = __builtins__
    if kind == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = rest
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), program.__dict__)
    else:
        sys.path[0] = str(Path(kind).resolve().parent)
        sys.argv = arguments
        program.__file__ = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), program.__dict__)


def end_process(status: Any) -> NoReturn:
    """As the interpreter ends, but for what it would free."""
    code = status if isinstance(status, int) else 0 if status is None else 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 the last to see it
        traceback.print_exc()
        code = code or 120
    finally:
        os._exit(code & 0xFF)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
