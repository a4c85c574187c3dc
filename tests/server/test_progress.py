"""What takes long says so on a terminal, and nowhere else."""

import json
import os
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from routed_experts.server.cli.main import main
from tests.clients.test_compare import TOKENS, answer_of, rows_of
from tests.e2e.harness import Oracle
from tests.protocol.answers import Told, answer
from tests.protocol.answers import rows_of as known_rows

Check = Callable[..., None]


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def says(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Checks what a call says on standard error: texts on a terminal, and nothing at all in a pipe."""

    def check(call: Callable[[], Any], *texts: str) -> None:
        read, write = os.openpty() if request.param else os.pipe()
        if request.param:
            termios.tcsetwinsize(write, (24, 100))
        os.set_blocking(read, False)
        said = b""
        with open(write, "w") as stderr, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            call()
            stderr.flush()
            with suppress(BlockingIOError):
                while True:
                    said += os.read(read, 1 << 16)
        os.close(read)
        if request.param:
            assert [text for text in texts if text not in said.decode()] == [], said
        else:
            assert said == b""

    return check


def test_making_the_model(says: Check, tmp_path: Path) -> None:
    says(lambda: main(["tiny-model", str(tmp_path)]), f"Making the tiny model in {tmp_path}")


def test_starting(says: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("routed_experts.server.cli.serve.main", lambda argv: 0)
    says(lambda: main(["serve"]), "Loading vLLM")


@pytest.mark.parametrize("says", [True], ids=["terminal"], indirect=True)  # elsewhere: tests/clients/test_compare.py
def test_comparing(says: Check, tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(f"{json.dumps(answer_of(rows_of(oracle, TOKENS)))}\n" * 2)
    command = ["compare", str(tiny_model), "--answers", str(file)]
    says(lambda: main(command), f"Loading {tiny_model}", "comparing: 100%", "2/2")


def test_exporting(says: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(f"{json.dumps(answer(Told(known_rows(9), [known_rows(3)])))}\n" * 2)
    says(lambda: main(["export", str(file), "-o", str(tmp_path / "out.csv")]), "exporting: 2 responses")
