"""Commands that cannot do what they should: one sentence and an exit status, no traceback."""

import ast
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
import torch
import vllm.entrypoints.cli.serve as vllms_command
from vllm.envs import disable_envs_cache

from routed_experts.server.cli.main import main
from tests.clients.test_compare import G, P, answer_of
from tests.e2e.harness import free_port

pytestmark = pytest.mark.e2e

PROGRAM = "routed_experts.server.cli"


@contextmanager
def started(*argv: str, options: tuple[str, ...] = (), **streams: int) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, *options, "-m", PROGRAM, *argv],
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        # Shells have what they run in the background ignore interrupts, and these tests may be that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},  # type: ignore[arg-type]
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


Words = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def words(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Words:
    """The words of a command. FILES has an answer that a router could have given, one of unknown rows, and nothing."""
    folder = tmp_path_factory.mktemp("files")
    rows = np.random.default_rng(0).random((P + G - 1, 5, 16)).argsort(axis=2)[:, :, :4].astype(np.int16)
    (folder / "answer").write_text(json.dumps(answer_of(rows)))
    (folder / "unknown").write_text(json.dumps(answer_of(np.full_like(rows, -1))))
    (folder / "empty").touch()
    (folder / "binary").write_bytes(b"\x93NUMPY\x00\xff")
    names = {"FILES": str(folder), "MODEL": str(tiny_model), "PORT": str(free_port())}
    return lambda command: re.sub("|".join(names), lambda name: names[name[0]], command).split()


COMMAND = "export FILES/answer -o FILES/out.npz"
COMPARE = "compare MODEL --answers FILES/answer"
NO_CUDA = "--device cuda cannot be used"
NO_TEMPLATE = "serve MODEL --port PORT --chat-template /nowhere.jinja"
REAL = ["export FILES/none -o FILES/out.npz", "compare MODEL --answers FILES/unknown", NO_TEMPLATE]
"""These run as processes too, one for each set of libraries that a command loads."""


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("export FILES/none -o FILES/out.npz", "none cannot be read: No such file"),
        ("export FILES/empty -o FILES/out.npz", "empty has no responses"),
        ("export FILES/answer - -o FILES/out.npz", "standard input has no responses"),
        ("export FILES/binary -o FILES/out.npz", "binary cannot be read: it is not UTF-8 text"),
        ("view FILES/none --no-browser", "none cannot be read: No such file"),
        ("view FILES/answer --port 99999 --no-browser", "Port 99999 cannot be used"),
        ("export -o FILES/out.csv --url 127.0.0.1:PORT --prompts FILES/empty", "empty has no prompts: write one per"),
        ("export -o FILES/out.csv --url 127.0.0.1:PORT --prompts FILES/none", "none cannot be read: No such file"),
        ("tiny-model FILES/empty", "File exists"),
        ("compare /nowhere/model --answers FILES/answer", "/nowhere/model is neither a local folder nor a name"),
        ("compare FILES --answers FILES/answer", "key in its config.json"),
        ("compare some/model --answers FILES/answer", "the Hugging Face hub cannot be reached"),
        ("compare MODEL --answers FILES/unknown", "Nothing to compare"),
        (f"{COMPARE} --device nonsense", "--device nonsense cannot be used"),
        pytest.param(
            f"{COMPARE} --device cuda", NO_CUDA, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU")
        ),
        ("compare some/model --answers FILES/answer --json /proc/none", "--json /proc/none cannot be written"),
        ("compare MODEL --url 127.0.0.1:PORT", " cannot be reached: "),
        ("compare MODEL --url ftp://host", "is not the URL of a server"),
        ("serve /nowhere/model --port PORT", "/nowhere/model is neither a local folder nor a name"),
        ("serve some/model --port PORT", "the Hugging Face hub cannot be reached"),
        (NO_TEMPLATE, "/nowhere.jinja"),
        ("serve MODEL --port PORT --grpc", "--grpc chooses a front end of vLLM that cannot return routed experts"),
    ],
)
def test_an_error_is_one_sentence(
    words: Words, command: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr(logging, "raiseExceptions", False)  # vLLM's handler keeps the output of the test before
    monkeypatch.setenv("VLLM_PLUGINS", "")  # so that it is put back as it was
    if command in REAL:
        with started(*words(command)) as process:
            out, err = process.communicate(timeout=300)
        status = process.returncode
    else:
        status = main(words(command))
        out, err = capsys.readouterr()
    assert (status, "Traceback" in out + err) == (2, False), err
    assert sentence in next(line for line in reversed(err.splitlines()) if line.startswith("routed-experts: "))


def test_h2_the_front_end_in_rust_is_refused(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """H2. It takes the port from the process that has the self-test and our routes."""
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    monkeypatch.setenv("VLLM_RUST_FRONTEND_PATH", "/bin/true")
    disable_envs_cache()  # what a server before keeps
    for flags in ([], ["--no-enable-return-routed-experts"]):
        assert main(["serve", str(tiny_model), *flags]) == 2
        assert "VLLM_USE_RUST_FRONTEND chooses a front end of vLLM that cannot" in capsys.readouterr().err


def test_h2_vllms_command_has_no_other_front_ends() -> None:
    """H2. What can have the port is the server in Python, which tests itself, or one of those that are refused."""
    tree = ast.parse(Path(vllms_command.__file__).read_text())
    called = {getattr(node.func, "id", "") for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = {name for name in called if re.match("(run|serve)_|.*ProcessManager$", name)}
    in_python = {"run_dp_supervisor", "run_headless", "run_multi_api_server", "run_server", "APIServerProcessManager"}
    engines = {"CoreEngineProcManager"}
    assert names - engines - in_python == {"serve_grpc", "RustFrontendProcessManager"}


def test_a_reader_that_leaves(words: Words) -> None:
    read, write = os.pipe()
    os.close(read)
    with started(*words(COMMAND), stdout=write) as process:
        os.close(write)
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (141, "")


def test_a_disk_that_is_full(words: Words) -> None:
    with open("/dev/full", "w") as full, started(*words(COMMAND), stdout=full.fileno()) as process:
        _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err.endswith("No space left on device.\n"), err


@pytest.mark.parametrize(
    ("command", "module"),
    [  # `serve` stops with 0, as for any Ctrl-C
        ("export - -o FILES/out.npz", "numpy._core.multiarray"),
        ("view FILES/answer --no-browser", "numpy"),
        ("tiny-model FILES/model", "torch.nn"),
        ("compare MODEL --answers FILES/answer", "transformers.modeling_utils"),
        ("serve MODEL --port PORT", "vllm.config"),
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


def test_an_interrupt_while_a_server_is_asked(tiny_model: Path) -> None:
    asked, over = Event(), Event()

    class Silent(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            over.wait(300)

    with HTTPServer(("127.0.0.1", 0), Silent) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with started("compare", str(tiny_model), "--url", f"127.0.0.1:{server.server_port}") as process:
            assert asked.wait(300)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=300)
        over.set()
        server.shutdown()
    assert (process.returncode, out, "Traceback" in err) == (130, "", False)
