"""Commands that cannot do what they should: one sentence and an exit status, no traceback."""

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import vllm.entrypoints.cli.serve as vllms_command

from tests.server.test_cli import Words, words_for

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


@pytest.fixture(scope="module")
def words(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Words:
    return words_for(tiny_model, tmp_path_factory.mktemp("files"))


COMMAND = "export FILES/answer -o FILES/out.npz"


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
