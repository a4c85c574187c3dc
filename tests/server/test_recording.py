"""Aborted requests in recorded routing, through vLLM's own output processor."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.output_processor import RequestOutputCollector

from routed_experts.capture.message import OPT_IN_ARG, OptIn
from routed_experts.protocol.collect import collect
from routed_experts.protocol.models import CaptureInfo, RoutedExpertsInfo
from routed_experts.server.http import metrics
from routed_experts.server.http.engine import CapturedEngine
from routed_experts.server.http.recording import Recorder, RecordFiles, prepare
from tests.server.known import K, L
from tests.server.test_row_buffer import ABORT, DELTA, Frontend, first_token, output, prompt, request_of, take


def test_f2_files_that_no_server_made_are_left_alone(tmp_path: Path) -> None:
    """F2: a link is not followed, and a folder or a pipe does not keep a server from starting."""
    folder, elsewhere = tmp_path / "record", tmp_path / "elsewhere"
    folder.mkdir(mode=0o700)
    elsewhere.write_text("a letter without an end of line")
    (folder / "link.jsonl.part").symlink_to(elsewhere)
    (folder / "folder.jsonl.part").mkdir()
    os.mkfifo(folder / "pipe.jsonl.part")
    (folder / "cut.jsonl.part").write_text('{"a": 1}\n{"b"')
    (folder / "empty.jsonl.part").touch()
    prepare(folder)
    assert elsewhere.read_text() == "a letter without an end of line"
    names = ["cut.jsonl", "folder.jsonl.part", "link.jsonl.part", "pipe.jsonl.part"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert (folder / "cut.jsonl").read_text() == '{"a": 1}\n'


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_f2_a_folder_that_others_may_write_to(tmp_path: Path, mode: int) -> None:
    """F2: they could put links there, and read or change what is recorded."""
    folder, link = tmp_path / "record", tmp_path / "link"
    link.symlink_to(folder)
    prepare(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(OSError, match="a folder of this user that nobody else may write to"):
        prepare(link)
    folder.chmod(mode)
    with pytest.raises(OSError, match="a folder of this user that nobody else may write to"):
        prepare(folder)


def recorder_of(frontend: Frontend, folder: Path) -> Recorder:
    size = CaptureInfo(runner="v2", device="cpu", kv_slots=0, host_cache_bytes=0, device_bytes=0, pinned_bytes=0)
    shape: dict[str, Any] = {"num_layers": L, "top_k": K, "num_experts": 99, "layer_ids": list(range(L))}
    info = RoutedExpertsInfo(model="tiny", **shape, version="", vllm_version="", capture=size)
    engine: Any = None  # asked nothing
    frontend.buffers.recorder = Recorder(
        CapturedEngine(engine, frontend.buffers, info), RecordFiles(folder, 10**6), 1, True
    )
    return frontend.buffers.recorder


def test_an_aborted_request_is_recorded_with_all_rows_of_its_tokens(tmp_path: Path) -> None:
    frontend = Frontend()
    recorder, no_rows = (
        recorder_of(frontend, tmp_path),
        metrics.RECORD_DROPPED.labels(metrics._model, "no_rows")._value.get(),
    )
    for name in ("b", "early"):
        queue = frontend.add(name)
    several = frontend.add("c", n=2)
    frontend.step(prompt("b"), first_token("b"), prompt("0_c"), first_token("0_c"))
    frontend.step(output("b", 1, first=3), output("0_c", 1, first=3))
    frontend.step(output("b", 1))  # its row is still in the engine, as it is to come at the end
    for name in ("b", "early", "c"):
        frontend.processor.abort_requests([name], internal=True)
    # The engine's answers: what it has of these requests.
    frontend.step(output("b", 0, first=4, rows=1, finish=ABORT), output("early", 0, finish=ABORT))
    frontend.step(*(output(f"{index}_c", 0, finish=ABORT) for index in range(2)))
    recorder.close()
    assert take(several).outputs[0].routed_experts is None, "the client did not ask"
    assert take(queue).outputs[0].finish_reason == "abort"
    (file,) = tmp_path.iterdir()
    answers = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(answer["id"], answer["choices"][0]["token_ids"]) for answer in answers] == [
        ("b", [7, 0, 0]),
        ("c", [7, 0]),
    ]
    for answer in answers:
        (routing,) = collect(answer)
        assert (routing.index, routing.finish_reason) == (0, "abort")
        assert routing.rows[:, 0, 0].tolist() == [0, 1, 2, 3, 4][: 5 if answer["id"] == "b" else 4]
    assert metrics.RECORD_DROPPED.labels(metrics._model, "no_rows")._value.get() == no_rows + 1


def test_rows_that_only_the_record_needs_come_at_the_end(tmp_path: Path) -> None:
    """Not with a stop string, as the engine does not know where it ends the request."""
    frontend = Frontend()
    recorder = recorder_of(frontend, tmp_path)
    for stop in (None, "x"):
        request = request_of(f"stop {stop}", SamplingParams(stop=stop, output_kind=DELTA))
        frontend.processor.add_request(request, None, queue=RequestOutputCollector(DELTA, request.request_id))
        assert request.sampling_params is not None
        asked = OptIn.decode((request.sampling_params.extra_args or {})[OPT_IN_ARG])
        assert asked is not None
        assert (asked.prompt_start, asked.allow_missing, asked.final_only) == (0, True, stop is None)
    recorder.close()
