"""The command line: what commands say, the sentence that ends one that cannot run, and what `serve`
fills in.

Real processes are in `test_failures.py`, and servers that stop in `tests/e2e/test_stopping.py`.
"""

import argparse
import io
import json
import logging
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.envs import disable_envs_cache

from routed_experts.capture import SCHEDULER, WORKERS
from routed_experts.capture.engine import versions
from routed_experts.server import PLUGIN_GROUP, PLUGIN_NAME
from routed_experts.server.cli import main, serve
from routed_experts.server.cli.console import CommandError
from routed_experts.server.http.process.selftest import SelfTestError
from tests.clients.test_compare import G, P, answer_of
from tests.e2e.harness import free_port

VERSION = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
    "version"
]
Words = Callable[[str], list[str]]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Is put back as it was, whatever a test or vLLM's command sets it to."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for name in ("VLLM_PLUGINS", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    # vLLM's handler keeps the output of the test before
    monkeypatch.setattr(logging, "raiseExceptions", False)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def words_for(tiny_model: Path, folder: Path) -> Words:
    """The words of a command. FILES has answers that a router could have given, no text, and
    nothing."""
    rows = (
        np.random.default_rng(0)
        .random((P + G - 1, 5, 16))
        .argsort(axis=2)[:, :, :4]
        .astype(np.int16)
    )
    (folder / "answer").write_text(f"{json.dumps(answer_of(rows))}\n" * 2)
    (folder / "empty").touch()
    (folder / "latin").write_bytes(b"\xe9\xff")
    names = {"FILES": str(folder), "MODEL": str(tiny_model), "PORT": str(free_port())}
    return lambda command: [
        re.sub("|".join(names), lambda name: names[name[0]], word) for word in command.split()
    ]


