"""The number of a server's API processes where nobody says it."""

import argparse
import json
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


ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("own_cgroups", "files", "expected"),
    [
        ("", {"cpu.max": "100000 100000"}, ALL),  # no cgroup
        ("0::/", {}, ALL),
        ("0::/", {"cpu.max": "max 100000"}, ALL),
        ("0::/", {"cpu.max": "100000 100000"}, 1),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": f"{ALL * 300000} 100000"}, ALL),
        # a service's own limit, and one above it
        ("0::/a/b", {"a/b/cpu.max": "100000 100000"}, 1),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "100000 100000"}, 1),
        ("0::/a/b", {"a/b/cpu.max": "900000 100000", "a/cpu.max": "100000 100000"}, 1),
        ("0::/a", {"a/b/cpu.max": "100000 100000"}, ALL),  # another's
        ("0::/../host/path", {"cpu.max": "100000 100000"}, 1),  # paths of the host
        # version 1
        ("3:cpuset:/\n2:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "100000"}, 1),
        ("2:cpu:/a/b", {"cpu/a/cpu.cfs_quota_us": "100000"}, 1),
        ("2:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1"}, ALL),
        ("2:cpuset:/a\n0::/", {"cpu/a/cpu.cfs_quota_us": "100000"}, ALL),
    ],
)
def test_the_least_limit_of_cgroups_counts(
    tmp_path: Path, own_cgroups: str, files: dict[str, str], expected: int
) -> None:
    own = tmp_path / "own"
    own.write_text(own_cgroups)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        if path.name == "cpu.cfs_quota_us":
            path.with_name("cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path / "cgroup", own) == expected


@pytest.fixture(autouse=True)
def in_a_folder_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model("model", QWEN3_MOE)


QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
QWEN3_VL_MOE = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
}


def write_model(folder: str, config: dict[str, Any]) -> None:
    Path(folder).mkdir()
    Path(folder, "config.json").write_text(json.dumps(config))


def chosen(*flags: str, model: str = "model", cores: int = CORES) -> argparse.Namespace:
    args = serve.parse([model, *flags])
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
        ((*MANY, "--enable-elastic-ep"), None),
        # half of the workers are another host's; in the second, each engine is on one host
        ((*MANY, "-tp", "58", "--nnodes", "2"), 2),
        ((*MANY, "-tp", "14", "-dp", "4", "-dpl", "2", "--nnodes", "2"), None),
        ((*MANY, "-tp", "14", "-dp", "2", "-dpl", "1", "--nnodes", "2"), 8),
    ],
)
def test_what_is_chosen_for_flags(flags: tuple[str, ...], count: int | None) -> None:
    """None: vLLM's own choice."""
    assert chosen(*flags).api_server_count == count


@pytest.mark.parametrize(
    "variable",
    [
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_CPU_SIM_MULTI_NUMA",
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
        "VLLM_ENABLE_RESPONSES_API_STORE",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
    ],
)
def test_one_process_where_several_would_lose_something(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    """The log says why, unless one is enough."""
    monkeypatch.setenv(variable, "1")
    disable_envs_cache()
    with caplog.at_level(logging.INFO, serve.logger.name):
        assert chosen(*MANY).api_server_count is None
        assert chosen("--max-num-seqs", "16").api_server_count is None
    (line,) = caplog.messages
    assert variable in line


@pytest.mark.parametrize(
    ("config", "flags", "count"),
    [
        (QWEN3_VL_MOE, (), None),
        (QWEN3_VL_MOE, ("--language-model-only",), 4),
        (QWEN3_VL_MOE, ("--api-server-count", "3"), 3),
        # of a model that vLLM does not know
        ({**QWEN3_VL_MOE, "architectures": ["Other"]}, (), None),
        ({**QWEN3_MOE, "architectures": ["Other"]}, (), 4),
        ({**QWEN3_MOE, "architectures": None}, (), 4),
        ({"model_type": "unknown"}, (), None),
    ],
)
def test_models_that_take_more_than_text_have_as_many_as_vllm_starts(
    config: dict[str, Any], flags: tuple[str, ...], count: int | None
) -> None:
    write_model("other", config)
    assert chosen(*MANY, *flags, model="other").api_server_count == count


def test_the_log_says_why_a_model_with_images_has_few(caplog: pytest.LogCaptureFixture) -> None:
    write_model("other", QWEN3_VL_MOE)
    with caplog.at_level(logging.INFO, serve.logger.name):
        chosen(*MANY, model="other")
    (line,) = caplog.messages
    assert "images" in line
    assert "--api-server-count" in line


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
