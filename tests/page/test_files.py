"""What is served as the page, and to whom. No browser."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest

from routed_experts.server.cli.console import CommandError
from routed_experts.server.cli.main import main
from routed_experts.server.page import page_files
from routed_experts.server.tools import view
from tests.contract.served import serving
from tests.e2e.harness import Server
from tests.page.answers import answer, rows_of
from tests.protocol.answers import peak_of

Viewed = Callable[..., str]


def get(url: str, **headers: str) -> httpx.Response:
    return httpx.get(url, headers=headers, timeout=300, verify=False)


def check_page(url: str) -> None:
    """The page and each of its files is there, and nothing else is."""
    index = get(url)
    assert index.status_code == 200
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    for policy in ("default-src 'none'", "script-src 'self'", "connect-src 'self'"):
        assert policy in index.headers["content-security-policy"]
    for name, file in page_files().items():
        response = get(f"{url}/{name}")
        if name == "index.html":
            assert response.status_code == 404
        else:
            assert (response.content, response.headers["content-type"]) == file
    for path in ("/", "/nothing.js", "/../plugin.py", "/..%2f..%2fplugin.py", "/__init__.py"):
        assert get(url + path).status_code in (404, 307), path


def test_the_server_serves_it(api: Server) -> None:
    check_page(f"{api.url}/routed_experts")


def test_without_the_page(tiny_model: Path) -> None:
    with serving(tiny_model, "--no-routed-experts-page") as server:
        assert get(f"{server.url}/routed_experts").status_code == 404
        assert get(f"{server.url}/routed_experts/main.js").status_code == 404
        assert server.info()["num_layers"] == 8


def test_view_serves_it(viewed: Viewed) -> None:
    """At its own address only: a site elsewhere can have its name lead here, and would read the
    file."""
    text = json.dumps(answer(rows_of(9, 2, 2, 8), 3))
    url = viewed(texts={"answers.jsonl": text})
    check_page(url)
    assert get(f"{url}/saved/0").text == text
    assert get(f"{url}/saved/0", Host=f"localhost:{httpx.URL(url).port}").status_code == 200
    for path in ("", "/", "/1", "/-1", "/x", "/²"):
        assert get(f"{url}/saved{path}").status_code == 404
    elsewhere = get(f"{url}/saved/0", Host="elsewhere.example")
    assert elsewhere.status_code == 403
    assert "choices" not in elsewhere.text


def test_every_file_is_used_and_nothing_is_loaded_from_elsewhere() -> None:
    texts = {name: content.decode() for name, (content, _) in page_files().items()}
    for name, text in texts.items():
        text = text.replace("http://www.w3.org/2000/svg", "")
        match = re.search(
            r"https?:|//[a-z]+\.[a-z]|innerHTML|outerHTML|insertAdjacentHTML|\beval\b", text
        )
        assert not match, name
        assert name == "index.html" or any(
            name in text for other, text in texts.items() if other != name
        ), name


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps(answer(rows_of(9, 2, 2, 8), 3)))
    return file


@pytest.mark.e2e
def test_the_documented_commands(saved: Path, documented: list[str]) -> None:
    """The first and the third open a browser, which says here what it would open."""
    for folder in ("code", "prose"):
        (saved.parent / folder).mkdir()
        shutil.copy(saved, saved.parent / folder)
    (text,) = documented
    commands = map(partial(shlex.split, comments=True), text.splitlines())
    said = [said_by(command, saved.parent) for command in commands]
    assert [len(lines) for lines in said] == [2, 1, 2]
    for line in itertools.chain(*said):
        assert re.search(r"http://127\.0\.0\.1:\d+/routed_experts\b", line)
    assert said[0][1].startswith("opened ")


def said_by(command: list[str], folder: Path) -> list[str]:
    """What a command that goes on until it is interrupted says."""
    process = subprocess.Popen(
        [sys.executable, "-m", "routed_experts.server.cli", *command[1:]],
        cwd=folder,
        env={**os.environ, "BROWSER": "echo opened %s"},
        stdout=subprocess.PIPE,
        text=True,
        # Shells have what they run in the background ignore interrupts, and these tests may be
        # that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        # answered once the browser, if any, has come and gone
        get(re.findall(r"http\S+", first)[0])
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0
        return [first, *(line for line in process.stdout if line.strip())]
    finally:
        process.kill()


def test_view_needs_a_free_port(
    capsys: pytest.CaptureFixture[str], saved: Path, viewed: Viewed
) -> None:
    port = httpx.URL(viewed(answer(rows_of(9, 2, 2, 8), 3))).port
    assert main(["view", str(saved), "--no-browser", "--port", str(port)]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert f"Port {port} cannot be used" in sentence
    assert "--port" in sentence


def test_two_views_at_once_take_two_ports() -> None:
    port = view.parse([]).port
    with (
        view.ViewServer([], port) as first,
        view.ViewServer([], port) as second,
    ):
        assert first.url != second.url


def test_view_reads_folders(tmp_path: Path, saved: Path) -> None:
    for path in ("code/b.jsonl", "code/deep/a.json", "code/notes.txt", "empty/x.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(saved, tmp_path / path)
    with ExitStack() as stack:
        viewed = view.viewed_files([str(tmp_path / "code"), str(saved)], stack)
        names = [file.path.relative_to(tmp_path).as_posix() for file in viewed]
        assert names == ["code/b.jsonl", "code/deep/a.json", "answers.jsonl"]
        assert view.viewed_files([], stack) == []
        with pytest.raises(CommandError, match="has no files"):
            view.viewed_files([str(tmp_path / "empty")], stack)


def test_view_reads_no_file_at_the_start(tmp_path: Path) -> None:
    """Recordings have gigabytes; what is wrong in one, the page says."""
    (tmp_path / "0.jsonl").write_bytes(bytes(40 << 20))
    with ExitStack() as stack:
        (file,), peak = peak_of(lambda: view.viewed_files([str(tmp_path)], stack))
    assert file.path.name == "0.jsonl"
    assert peak < 1 << 20