@pytest.fixture(scope="module")
def words(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Words:
    return words_for(tiny_model, tmp_path_factory.mktemp("files"))


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int | str | None, str, str]:
    try:
        code: int | str | None = main.main([*argv])
    except SystemExit as left:
        code = left.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one sentence that a command ends in."""
    status, out, err = run(capsys, *argv)
    assert (status, "Traceback" in out + err) == (2, False), err
    sentence = next(
        line for line in reversed(err.splitlines()) if line.startswith("routed-experts")
    )
    return sentence.removeprefix("routed-experts: ")


# ---- what commands say ----


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        *((command, 0, list(main.COMMANDS)) for command in ("", "-h", "--help")),
        ("--version", 0, [f"routed-experts-server {VERSION}\n"]),
        ("sreve model", 2, ["invalid choice: 'sreve'", "usage: routed-experts"]),
        ("tiny-model", 2, ["required: DIR"]),
        ("tiny-model a b", 2, ["unrecognized arguments: b"]),
    ],
)
def test_what_is_said(
    capsys: pytest.CaptureFixture[str], command: str, status: int, said: list[str]
) -> None:
    code, *streams = run(capsys, *command.split())
    assert code == status
    assert streams[0 if status else 1] == ""
    text = streams[1 if status else 0]
    assert [words for words in said if words not in text] == []
    assert len(text.splitlines()) < 24, "more than a screen with its prompt"
    assert status or max(map(len, text.splitlines())) <= 80


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["python", "sreve"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("routed_experts.server.cli", run_name="__main__")
    assert left.value.code == 2


def test_help_is_of_this_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = run(capsys, "serve", "--help")
    assert code == 0
    ours, _, vllms = said.partition("Config Groups:")
    for text in ("routed-experts serve [MODEL] [options]", "a tiny model is created and served"):
        assert text in ours
    assert vllms.split()[:2] == ["routed", "experts"], "vLLM's groups come first"
    for text in ("Qwen/Qwen3-0.6B", "vllm serve --help", "(default: None)", "(default: 1 GiB) ("):
        assert text not in said
    check_flags(said)
    check_flags(run(capsys, "serve", "--help=all")[1])


def check_flags(said: str) -> None:
    """Ours come first and once, switches with their defaults."""
    entries = re.findall(r"^  (--\S+)(.*?)(?=^  -|^\S)", said, re.MULTILINE | re.DOTALL)
    ours = [serve.flag_of(name) for name in serve.HELP]
    assert sorted(flag.rstrip(",") for flag, _ in entries[: len(ours)]) == sorted(ours)
    assert not set(ours) & {flag.rstrip(",") for flag, _ in entries[len(ours) :]}
    for flag, help_text in entries[: len(ours)]:
        is_switch = flag.endswith(",")  # and its --no-…
        assert help_text.count("(default") in ((1,) if is_switch else (0, 1)), flag


# ---- the sentence that ends a command ----

COMPARE = "compare MODEL --answers FILES/answer"
NOT_PATH = "Path does not derive from vLLM's"
SERVE = "serve MODEL --port PORT"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("serve /tmp", "local directory specified: '/tmp'."),  # has no checkpoint, as vLLM says
        ("serve some/model", "Cannot find an appropriate cached snapshot"),
        ("serve --served-model-name mine", "`model` should be provided"),
        ("serve MODEL --port 70000", "cannot listen on port 70000: bind(): port must be 0-65535."),
        (
            f"{SERVE} --host 203.0.113.9",
            "of --host 203.0.113.9: [Errno 99] Cannot assign requested",
        ),
        (
            f"{SERVE} --tensor-parallel-size 3",
            "Total number of attention heads (4) must be divisible by tensor para",
        ),
        (
            f"{SERVE} --tensor-parallel-size 0",
            "tensor_parallel_size: Input should be greater than or equal to 1.",
        ),
        (
            f"{SERVE} --kv-sharing-fast-prefill",
            "Fast prefill skips layers for prompt tokens: remove --kv-sharing-f",
        ),
        (f"{SERVE} --config /nonexistent.yaml", "/nonexistent.yaml"),
        (f"{SERVE} --no-such-flag", "unrecognized arguments: --no-such-flag"),
        (
            f"{SERVE} --routed-experts-store /proc/none",
            "--routed-experts-store: /proc/none cannot be used: ",
        ),
        (
            f"{SERVE} --routed-experts-record /proc/none",
            "--routed-experts-record: /proc/none cannot be used: ",
        ),
        (
            f"{SERVE} --routed-experts-default []",
            "routed_experts_default must be a JSON object with routing fields, ",
        ),
        (f"{SERVE} --worker-cls their.Class", "their.Class cannot be imported"),
        *((f"{SERVE} --{role}-cls pathlib.Path", NOT_PATH) for role in ("worker", "scheduler")),
        (f"{SERVE} --grpc", "--grpc chooses a front end of vLLM that cannot return routed experts"),
        ("export FILES/empty -o FILES/out.npz", "empty has no responses"),
        ("export FILES/answer - -o FILES/out.npz", "standard input has no responses"),
        ("export FILES/latin -o FILES/out.npz", "latin cannot be read: it is not UTF-8 text"),
        ("view FILES/none --no-browser", "none cannot be read: No such file"),
        ("view FILES/answer --port 99999 --no-browser", "Port 99999 cannot be used"),
        (
            "export -o FILES/out.npz --url 127.0.0.1:PORT --prompts FILES/empty",
            "empty has no prompts: write one per",
        ),
        ("tiny-model FILES/empty", "File exists"),
        ("compare FILES --answers FILES/answer", "key in its config.json"),
        (
            "compare some/model --answers FILES/answer",
            "We couldn't connect to 'https://huggingface.co'",
        ),
        (f"{COMPARE} --device nonsense", "--device nonsense cannot be used"),
        (
            "compare some/model --answers FILES/answer --json /proc/none",
            "--json /proc/none cannot be written",
        ),
        ("compare MODEL --url 127.0.0.1:PORT", " Connection refused; does a server run there?"),
        ("compare MODEL --url ftp://host", "is not the URL of a server"),
    ],
)
def test_an_error_is_one_sentence(
    words: Words, command: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        () if "port" in command or not command.startswith("serve") else ("--port", str(free_port()))
    )
    said = refused(capsys, *words(command), *flags)
    assert sentence in said
    assert sentence != NOT_PATH or said.endswith(
        "--no-enable-return-routed-experts serves without the capture."
    )


def test_another_server_is_told_from_ours(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        (thread := threading.Thread(target=other.serve_forever)).start()
        (tmp_path / "prompts.txt").write_text("Hi")
        url = f"http://127.0.0.1:{other.server_port}"
        command = ["export", "--url", url, "--prompts", str(tmp_path / "prompts.txt")]
        said = refused(capsys, *command, "-o", str(tmp_path / "out.npz"))
        other.shutdown()
        thread.join()
    assert said.startswith(f"{url}: the server returned status 404: ")
    assert said.endswith("; is it a routed-experts server?")


@pytest.mark.parametrize(
    "flag",
    [
        "--routed-experts-record f",
        "--enable-return-routed-expert-weights",
        '--routed-experts-default {"return_routed_experts":true}',
    ],
)
def test_what_needs_the_capture(
    capsys: pytest.CaptureFixture[str], words: Words, flag: str
) -> None:
    said = refused(capsys, *words(f"{SERVE} --no-enable-return-routed-experts {flag}"))
    assert said == f"{flag.split()[0]} needs the capture: remove --no-enable-return-routed-experts."


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    """Several API processes of vLLM would share it with another server that shares it."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(("0.0.0.0", 0))
        listening.listen()
        port = str(listening.getsockname()[1])
        said = refused(capsys, "serve", str(tiny_model), "--port", port)
        assert said == (
            f"The server cannot listen on port {port}: [Errno 98] Address already in use."
        )


