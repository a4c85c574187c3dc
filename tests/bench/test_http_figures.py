"""From answers to the table: each figure from answers whose times are made up, and what is sent in each case."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.http import CPU_CASES, Case, figures, lines_of, requests_of
from bench.http_answers import Answer, Expected
from bench.http_load import Load, Result
from bench.http_table import table
from bench.link_package import link

pytestmark = pytest.mark.release

ALL = ["off", "captured", "returned", "vllm"]


def result(role: str, sent: float, times: list[float], size: int = 100) -> Result:
    answer = Answer(times[0], times[-1], size, [times], rows=7)
    return Result(role, sent, Expected(3, len(times), 1, "split"), answer)


def test_figures_of_a_run() -> None:
    load = Load([result("stream", 10.0, [10.5, 10.6, 10.8]), result("stream", 10.0, [10.7, 10.9, 12.0])], 0.1, 0.3)
    run = figures(load, stream=True)
    assert run["tokens_per_s"] == pytest.approx(6 / 2.0)
    assert run["cpu_us"] == pytest.approx(0.3e6 / 6)
    assert run["bytes"] == pytest.approx(200 / 6)
    assert run["rows"] == 14
    assert run["ttft_p50_ms"] == pytest.approx(600)
    assert run["itl_p50_ms"] == pytest.approx(200)
    assert run["itl_max_ms"] == pytest.approx(1100)
    assert run["faults"] == []


def test_beside_a_long_answer_only_what_happens_while_it_comes_counts() -> None:
    stream = result("stream", 0.0, [0.5, 1.9, 2.1, 2.2, 3.9])
    others = [result("other", sent, [sent + wait]) for sent, wait in ((1.8, 0.9), (2.1, 0.2), (3.2, 0.7))]
    run = figures(Load([stream, *others, result("long", 1.0, [2.0, 2.5])], 0.1, 0.3), stream=True)
    assert run["ttft_max_ms"] == pytest.approx(200)
    assert run["itl_max_ms"] == pytest.approx(100)


def test_every_case_sends_what_it_says() -> None:
    for case in CPU_CASES:
        for line in lines_of(ALL, ["streamed", "unstreamed"])[0]:
            requests = requests_of(case, line, 1, 100, "object", "int16")
            streams = [request for request in requests if request.role == "stream"]
            assert len(streams) == case.streams
            assert {len(request.prompt) for request in streams} == {case.prompt_len}
            assert len({request.expected.new_tokens for request in streams}) > 1 or not case.mixed
            assert all((b'"return_routed_experts"' in r.encoded()) == (line.rows == "split") for r in requests)
            assert sum(request.apart for request in requests) == (case.long > 0)


def test_messagepack_is_asked_for_where_there_is_routing_and_no_stream() -> None:
    for line in lines_of(ALL, ["streamed", "unstreamed"])[0]:
        (request,) = requests_of(Case("one", 1, 4, 4), line, 1, 100, "object", "int16", msgpack=True)
        wanted = line.rows == "split" and not line.stream
        assert (b"Accept: application/msgpack\r\n" in request.encoded()) == wanted


def test_runs_compare_the_same_lengths_and_share_no_prompt() -> None:
    case = Case("mixed", 8, 16, 20, mixed=True)
    off, captured, *_ = lines_of(ALL, ["streamed"])[0]
    one, two = (requests_of(case, line, seed, 1000, "object", "int16") for seed, line in enumerate((off, captured)))
    assert [request.expected.new_tokens for request in one] == [request.expected.new_tokens for request in two]
    assert not {tuple(request.prompt) for request in one} & {tuple(request.prompt) for request in two}


def test_vllms_own_takes_turns_with_an_off_of_its_own_unstreamed() -> None:
    ours, peer = lines_of(ALL, ["streamed", "unstreamed"])
    assert [(line.variant, line.stream) for line in ours][:3] == [("off", True), ("captured", True), ("returned", True)]
    assert {line.server for line in peer} == {"off", "vllm"}
    assert not any(line.stream for line in peer)
    assert lines_of(["vllm"], ["streamed"]) == [peer]


def test_vllms_own_is_not_asked_for_rows_in_the_streams_beside_a_long_answer() -> None:
    _, (_, peer) = lines_of(ALL, ["unstreamed"])
    case = Case("long", 2, 4, 4, long=50, others=3)
    requests = requests_of(case, peer, 1, 100, "object", "int16")
    assert {(r.role, r.stream, r.expected.rows) for r in requests} == {
        ("stream", True, "none"),
        ("long", False, "joined"),
        ("other", True, "none"),
    }
    assert {r.expected.form for r in requests} == {"npy"}, "vLLM's own form, whatever ours is asked for"


def run_of(variant: str, cpu: float, **more: Any) -> dict[str, Any]:
    keys = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
    about = {"device": "here", "date": "today", "commit": "abc", "client_busy": 0.1, "form": None, "baseline": "off"}
    numbers = {"tokens_per_s": 100.0, "cpu_us": cpu, "bytes": 10.0, "rows": 5, "faults": [], **dict.fromkeys(keys, 2.0)}
    return {"case": "64", "api_servers": 1, "mode": "streamed", "variant": variant, **about, **numbers, **more}


def test_table_has_medians_beside_off_and_says_what_was_wrong() -> None:
    runs = [run_of("off", 40), run_of("off", 44), run_of("off", 42)]
    runs += [run_of("returned", 60, tokens_per_s=90.0), run_of("returned", 50, tokens_per_s=90.0)]
    runs += [run_of("captured", 43, faults=["lost"])]
    text = table(runs)
    (off,) = [line for line in text.splitlines() if "| off |" in line]
    (returned,) = [line for line in text.splitlines() if "| returned |" in line]
    (captured,) = [line for line in text.splitlines() if "| captured |" in line]
    assert "| 42.0 |" in off
    assert "| 55.0 | +13.0 |" in returned
    assert "| 90.0 | -10.0 % |" in returned
    assert "1 ANSWERS WRONG" in captured


def test_linked_package_has_the_entry_points_of_the_installed_one(tmp_path: Path) -> None:
    script = """
import importlib.metadata as m, routed_experts.protocol, sys
d = m.distribution("routed-experts-server")
assert str(d.locate_file("")) == sys.argv[1], d.locate_file("")
assert routed_experts.protocol.__file__.startswith(sys.argv[1])
print(sorted((e.group, e.name, e.value) for e in d.entry_points))
"""
    for _ in range(2):
        link(tmp_path)
    command = [sys.executable, "-S", "-c", script, str(tmp_path)]
    printed = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path)}, cwd="/", capture_output=True, text=True, check=True
    ).stdout
    installed = importlib.metadata.distribution("routed-experts-server").entry_points
    assert printed.strip() == str(sorted((e.group, e.name, e.value) for e in installed))
