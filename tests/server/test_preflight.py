"""What ends `serve` in one sentence: the model, the port, the flags. Nothing is started."""

import logging
import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from routed_experts.server.cli import preflight, serve
from routed_experts.server.cli.main import main
from routed_experts.server.http.selftest import SelfTestError
from tests.e2e.harness import free_port


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "")  # so that it is put back as it was
    monkeypatch.setattr(logging, "raiseExceptions", False)  # vLLM's handler keeps the output of the test before


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one sentence that `serve` ends in."""
    flags = () if "--port" in argv else ("--port", str(free_port()))
    assert main(["serve", *argv, *flags]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    sentence = said.splitlines()[-1]
    assert sentence.startswith("routed-experts: ")
    return sentence.removeprefix("routed-experts: ")


@pytest.mark.parametrize("model", ["./nowhere", "some/deep/folder", "/nowhere", "not a name"])
def test_no_such_model(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert refused(capsys, model) == (
        f"{model} is neither a local folder nor a name on the Hugging Face hub (owner/name): check the spelling."
    )


def test_no_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """vLLM's own sentence names the folder."""
    assert f"local directory specified: '{tmp_path}'." in refused(capsys, str(tmp_path))


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listening:
        port = listening.getsockname()[1]
        assert refused(capsys, str(tiny_model), "--port", str(port)) == (
            f"Port {port} is in use: choose another with --port, or stop the program that listens on it."
        )


def test_a_unix_socket_needs_no_port(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """F5. The socket is checked instead, and left for vLLM to make."""
    path = tmp_path / "socket"
    with socket.create_server(("0.0.0.0", 0)) as listening:
        flags = ("./nowhere", "--port", str(listening.getsockname()[1]), "--uds")
        assert "./nowhere is neither a local folder" in refused(capsys, *flags, str(path))
        assert not path.exists()
        path.touch()
        exists = f"--uds {path} cannot be used: it exists; remove it if no server uses it."
        assert refused(capsys, *flags, str(path)) == exists
        assert path.exists()
        assert "cannot be used: No such file" in refused(capsys, *flags, str(tmp_path / "none" / "socket"))
        assert "cannot be used: AF_UNIX path too long." in refused(capsys, *flags, "x" * 200)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--port 70000", "--port 70000 is not a port: use one from 1 to 65535."),
        ("--host 203.0.113.9", "--host 203.0.113.9 is not an address of this machine: use one, or omit"),
        ("--host nobody.invalid", "--host nobody.invalid cannot be resolved: use an address of this machine, or omit"),
        ("--max-model-len 99999999", "User-specified max_model_len (99999999) is greater than the derived"),
        ("--tensor-parallel-size 3", "Total number of attention heads (4) must be divisible by tensor parallel"),
        ("--config /nonexistent.yaml", "/nonexistent.yaml"),
    ],
)
def test_flags_that_cannot_be(capsys: pytest.CaptureFixture[str], tiny_model: Path, argv: str, sentence: str) -> None:
    assert sentence in refused(capsys, str(tiny_model), *argv.split())


def exits(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["serve", *argv])
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


@pytest.mark.parametrize("argv", [("--no-such-flag",), ("--dtype", "float99"), ("--routed-experts-default", "[]")])
def test_flags_that_do_not_exist(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]) -> None:
    code, _, said = exits(capsys, "model", *argv)
    assert (code, "Traceback" in said) == (2, False)
    assert argv[0] in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [  # vLLM's own words for it, after its processes have said what they ran into
        (
            RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}"),
            "The engine did not start; its own error stands above",
        ),
        (SelfTestError("The startup probe got no routing back."), r"The startup probe got no routing back\."),
    ],
)
def test_a_start_that_fails(monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str) -> None:
    """The self-test runs in the server's start, below vLLM's command."""

    def cmd(args: object) -> None:
        raise error

    monkeypatch.setattr(serve.ServeSubcommand, "cmd", staticmethod(cmd))
    monkeypatch.setattr(serve.ServeSubcommand, "validate", lambda self, args: None)
    with pytest.raises(serve.CommandError, match=sentence):
        serve.run(serve.parse(["model"]))


def test_those_are_vllms_own_words() -> None:
    from vllm.v1.engine import utils

    assert serve._ENGINE_FAILED in Path(utils.__file__).read_text()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--log-config-file", "/nowhere"), "The log's configuration cannot be read"),
        (("--tensor-parallel-size", "0"), "tensor_parallel_size: Input should be greater than or equal to 1."),
    ],
)
def test_values_that_vllm_refuses(tiny_model: Path, flags: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(serve.CommandError, match=sentence):
        serve.check(serve.parse([str(tiny_model), *flags]), capture=False)


def test_help_is_of_this_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = exits(capsys, "--help")
    assert code == 0
    for text in ("routed-experts serve [MODEL] [options]", "a tiny model is created and served"):
        assert text in said
    for text in ("Qwen/Qwen3-0.6B", "vllm serve --help"):
        assert text not in said


def test_an_error_of_pydantic_without_a_link() -> None:
    """Errors of its own kinds have a fourth line, with a link."""

    class Size(BaseModel):
        size: int

        @field_validator("size")
        @classmethod
        def check(cls, value: int) -> int:
            raise PydanticCustomError("odd", "must be even")

    with pytest.raises(ValidationError) as caught:
        Size(size=3)
    assert preflight.sentence_of(caught.value, "model") == "size: must be even."
