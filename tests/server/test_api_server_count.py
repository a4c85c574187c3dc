"""The number of a server's API processes where nobody says it."""

import argparse
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from vllm.entrypoints.cli import serve as vllm_serve
from vllm.envs import disable_envs_cache

from routed_experts.server.api_server_count import api_server_count, usable_cores
from routed_experts.server.cli import serve

MANY = ("--max-num-seqs", "1024")
CORES = 32


@pytest.mark.parametrize(
    ("requests_at_once", "cores", "engine_processes", "least", "count"),
    [
        (16, 32, 1, 1, 1),
        (256, 32, 1, 1, 1),
        (257, 32, 1, 1, 2),
        (1024, 32, 1, 1, 4),
        (1024, 4, 1, 1, 3),  # the engine's core is not theirs
        (1024, 2, 1, 1, 1),
        (1024, 1, 1, 1, 1),
        (1024, 16, 9, 1, 4),  # an engine core and eight workers
        (1024, 8, 9, 1, 1),
        (8192, 192, 8, 8, 32),  # eight engines
        (128, 192, 8, 8, 8),  # vLLM starts one for each engine
        (8192, 4, 8, 8, 8),
    ],
)
def test_streams_need_processes_and_processes_need_cores(
    requests_at_once: int, cores: int, engine_processes: int, least: int, count: int
) -> None:
    assert api_server_count(requests_at_once, cores, engine_processes, least) == count


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    cores = len(os.sched_getaffinity(0))
    assert usable_cores(quota) == cores  # no cgroup v2
    for text, allowed in (
        ("max 100000\n", cores),
        ("100000 100000\n", 1),
        ("50000 100000\n", 1),
        (f"{cores * 300000} 100000\n", cores),
    ):
        quota.write_text(text)
        assert usable_cores(quota) == allowed, text


def chosen(*flags: str, cores: int = CORES) -> argparse.Namespace:
    args = serve.parse(["model", *flags])
    serve.choose_api_server_count(args, cores)
    return args


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        (MANY, 4),
        (("--max-num-seqs", "256"), None),
        ((), None),  # a CPU's engine runs 128
        (("-tp", "3"), 2),  # with three workers, 384
        (("--performance-mode", "throughput", "-tp", "2"), 2),
        ((*MANY, "--tensor-parallel-size", "29"), 2),
        ((*MANY, "--api-server-count", "1"), 1),
        ((*MANY, "--api-server-count", "7"), 7),
        ((*MANY, "--data-parallel-size", "4"), 16),
        (("--max-num-seqs", "64", "--data-parallel-size", "4"), None),  # vLLM starts four
        # this host's half of eight engines, and all of them from this host
        ((*MANY, "-dp", "8", "-dpl", "4", "--data-parallel-hybrid-lb"), 16),
        ((*MANY, "-dp", "8", "-dpl", "4"), 28),
        # a server beside each engine
        ((*MANY, "-dp", "4", "--data-parallel-external-lb", "--data-parallel-rank", "1"), None),
        ((*MANY, "-dp", "4", "--data-parallel-multi-port-external-lb"), None),
        ((*MANY, "--headless"), None),
        ((*MANY, "--uds", "/tmp/socket"), None),
        ((*MANY, "--enable-server-load-tracking"), None),
    ],
)
def test_what_is_chosen_for_flags(flags: tuple[str, ...], count: int | None) -> None:
    """None: vLLM's own choice."""
    assert chosen(*flags).api_server_count == count


@pytest.mark.parametrize(
    "variable",
    [
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
        "VLLM_ENABLE_RESPONSES_API_STORE",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
    ],
)
def test_one_process_where_several_would_lose_something(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    disable_envs_cache()
    assert chosen(*MANY).api_server_count is None


def test_a_configuration_file_of_vllm_sets_the_number(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("max-num-seqs: 1024\napi-server-count: 3\n")
    assert chosen("--config", str(config)).api_server_count == 3
    config.write_text("max-num-seqs: 1024\n")
    assert chosen("--config", str(config)).api_server_count == 4


def test_the_log_says_what_was_chosen_and_how_to_set_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, serve.logger.name):
        chosen(*MANY)
        chosen("--max-num-seqs", "16")
    (line,) = caplog.messages
    assert "4 API processes" in line
    assert "--api-server-count" in line


def test_vllm_starts_as_many_as_are_chosen(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the start of its processes, which is recorded in place of running them."""
    started: list[Any] = []
    monkeypatch.setattr(vllm_serve, "run_multi_api_server", started.append)
    monkeypatch.setattr(serve, "usable_cores", lambda: CORES)
    flags = ("--max-num-seqs", "600", "--port", "0", "--max-num-batched-tokens", "600")
    assert serve.main([str(tiny_model), *flags]) == 0
    assert [args.api_server_count for args in started] == [3]