def test_the_front_end_in_rust_is_refused(
    words: Words, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the port from the process that has the self-test and our routes."""
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    monkeypatch.setenv("VLLM_RUST_FRONTEND_PATH", "/bin/true")
    disable_envs_cache()  # what a server before keeps
    for flags in ("", " --no-enable-return-routed-experts"):
        said = refused(capsys, *words(f"{SERVE}{flags}"))
        assert said.startswith("VLLM_USE_RUST_FRONTEND chooses a front end of vLLM that passes")
        assert "vllm serve --enable-return-routed-experts" in said


def test_a_start_that_fails(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test runs in the server's start, below vLLM's command."""
    monkeypatch.setattr(serve.ServeSubcommand, "validate", lambda self, args: None)
    args = serve.parse([str(tiny_model)])
    for error, sentence in (
        (SelfTestError("The self-test got no routing."), "The self-test got no routing."),
        (OSError("no tokenizer"), "The server cannot run: no tokenizer."),
    ):
        cmd = Mock(side_effect=error)
        monkeypatch.setattr(serve.ServeSubcommand, "cmd", staticmethod(cmd))
        with pytest.raises(CommandError) as raised:
            serve.run(args)
        assert str(raised.value) == sentence


# ---- versions ----


def test_another_vllm_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions.vllm, "__version__", "0.1.0")
    assert "but vLLM 0.1.0 is installed: install" in refused(capsys, "serve", "model")


# ---- plugins ----

OURS = EntryPoint(PLUGIN_NAME, "routed_experts.server.http.process.entry_point:make", PLUGIN_GROUP)
GROUPS = ("endpoint_plugins", "general_plugins", "platform_plugins")
OTHERS = [EntryPoint(group.partition("_")[0], "a:b", f"vllm.{group}") for group in GROUPS]
OTHERS.append(EntryPoint("console", "a:b", "console_scripts"))


def allowed(
    monkeypatch: pytest.MonkeyPatch, plugins: str | None, installed: list[EntryPoint]
) -> str:
    monkeypatch.setattr(
        serve, "entry_points", lambda **params: EntryPoints(installed).select(**params)
    )
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    serve.allow_plugin()
    return os.environ["VLLM_PLUGINS"]


@pytest.mark.parametrize(
    ("plugins", "installed", "expected"),
    [
        (None, [], PLUGIN_NAME),
        ("", [], PLUGIN_NAME),
        ("lora_filesystem_resolver,mine", [], f"lora_filesystem_resolver,mine,{PLUGIN_NAME}"),
        (f"{PLUGIN_NAME},mine", OTHERS, f"mine,{PLUGIN_NAME}"),
        # The variable filters every group, where it is set; endpoint plugins load only if they are
        # named.
        (None, OTHERS, f"general,platform,{PLUGIN_NAME}"),
    ],
)
def test_the_users_plugins_stay(
    monkeypatch: pytest.MonkeyPatch, plugins: str | None, installed: list[EntryPoint], expected: str
) -> None:
    assert allowed(monkeypatch, plugins, [OURS, *installed]) == expected
    assert allowed(monkeypatch, None, [OURS]) == expected  # a second time


