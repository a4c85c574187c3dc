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

from routed_experts.capture import SCHEDULER, WORKERS
from routed_experts.capture.engine import versions
from routed_experts.capture.engine.kv_transfer import connectors
from routed_experts.server import PLUGIN_GROUP, PLUGIN_NAME
from routed_experts.server.cli import main, serve, signals
from routed_experts.server.cli.console import CommandError
from tests.e2e.harness import free_port

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """What is installed, for a test to change; ours is in it."""
    installed = [EntryPoint(PLUGIN_NAME, "routed_experts.server.http.entry_point:make", PLUGIN_GROUP)]
    monkeypatch.setattr(serve, "entry_points", lambda **params: EntryPoints(installed).select(**params))
    unset(monkeypatch, "VLLM_PLUGINS")
    return installed


def unset(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back as it was, whatever the test sets it to
        monkeypatch.delenv(name)


def allowed(monkeypatch: pytest.MonkeyPatch, given: str | None) -> str:
    if given is not None:
        monkeypatch.setenv("VLLM_PLUGINS", given)
    serve.allow_plugin()
    return os.environ["VLLM_PLUGINS"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    flags = ("--port", str(free_port())) if argv[:1] == ("serve",) else ()
    code = main.main([*argv, *flags])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_users_plugins_stay(plugins: list[EntryPoint], monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in (
        (None, PLUGIN_NAME),
        ("", PLUGIN_NAME),
        ("lora_filesystem_resolver,mine", f"lora_filesystem_resolver,mine,{PLUGIN_NAME}"),
        (f"{PLUGIN_NAME},mine", f"mine,{PLUGIN_NAME}"),
    ):
        assert allowed(monkeypatch, given) == expected
        assert allowed(monkeypatch, None) == expected  # a second time


def test_plugins_that_load_without_being_named_stay(plugins: list[EntryPoint], monkeypatch: pytest.MonkeyPatch) -> None:
    """`VLLM_PLUGINS` filters every group, where it is set."""
    groups = {"general": "vllm.general_plugins", "platform": "vllm.platform_plugins", "endpoint": PLUGIN_GROUP}
    plugins += [EntryPoint(name, "a:b", group) for name, group in {**groups, "console": "console_scripts"}.items()]
    assert allowed(monkeypatch, None) == f"general,platform,{PLUGIN_NAME}"


def test_the_installed_package_registers_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    unset(monkeypatch, "VLLM_PLUGINS")
    assert allowed(monkeypatch, None).split(",")[-1] == PLUGIN_NAME


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (None, "not installed properly"),
        ("routed_experts.server.no_such_module:Plugin", "cannot be loaded"),
        ("routed_experts.server.http.entry_point:no_such_factory", "cannot be loaded"),
    ],
)
def test_a_plugin_that_vllm_would_serve_without(plugins: list[EntryPoint], target: str | None, sentence: str) -> None:
    plugins[:] = [EntryPoint(PLUGIN_NAME, target, PLUGIN_GROUP)] if target else []
    with pytest.raises(CommandError, match=sentence):
        serve.allow_plugin()


def test_what_is_said(capsys: pytest.CaptureFixture[str], plugins: list[EntryPoint]) -> None:
    for argv in ((), ("-h",), ("--help",), ("help",)):
        assert run(capsys, *argv) == (0, main.USAGE, "")
    assert run(capsys, "--version") == (0, f"routed-experts-server {PROJECT['version']}\n", "")
    code, out, err = run(capsys, "sreve", "model")
    assert (code, out) == (2, "")
    assert "sreve is not a command" in err
    assert "usage: routed-experts serve" in err
    for argv, sentence in (
        (("tiny-model",), "one argument"),
        (("tiny-model", "a", "b"), "one argument"),
        (("tiny-model", "--help"), "one argument"),
        (("serve", "--served-model-name", "mine"), "`model` should be provided"),
    ):
        code, _, err = run(capsys, *argv)
        assert (code, sentence in err) == (2, True), err


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["python", "sreve"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("routed_experts.server.cli", run_name="__main__")
    assert left.value.code == 2
    assert "sreve is not a command" in capsys.readouterr().err


def test_where_the_tiny_model_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert serve.tiny_model_dir() == tmp_path / "routed-experts" / "tiny-moe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert serve.tiny_model_dir() == tmp_path / ".cache" / "routed-experts" / "tiny-moe"


def filled_in(*argv: str, model: object = "model") -> argparse.Namespace:
    args = serve.parse([str(model), *argv])
    serve.fill_in(args)
    return args


@pytest.mark.parametrize("argv", [(), ("--worker-cls", "auto"), ("--worker-cls", WORKERS["cpu"])])
def test_worker_and_scheduler_are_filled_in(argv: tuple[str, ...]) -> None:
    args = filled_in(*argv)
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
    args = filled_in("--headless", "--dtype", "float32", *argv, model=tiny_model)
    parallel = AsyncEngineArgs.from_cli_args(args).create_engine_config(headless=True).parallel_config
    assert (parallel.data_parallel_rank or parallel.node_rank) == 1
    assert parallel.worker_cls in WORKERS.values()
    assert args.scheduler_cls == SCHEDULER


@pytest.mark.parametrize("flag", ["--worker-cls", "--scheduler-cls"])
def test_a_worker_or_scheduler_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], plugins: list[EntryPoint], flag: str
) -> None:
    with pytest.raises(CommandError, match=r"Path does not derive from vLLM's .* --no-enable-return-routed-experts"):
        filled_in(flag, "pathlib.Path")
    code, _, err = run(capsys, "serve", "model", flag, "their.Class")
    assert code == 2
    assert err.startswith("routed-experts: their.Class cannot be imported")


