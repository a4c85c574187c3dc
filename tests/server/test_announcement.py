"""What `serve` says to open and to paste."""

import json
import shlex
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig

from routed_experts.server.http.process.plugin import (
    ADDRESS_FILE_VARIABLE,
    address,
    note_address,
    processes_to_add,
    what_to_do,
)


def args(**values: Any) -> Namespace:
    return Namespace(
        **{
            **dict.fromkeys(("ssl_certfile", "host", "root_path", "api_key", "uds")),
            "port": 8000,
            "skip_tokenizer_init": False,
            **values,
        }
    )


def test_address() -> None:
    assert address(args()) == address(args(host="0.0.0.0")) == "http://localhost:8000"
    assert address(args(host="::1", port=80)) == "http://[::1]:80"
    assert (
        address(args(host="gpu7", ssl_certfile="cert.pem", root_path="/llm/"))
        == "https://gpu7:8000/llm"
    )
    assert address(args(uds="/run/the server.sock", port=1234)) == "http://localhost"


def test_the_address_for_health_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    note_address("not wanted")
    monkeypatch.setenv(ADDRESS_FILE_VARIABLE, str(tmp_path / "address"))
    note_address("http://localhost:1")
    assert (tmp_path / "address").read_text() == "http://localhost:1"
    assert not caplog.records
    monkeypatch.setenv(ADDRESS_FILE_VARIABLE, str(tmp_path / "not there" / "address"))
    note_address("http://localhost:1")  # the server goes on
    assert len(caplog.records) == 1


def test_what_to_paste_is_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a Unix socket no port is open, and no browser opens a socket."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    page, paste = what_to_do(
        args(), "http://localhost:8000", "it's a model", has_page=True
    ).splitlines()
    assert page.split() == ["open", "http://localhost:8000/routed_experts"]
    _, curl, _, url, _, _, _, body = shlex.split(paste)
    assert (curl, url) == ("curl", "http://localhost:8000/v1/completions")
    assert json.loads(body)["model"] == "it's a model"
    assert "YOUR_KEY" in what_to_do(args(api_key=["k"]), "", "m", has_page=True)
    assert "open" not in what_to_do(args(), "", "m", has_page=False)
    said = shlex.split(
        what_to_do(args(uds="/run/the server.sock"), "http://localhost", "m", has_page=True)
    )
    assert said[:4] == ["paste", "curl", "-N", "--unix-socket"]
    assert said[4:6] == ["/run/the server.sock", "http://localhost/v1/completions"]


def test_what_to_paste_to_a_server_without_a_tokenizer() -> None:
    without_tokenizer = args(skip_tokenizer_init=True)
    _, paste = what_to_do(without_tokenizer, "http://host", "m", has_page=True).splitlines()
    body = json.loads(shlex.split(paste)[-1])
    assert body["prompt"] == [1, 2, 3]
    assert body["return_token_ids"]


@pytest.mark.parametrize(
    ("at_once", "ranks", "processes", "said"),
    [
        (256, 1, 1, ""),
        (257, 1, 1, "--api-server-count 2"),
        (1024, 2, 4, "--api-server-count 8"),
        (1024, 1, 4, ""),
    ],
)
@pytest.mark.parametrize(
    "balancer", [{}, {"data_parallel_external_lb": True}, {"data_parallel_hybrid_lb": True}]
)
def test_too_few_api_processes(
    at_once: int, ranks: int, processes: int, said: str, balancer: dict[str, bool]
) -> None:
    """Those of other hosts are not counted behind a load balancer of the user's."""
    every = 8 if balancer else ranks
    parallel = ParallelConfig(data_parallel_size=every, data_parallel_size_local=ranks, **balancer)
    parallel._api_process_rank, parallel._api_process_count = 0, processes
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=at_once), parallel_config=parallel
    )
    assert processes_to_add(config).partition(": ")[2] == said