@pytest.mark.parametrize(
    "target", [None, "no_such_module:Plugin", "http.entry_point:no_such_factory"]
)
def test_a_plugin_that_vllm_would_serve_without(
    monkeypatch: pytest.MonkeyPatch, target: str | None
) -> None:
    installed = (
        [EntryPoint(PLUGIN_NAME, f"routed_experts.server.{target}", PLUGIN_GROUP)] if target else []
    )
    with pytest.raises(CommandError, match="The package is not installed properly"):
        allowed(monkeypatch, None, installed)


# ---- the arguments of vLLM ----


def configured(*argv: str, model: object = "model") -> argparse.Namespace:
    args = serve.parse([str(model), *argv])
    serve.configure(args)
    return args


@pytest.mark.parametrize(
    ("flags", "captures"),
    [
        *((flags, True) for flags in ("", "--worker-cls auto", f"--worker-cls {WORKERS['cpu']}")),
        ("--enable-return-routed-experts", True),
        ("--no-enable-return-routed-experts", False),
    ],
)
def test_worker_and_scheduler_are_filled_in(flags: str, captures: bool) -> None:
    """The flag of vLLM's own capture, which stays off, switches ours."""
    args = configured(*flags.split())
    assert (args.worker_cls in WORKERS.values(), args.scheduler_cls == SCHEDULER) == (
        captures,
        captures,
    )
    assert args.enable_return_routed_experts is False


@pytest.mark.parametrize(
    "flags",
    [
        "-dp 2 --data-parallel-size-local 1 --data-parallel-start-rank 1",
        "-tp 2 --nnodes 2 --node-rank 1 --master-addr 127.0.0.1",
    ],
)
def test_a_headless_node_has_them_too(tiny_model: Path, flags: str) -> None:
    """What vLLM starts there, it makes of the same arguments."""
    args = configured("--headless", "--dtype", "float32", *flags.split(), model=tiny_model)
    parallel = (
        AsyncEngineArgs.from_cli_args(args).create_engine_config(headless=True).parallel_config
    )
    assert (parallel.data_parallel_rank or parallel.node_rank) == 1
    assert parallel.worker_cls in WORKERS.values()
    assert args.scheduler_cls == SCHEDULER


def test_the_tiny_model_is_served_by_its_name(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args = serve.parse([])
    assert args.model_tag is None
    serve.use_tiny_model(args, tiny_model)
    assert args.model == args.model_tag == str(tiny_model)
    assert (args.served_model_name, args.dtype) == (["tiny-moe"], "float32")
    parsed = serve.parse(["--dtype", "bfloat16", "--kv-cache-memory-bytes", "123456"])
    serve.use_tiny_model(parsed, tiny_model)
    assert (parsed.dtype, parsed.kv_cache_memory_bytes) == ("bfloat16", 123456)
    assert args.enable_return_routed_expert_weights
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert serve.tiny_model_dir() == tmp_path / "routed-experts" / "tiny-moe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert serve.tiny_model_dir() == tmp_path / ".cache" / "routed-experts" / "tiny-moe"


@pytest.mark.parametrize(
    ("flags", "has_weights"),
    [
        ([], True),
        (["--no-enable-return-routed-expert-weights"], False),
        (["--additional-config", '{"enable_return_routed_expert_weights": false}'], False),
        (["--no-enable-return-routed-experts"], False),
    ],
)
def test_the_tiny_model_has_weights_unless_a_flag_says_otherwise(
    tiny_model: Path, flags: list[str], has_weights: bool
) -> None:
    args = serve.parse(flags)
    serve.use_tiny_model(args, tiny_model)
    settings = serve.configure(args)
    assert has_weights is (settings is not None and settings.enable_return_routed_expert_weights)


# ---- signals ----


def test_a_program_that_calls_it_keeps_its_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    """Only the command's own process is stopped in the server's way."""
    handler = signal.getsignal(signal.SIGINT)
    assert run(capsys, "serve", "--port", "0", "--worker-cls", "their.Class")[0] == 2
    assert signal.getsignal(signal.SIGINT) == handler
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert "ctrl-c" not in {thread.name for thread in threading.enumerate()}


def test_a_server_that_ends_visits_no_objects() -> None:
    """That took the first process seconds, in which Docker kills it. Nor does it wait for
    Ctrl-C."""
    program = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 1000)); "
    program += "from routed_experts.server.cli.signals import stop_on_signals; stop_on_signals()"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=100).stdout
        == b"True\n"
    )
