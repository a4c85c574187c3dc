"""The command line: what is filled in, and what is refused with a sentence."""

import argparse
import os
import runpy
import signal
import subprocess
import sys
import threading
import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.ray.ray_env import get_env_vars_to_copy

from routed_experts.capture import SCHEDULER, WORKERS
from routed_experts.capture.engine import versions
from routed_experts.capture.engine.kv_transfer import connectors
from routed_experts.server import PLUGIN_GROUP, PLUGIN_NAME
from routed_experts.server.cli import main, serve
from routed_experts.server.cli.console import CommandError

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
OURS = EntryPoint(PLUGIN_NAME, "routed_experts.server.http.entry_point:make", PLUGIN_GROUP)
OTHERS = [
    EntryPoint(group.partition("_")[0], "a:b", f"vllm.{group}")
    for group in ("endpoint_plugins", "general_plugins", "platform_plugins")
] + [EntryPoint("console", "a:b", "console_scripts")]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is put back as it was, whatever a test sets it to."""
    for name in ("VLLM_PLUGINS", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", connectors.ON_LOAD_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv(versions.ALLOW_UNTESTED_VARIABLE, "0")


# ---- the command ----


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int | str | None, str, str]:
    try:
        code: int | str | None = main.main([*argv])
    except SystemExit as left:
        code = left.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        *((argv, 0, list(main.COMMANDS)) for argv in ((), ("-h",), ("--help",))),
        (("--version",), 0, [f"routed-experts-server {PROJECT['version']}\n"]),
        (("sreve", "model"), 2, ["invalid choice: 'sreve'", "usage: routed-experts"]),
        (("tiny-model",), 2, ["required: DIR"]),
        (("tiny-model", "a", "b"), 2, ["unrecognized arguments: b"]),
    ],
)
def test_what_is_said(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], status: int, said: list[str]) -> None:
    code, *streams = run(capsys, *argv)
    assert code == status
    assert streams[0 if status else 1] == ""
    text = streams[1 if status else 0]
    assert [words for words in said if words not in text] == []
    assert len(text.splitlines()) < 30, "more than a screen"


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["python", "sreve"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("routed_experts.server.cli", run_name="__main__")
    assert left.value.code == 2


def test_help_is_of_this_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(versions.ALLOW_UNTESTED_VARIABLE, "1")
    code, said, _ = run(capsys, "serve", "--help")
    assert code == 0
    ours, _, vllms = said.partition("Config Groups:")
    for text in ("routed-experts serve [MODEL] [options]", "a tiny model is created and served"):
        assert text in ours
    assert all(serve.flag_of(name) in ours for name, about in serve.HELP.items() if about)
    assert vllms.split()[:2] == ["routed", "experts"], "vLLM's groups come first"
    for text in ("Qwen/Qwen3-0.6B", "vllm serve --help", "(default: None)", "(default: 1 GiB) ("):
        assert text not in said


@pytest.mark.parametrize("more", [(), ("--no-enable-return-routed-experts",), ("--allow-untested-vllm",)])
def test_another_vllm_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    monkeypatch.setattr(versions.vllm, "__version__", "0.1.0")
    code, _, err = run(capsys, "serve", "model", *more)
    assert (code, "but vLLM 0.1.0 is installed: install" in err) == (2, True)


@pytest.mark.parametrize("others", [None, "MINE"])
def test_an_untested_vllm_is_allowed_in_all_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], others: str | None
) -> None:
    if others is not None:
        monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", others)
    monkeypatch.setattr(versions, "UNTESTED_VLLM", ("9.9.9",))
    monkeypatch.setattr(versions.vllm, "__version__", "9.9.9")
    argv = ("serve", "model", "--port", "0", "--worker-cls", "their.Class")
    assert "or add --allow-untested-vllm" in run(capsys, *argv)[2]
    assert versions.ALLOW_UNTESTED_VARIABLE not in get_env_vars_to_copy()
    code, _, err = run(capsys, *argv, "--allow-untested-vllm")
    assert (code, "their.Class cannot be imported" in err) == (2, True)
    assert os.environ[versions.ALLOW_UNTESTED_VARIABLE] == "1"
    assert {versions.ALLOW_UNTESTED_VARIABLE, *filter(None, [others])} <= get_env_vars_to_copy()


# ---- plugins ----


def allowed(monkeypatch: pytest.MonkeyPatch, given: str | None, installed: list[EntryPoint]) -> str:
    monkeypatch.setattr(serve, "entry_points", lambda **params: EntryPoints(installed).select(**params))
    if given is not None:
        monkeypatch.setenv("VLLM_PLUGINS", given)
    serve.allow_plugin()
    return os.environ["VLLM_PLUGINS"]


@pytest.mark.parametrize(
    ("given", "installed", "expected"),
    [
        (None, [], PLUGIN_NAME),
        ("", [], PLUGIN_NAME),
        ("lora_filesystem_resolver,mine", [], f"lora_filesystem_resolver,mine,{PLUGIN_NAME}"),
        (f"{PLUGIN_NAME},mine", OTHERS, f"mine,{PLUGIN_NAME}"),
        # The variable filters every group, where it is set; endpoint plugins load only if they are named.
        (None, OTHERS, f"general,platform,{PLUGIN_NAME}"),
    ],
)
def test_the_users_plugins_stay(
    monkeypatch: pytest.MonkeyPatch, given: str | None, installed: list[EntryPoint], expected: str
) -> None:
    assert allowed(monkeypatch, given, [OURS, *installed]) == expected
    assert allowed(monkeypatch, None, [OURS]) == expected  # a second time


def test_the_installed_package_registers_the_plugin() -> None:
    serve.allow_plugin()
    assert os.environ["VLLM_PLUGINS"].split(",")[-1] == PLUGIN_NAME


@pytest.mark.parametrize("target", [None, "no_such_module:Plugin", "http.entry_point:no_such_factory"])
def test_a_plugin_that_vllm_would_serve_without(monkeypatch: pytest.MonkeyPatch, target: str | None) -> None:
    installed = [EntryPoint(PLUGIN_NAME, f"routed_experts.server.{target}", PLUGIN_GROUP)] if target else []
    with pytest.raises(CommandError, match="The package is not installed properly"):
        allowed(monkeypatch, None, installed)


# ---- the arguments of vLLM ----


def configured(*argv: str, model: object = "model") -> argparse.Namespace:
    args = serve.parse([str(model), *argv])
    serve.configure(args)
    return args


@pytest.mark.parametrize("argv", [(), ("--worker-cls", "auto"), ("--worker-cls", WORKERS["cpu"])])
def test_worker_and_scheduler_are_filled_in(argv: tuple[str, ...]) -> None:
    args = configured(*argv)
    assert args.worker_cls in WORKERS.values()
    assert args.scheduler_cls == SCHEDULER


@pytest.mark.parametrize(
    "argv",
    [
        ("-dp", "2", "--data-parallel-size-local", "1", "--data-parallel-start-rank", "1"),
        ("-tp", "2", "--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1"),
    ],
)
def test_a_headless_node_has_them_too(tiny_model: Path, argv: tuple[str, ...]) -> None:
    """What vLLM starts there, it makes of the same arguments."""
    args = configured("--headless", "--dtype", "float32", *argv, model=tiny_model)
    parallel = AsyncEngineArgs.from_cli_args(args).create_engine_config(headless=True).parallel_config
    assert (parallel.data_parallel_rank or parallel.node_rank) == 1
    assert parallel.worker_cls in WORKERS.values()
    assert args.scheduler_cls == SCHEDULER


@pytest.mark.parametrize("captures", [True, False])
def test_the_flag_of_vllms_capture_switches_ours(captures: bool) -> None:
    args = configured("--enable-return-routed-experts" if captures else "--no-enable-return-routed-experts")
    assert (args.scheduler_cls == SCHEDULER) is captures
    assert args.enable_return_routed_experts is False  # vLLM's own capture stays off


NONE_OF_VLLMS = r"Path does not derive from vLLM's .* --no-enable-return-routed-experts"
OFF = "--no-enable-return-routed-experts"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--worker-cls", "pathlib.Path"], NONE_OF_VLLMS),
        (["--scheduler-cls", "pathlib.Path"], NONE_OF_VLLMS),
        ([OFF, "--routed-experts-record", "f"], "--routed-experts-record needs the capture"),
        ([OFF, "--enable-return-routed-expert-weights"], "--enable-return-routed-expert-weights needs the capture"),
        (["--routed-experts-default", "[]"], r"routed_experts_default must be a JSON object .*, not \[\]\."),
    ],
)
def test_arguments_that_cannot_be(argv: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        configured(*argv)


def test_all_processes_know_what_to_do_about_loads() -> None:
    configured()
    assert connectors.on_load() == "recompute"
    for argv in (("--routed-experts-on-load", "missing"), ()):  # the environment holds where nothing else is said
        configured(*argv)
        assert connectors.on_load() == "missing"
        assert os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] == connectors.ON_LOAD_VARIABLE


def test_where_the_tiny_model_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert serve.tiny_model_dir() == tmp_path / "routed-experts" / "tiny-moe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert serve.tiny_model_dir() == tmp_path / ".cache" / "routed-experts" / "tiny-moe"


def test_the_tiny_model_is_served_by_its_name(tiny_model: Path) -> None:
    args = serve.parse([])
    assert args.model_tag is None
    serve.use_tiny_model(args, tiny_model)
    assert args.model == args.model_tag == str(tiny_model)
    assert args.served_model_name == ["tiny-moe"]
    assert args.dtype == "float32"
    given = serve.parse(["--dtype", "bfloat16", "--kv-cache-memory-bytes", "123456"])
    serve.use_tiny_model(given, tiny_model)
    assert (given.dtype, given.kv_cache_memory_bytes) == ("bfloat16", 123456)


# ---- signals: `tests/e2e/test_stopping.py` has them in real servers ----


def test_a_program_that_calls_it_keeps_its_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    """Only the command's own process is stopped in the server's way."""
    handler = signal.getsignal(signal.SIGINT)
    assert run(capsys, "serve", "--port", "0", "--worker-cls", "their.Class")[0] == 2
    assert signal.getsignal(signal.SIGINT) == handler
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert "ctrl-c" not in {thread.name for thread in threading.enumerate()}


def test_a_server_that_ends_visits_no_objects() -> None:
    """H6. That took the first process seconds, in which Docker kills it. Nor does it wait for Ctrl-C."""
    program = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 1000)); "
    program += "from routed_experts.server.cli.signals import stop_on_signals; stop_on_signals()"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=100).stdout == b"True\n"
