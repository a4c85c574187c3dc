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
from tests.clients.test_compare import answer_of, rows_of
from tests.e2e.harness import Oracle, prompt_of


class Stderr:
    """Standard error, as a terminal or as a pipe."""

    def __init__(self, is_terminal: bool, patch: pytest.MonkeyPatch) -> None:
        self.is_terminal, self._patch = is_terminal, patch

    def of(self, call: Callable[[], Any]) -> str:
        """What a call says there."""
        read, write = os.openpty() if self.is_terminal else os.pipe()
        if self.is_terminal:
            termios.tcsetwinsize(write, (24, 100))
        os.set_blocking(read, False)
        with open(write, "w") as stderr:
            with self._patch.context() as patch:
                patch.setattr(sys, "stderr", stderr)
                call()
            stderr.flush()
            said = b""
            with suppress(BlockingIOError):
                while True:
                    said += os.read(read, 1 << 16)
            os.close(read)
            return said.decode()

    def check(self, call: Callable[[], Any], *texts: str) -> None:
        """`texts` are said on a terminal, and nothing at all elsewhere."""
        said = self.of(call)
        if self.is_terminal:
            assert [text for text in texts if text not in said] == [], said
        else:
            assert said == ""


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def stderr(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stderr:
    return Stderr(request.param, monkeypatch)


def test_making_the_model(stderr: Stderr, tmp_path: Path) -> None:
    stderr.check(lambda: main(["tiny-model", str(tmp_path)]), f"Making the tiny model in {tmp_path}")


def test_starting(stderr: Stderr, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("routed_experts.server.cli.serve.serve", lambda argv: None)
    stderr.check(lambda: main(["serve"]), "Loading vLLM")


@pytest.mark.parametrize("stderr", [True], ids=["terminal"], indirect=True)  # elsewhere: tests/clients/test_compare.py
def test_comparing(stderr: Stderr, tiny_model: Path, oracle: Oracle, tmp_path: Path) -> None:
    tokens = prompt_of(27, seed=11)
    file = tmp_path / "answers.jsonl"
    file.write_text(f"{json.dumps(answer_of(rows_of(oracle, tokens), tokens))}\n" * 2)
    command = ["compare", str(tiny_model), "--answers", str(file)]
    stderr.check(lambda: main(command), f"Loading {tiny_model}", "comparing: 100%", "2/2")