def test_the_flag_of_vllms_capture_switches_ours() -> None:
    name = "enable-return-routed-experts"
    for argv, capture in (((), True), ((f"--{name}",), True), ((f"--no-{name}",), False)):
        args = serve.parse(["model", *argv])
        assert serve.take_capture_flag(args) is capture
        assert args.enable_return_routed_experts is False  # vLLM's own capture stays off


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(versions.vllm, "__version__", "0.1.0")
    for more in ((), ("--no-enable-return-routed-experts",), ("--allow-untested-vllm",)):
        code, _, err = run(capsys, "serve", "model", *more)
        assert code == 2
        assert "but vLLM 0.1.0 is installed: install" in err


@pytest.mark.parametrize("others", [None, "MINE"])
def test_an_untested_vllm_is_allowed_in_all_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plugins: list[EntryPoint], others: str | None
) -> None:
    from vllm.ray.ray_env import get_env_vars_to_copy

    monkeypatch.setenv(versions.ALLOW_UNTESTED_VARIABLE, "0")
    unset(monkeypatch, "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY")
    if others is not None:
        monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", others)
    monkeypatch.setattr(versions, "UNTESTED_VLLM", ("9.9.9",))
    monkeypatch.setattr(versions.vllm, "__version__", "9.9.9")
    code, _, err = run(capsys, "serve", "model", "--worker-cls", "their.Class")
    assert (code, "or add --allow-untested-vllm" in err) == (2, True)
    assert versions.ALLOW_UNTESTED_VARIABLE not in get_env_vars_to_copy()
    code, _, err = run(capsys, "serve", "model", "--allow-untested-vllm", "--worker-cls", "their.Class")
    assert (code, "their.Class cannot be imported" in err) == (2, True)
    assert os.environ[versions.ALLOW_UNTESTED_VARIABLE] == "1"
    assert {versions.ALLOW_UNTESTED_VARIABLE, *filter(None, [others])} <= get_env_vars_to_copy()


def test_all_processes_know_what_to_do_about_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unset(monkeypatch, connectors.ON_LOAD_VARIABLE, "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY")
    filled_in()
    assert connectors.on_load() == "recompute"
    for argv in (("--routed-experts-on-load", "missing"), ()):  # the environment holds where nothing else is said
        filled_in(*argv)
        assert connectors.on_load() == "missing"
        assert os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] == connectors.ON_LOAD_VARIABLE
    with pytest.raises(SystemExit):
        filled_in("--routed-experts-on-load", "guess")
    assert "invalid choice: 'guess'" in capsys.readouterr().err


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


def test_a_program_that_calls_it_keeps_its_signals(capsys: pytest.CaptureFixture[str]) -> None:
    """Only the command's own process is stopped in the server's way (`tests/e2e/test_stopping.py`)."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert main.main(["serve", "--port", "0", "/no/such/folder"]) == 2
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert "ctrl-c" not in {thread.name for thread in threading.enumerate()}


def test_a_server_that_ends_visits_no_objects() -> None:
    """H6. That took the first process seconds, in which Docker kills it."""
    program = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 1000)); "
    program += "from routed_experts.server.cli.signals import stop_on_signals; stop_on_signals()"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "True\n"


def test_a_server_that_ends_by_itself_waits_for_no_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real wait would stop this process; `tests/e2e/test_stopping.py` has it."""
    handler, over = signal.getsignal(signal.SIGTERM), threading.Event()
    monkeypatch.setattr(signals, "_wait_for_ctrl_c", over.wait)
    try:
        signals.stop_on_signals()
        (waiting,) = (thread for thread in threading.enumerate() if thread.name == "ctrl-c")
        assert waiting.daemon
    finally:
        over.set()
        signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    waiting.join()
