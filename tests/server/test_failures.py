"""Commands that cannot do what they should: one sentence and an exit status, no traceback."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import vllm.entrypoints.cli.serve as vllms_command

from tests.server.test_cli import Words, words_for

pytestmark = pytest.mark.e2e

PROGRAM = "routed_experts.server.cli"


def _ignore_no_signal() -> None:
    """Shells have what they run in the background ignore interrupts, and nohup hang-ups; these tests
    may be that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def started(
    *argv: str, options: tuple[str, ...] = (), **streams: int
) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, *options, "-m", PROGRAM, *argv],
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        preexec_fn=_ignore_no_signal,
        **{
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **streams,
        },  # type: ignore[arg-type]
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def words(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Words:
    return words_for(tiny_model, tmp_path_factory.mktemp("files"))


rare = partial(pytest.param, marks=pytest.mark.release)
"""Commands that import torch first."""


def test_vllms_command_has_no_other_front_ends() -> None:
    """What can have the port is the server in Python, which tests itself, or one of those that
    are refused."""
    tree = ast.parse(Path(vllms_command.__file__).read_text())
    called = {getattr(node.func, "id", "") for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = {name for name in called if re.match("(run|serve)_|.*ProcessManager$", name)}
    in_python = {
        "run_dp_supervisor",
        "run_headless",
        "run_multi_api_server",
        "run_server",
        "APIServerProcessManager",
    }
    engines = {"CoreEngineProcManager"}
    assert names - engines - in_python == {"serve_grpc", "RustFrontendProcessManager"}


@pytest.mark.parametrize(
    ("command", "module"),
    [  # `serve` stops with 0, as for any Ctrl-C
        ("export - -o FILES/out.npz", "numpy._core.multiarray"),
        ("view FILES/answer --no-browser", "numpy"),
        rare("compare MODEL --answers FILES/answer", "transformers.modeling_utils"),
        rare("serve MODEL --port PORT", "vllm.config"),
    ],
)
def test_an_interrupt_while_imports_run(words: Words, command: str, module: str) -> None:
    with started(*words(command), options=("-X", "importtime"), stdin=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rpartition("|")[2].strip() == module:
                process.send_signal(signal.SIGINT)
                break
        said = [line for line in process.stderr if not line.startswith("import time:")]
        status = 0 if command.startswith("serve") else 130
        assert (process.wait(300), [line for line in said if "Traceback" in line]) == (status, [])


# ---- Ctrl-C ----


class SlowServer(ThreadingHTTPServer):
    """Says what it is, like ours, and gives no other answer before it ends, but may refuse a
    prompt."""

    daemon_threads = True

    def __init__(self, refuses: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _SlowHandler)
        self.refuses = refuses
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _SlowHandler(BaseHTTPRequestHandler):
    server: SlowServer

    def do_GET(self) -> None:
        self._answer(
            200,
            {
                "model": "m",
                "num_layers": 5,
                "top_k": 4,
                "num_experts": 16,
                "layer_ids": [1, 2, 3, 4, 5],
            },
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "prompt" not in body:  # whether it has a tokenizer
            self._answer(200, {"texts": []})
            return
        self.server.is_asked.set()
        if body["prompt"] == self.server.refuses:
            self._answer(400, {"error": {"message": "no"}})
        else:
            self.server.may_answer.wait()

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@contextmanager
def slow_server(refuses: str = "") -> Iterator[SlowServer]:
    with SlowServer(refuses) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.may_answer.set()
        server.shutdown()


def ended(
    process: "subprocess.Popen[str]", number: signal.Signals = signal.SIGINT
) -> tuple[int, str]:
    """The exit status of a command that waits, after a signal, and what it says on standard error.

    Python looks for a signal before it reads, but not in one step with it: one that comes between
    the two waits until the read ends, or until a user sends another.
    """
    wait_until_it_waits(process.pid)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    return process.returncode, err


def wait_until_it_waits(pid: int) -> None:
    """Until the process has slept from one look to the next."""
    before, status = "", Path(f"/proc/{pid}/status")
    while (now := status.read_text()) != before or "State:\tS" not in now:
        before = now
        time.sleep(0.05)


@pytest.mark.parametrize(
    "command",
    ["export -o FILES/out.npz --prompts FILES/prompts --url", rare("compare MODEL --url")],
)
def test_ctrl_c_does_not_wait_for_requests_that_run(words: Words, command: str) -> None:
    (file,) = words("FILES/prompts")
    Path(file).write_text("one\ntwo\n")
    with slow_server() as server, started(*words(command), server.url) as process:
        assert server.is_asked.wait(300)
        assert ended(process) == (130, "routed-experts: interrupted.\n")
        assert not server.may_answer.is_set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_part_of_a_file(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "prompts").write_text("one\n")
    out = tmp_path / "out"
    out.mkdir()
    command = ["export", "--prompts", f"{tmp_path}/prompts", "-o", f"{out}/experts.npz", "--url"]
    with slow_server() as server, started(*command, server.url) as process:
        assert server.is_asked.wait(300), "the part is there before the first request"
        assert len(list(out.iterdir())) == 1
        assert ended(process, number) == (128 + number, "routed-experts: interrupted.\n")
    assert list(out.iterdir()) == []


def test_a_command_that_is_to_outlive_its_terminal_does() -> None:
    program = "import signal; from routed_experts.server.cli.signals import end_on_signals; "
    program += "signal.signal(signal.SIGHUP, signal.SIG_IGN); end_on_signals(); "
    program += "signal.raise_signal(signal.SIGHUP)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=300).returncode == 0


def test_a_refused_prompt_does_not_wait_for_requests_that_run(words: Words) -> None:
    file, out = words("FILES/prompts FILES/out.npz")
    Path(file).write_text("refused\nanother\n")
    with slow_server(refuses="refused") as server:
        with started("export", "--url", server.url, "--prompts", file, "-o", out) as process:
            _, said = process.communicate(timeout=300)
        assert not server.may_answer.is_set()
    assert process.returncode == 2
    assert "line 1: the server returned status 400" in said


def test_ctrl_c_while_standard_input_is_read(words: Words) -> None:
    answer = Path(words("FILES/answer")[0]).read_bytes()
    read, write = os.pipe()
    with (
        started(*words("export - -o FILES/out.npz"), stdin=read) as process,
        os.fdopen(write, "wb", 0) as pipe,
    ):
        os.close(read)
        for _ in range(1000):  # more than a pipe holds: the command has read the first of them
            pipe.write(answer)
        assert ended(process) == (130, "routed-experts: interrupted.\n")


def test_ctrl_c_is_how_view_ends(words: Words) -> None:
    with started(*words("view FILES/answer --no-browser")) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Showing ")
        assert ended(process) == (0, "")
