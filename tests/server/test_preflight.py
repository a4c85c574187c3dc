"""What ends `serve` in one sentence: the model, the address, the flags. No engine is started."""

import logging
import shlex
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from routed_experts.server.cli import preflight, serve
from routed_experts.server.cli.console import CommandError
from routed_experts.server.cli.main import main
from routed_experts.server.http.selftest import SelfTestError
from tests.e2e.harness import free_port

NO_NAME = "is neither a local folder nor a name on the Hugging Face hub (owner/name): check the spelling."


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what vLLM's command changes."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setattr(logging, "raiseExceptions", False)  # vLLM's handler keeps the output of the test before
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one sentence that `serve` ends in."""
    flags = () if "--port" in argv else ("--port", str(free_port()))
    try:
        status = main(["serve", *argv, *flags])
    except SystemExit as left:  # of argparse
        status = int(left.code or 0)
    said = capsys.readouterr().err
    assert (status, "Traceback" in said) == (2, False), said
    sentence = said.splitlines()[-1]
    assert sentence.startswith("routed-experts")
    return sentence.removeprefix("routed-experts: ")


@pytest.mark.parametrize("flags", [(), ("--api-server-count", "2")])
def test_a_port_in_use(capsys: pytest.CaptureFixture[str], tiny_model: Path, flags: tuple[str, ...]) -> None:
    """Several API processes of vLLM would share it with another server that shares it."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(("0.0.0.0", 0))
        listening.listen()
        port = str(listening.getsockname()[1])
        said = refused(capsys, str(tiny_model), "--port", port, *flags)
        assert said == f"The server cannot listen on port {port}: Address already in use."


def test_a_unix_socket_needs_no_port(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """F5. The socket is checked instead, and left for vLLM to make."""
    path = tmp_path / "socket"
    with socket.create_server(("0.0.0.0", 0)) as listening:
        flags = ("./nowhere", "--port", str(listening.getsockname()[1]), "--uds")
        assert refused(capsys, *flags, str(path)) == f"./nowhere {NO_NAME}"
        path.unlink(missing_ok=True)
        preflight.check_address(None, 1, str(path))
        assert not path.exists()
        path.touch()
        assert "Address already in use; if no server uses it, remove it." in refused(capsys, *flags, str(path))
        assert path.exists()
        assert "No such file" in refused(capsys, *flags, str(tmp_path / "none" / "socket"))
        assert "AF_UNIX path too long." in refused(capsys, *flags, "x" * 200)


FLAGS = [
    ("--port 70000", "cannot listen on port 70000: bind(): port must be 0-65535."),
    ("--host 203.0.113.9", "of --host 203.0.113.9: Cannot assign requested address."),
    ("--host nobody.invalid", "of --host nobody.invalid: "),
    ("--max-model-len 99999999", "User-specified max_model_len (99999999) is greater than the derived"),
    ("--tensor-parallel-size 3", "Total number of attention heads (4) must be divisible by tensor parallel"),
    ("--tensor-parallel-size 0", "tensor_parallel_size: Input should be greater than or equal to 1."),
    ("--kv-sharing-fast-prefill", "Fast prefill skips layers for prompt tokens: remove --kv-sharing-fast-prefill."),
    ("--config /nonexistent.yaml", "/nonexistent.yaml"),
    ("--log-config-file /nowhere", "The log's configuration cannot be read"),
    ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
    ("--dtype float99", "argument --dtype: invalid choice: 'float99'"),
    ("--routed-experts-on-load guess", "invalid choice: 'guess'"),
    ("--routed-experts-store /proc/none", "--routed-experts-store: /proc/none cannot be used: "),
    ("--routed-experts-record /proc/none", "--routed-experts-record: /proc/none cannot be used: "),
    ("--worker-cls their.Class", "their.Class cannot be imported"),
]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        *((model, f"{model} {NO_NAME}") for model in ("./nowhere", "some/deep/folder", "/nowhere")),
        ("'not a name'", f"not a name {NO_NAME}"),
        ("/tmp", "local directory specified: '/tmp'."),  # has no checkpoint, as vLLM says
        ("--served-model-name mine", "`model` should be provided"),
        *((f"MODEL {flags}", sentence) for flags, sentence in FLAGS),
    ],
)
def test_what_cannot_be(capsys: pytest.CaptureFixture[str], tiny_model: Path, argv: str, sentence: str) -> None:
    assert sentence in refused(capsys, *shlex.split(argv.replace("MODEL", str(tiny_model))))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [  # vLLM's own words for it, after its processes have said what they ran into
        (
            RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}"),
            "The engine did not start; its own error stands above",
        ),
        (SelfTestError("The startup probe got no routing back."), r"The startup probe got no routing back\."),
        (OSError("no tokenizer"), r"The server cannot run: no tokenizer\."),
    ],
)
def test_a_start_that_fails(monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str) -> None:
    """The self-test runs in the server's start, below vLLM's command."""

    def cmd(args: object) -> None:
        raise error

    monkeypatch.setattr(serve.ServeSubcommand, "cmd", staticmethod(cmd))
    monkeypatch.setattr(serve.ServeSubcommand, "validate", lambda self, args: None)
    with pytest.raises(CommandError, match=sentence):
        serve.run(serve.parse(["model"]))


def test_those_are_vllms_own_words() -> None:
    from vllm.v1.engine import utils

    assert serve._ENGINE_FAILED in Path(utils.__file__).read_text()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("GatedRepoError", preflight.NO_SUCH_MODEL), ("ConnectTimeout", preflight.NO_HUB), ("Another", "vLLM's own.")],
)
@pytest.mark.parametrize("is_explicit", [True, False])
def test_errors_of_the_hub_below_those_of_others(name: str, sentence: str, is_explicit: bool) -> None:
    error = OSError("vLLM's own\nand more")
    setattr(error, "__cause__" if is_explicit else "__context__", type(name, (Exception,), {})())
    assert preflight.sentence_of(error, "m") == sentence.format(model="m")


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
