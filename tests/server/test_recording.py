"""Aborted requests in recorded routing, through vLLM's own output processor."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import RequestOutputCollector

from routed_experts.capture.wire.message import OPT_IN_ARG, PROMPT_ROWS, OptIn, RowsOutput
from routed_experts.protocol.collect import collect
from routed_experts.protocol.models import CaptureInfo, RoutedExpertsInfo
from routed_experts.server.http import metrics
from routed_experts.server.http.engine import CapturedEngine
from routed_experts.server.http.recording.recording import Recorder
from routed_experts.server.outputs import record_files
from routed_experts.server.outputs.record_files import PART, FullError, RecordFiles, prepare
from tests.server.known import K, L
from tests.server.test_row_buffer import (
    ABORT,
    DELTA,
    Frontend,
    first_token,
    output,
    prompt,
    request_of,
    rows_of,
    rows_output,
    take,
)


def texts_in(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_line_that_the_disk_cuts_off_leaves_nothing(tmp_path: Path) -> None:
    files = RecordFiles(tmp_path, 10 << 20)
    files.write([b"one\n"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            files.write([b"2" * (4 << 20), b"\n"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    files.write([b"3" * 1000] * 100)  # more parts than are written at once
    files.write([b"four\n"])
    files.rotate(at_once=True)
    assert [*texts_in(tmp_path).values()] == ["one\n" + "3" * 100_000 + "four\n"]


@pytest.mark.parametrize(("name", "limit"), [("FILE_BYTES", 5), ("FILE_S", 0.0)])
def test_files_are_completed_by_size_and_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: float
) -> None:
    files = RecordFiles(tmp_path, 1000)
    files.write([b"line\n"])
    files.rotate()
    assert [path.suffix for path in tmp_path.iterdir()] == [PART]
    monkeypatch.setattr(record_files, name, limit)
    files.rotate()
    files.write([b"line\n"])
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl", PART]


def test_a_folder_that_others_may_write_to(tmp_path: Path) -> None:
    """They could put links there, and read or change what is recorded."""
    folder, link = tmp_path / "record", tmp_path / "link"
    link.symlink_to(folder)
    prepare(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    for mode, path in ((0o700, link), (0o770, folder), (0o707, folder)):
        folder.chmod(mode)
        with pytest.raises(OSError, match="a folder of this user that nobody else may write to"):
            prepare(path)


def recorder_of(frontend: Frontend, folder: Path, room: int = 10**6) -> Recorder:
    size = CaptureInfo(
        runner="v2", device="cpu", kv_slots=0, host_cache_bytes=0, device_bytes=0, pinned_bytes=0
    )
    shape: dict[str, Any] = {
        "num_layers": L,
        "top_k": K,
        "num_experts": 99,
        "layer_ids": list(range(L)),
    }
    info = RoutedExpertsInfo(model="tiny", **shape, version="", vllm_version="", capture=size)
    engine: Any = None  # asked nothing
    frontend.buffers.recorder = Recorder(
        CapturedEngine(engine, frontend.buffers, info), RecordFiles(folder, room), 1, True
    )
    return frontend.buffers.recorder


def unasked(n: int = 1) -> SamplingParams:
    """Of a client that does not ask for rows."""
    return SamplingParams(n=n, output_kind=RequestOutputKind.DELTA, detokenize=False)


def recorded_prompt(frontend: Frontend, choice: str) -> EngineCoreOutput:
    """The prompt's rows, as the engine sends them for what the recorder has opted in."""
    prompt_id = frontend.processor.request_states[choice].prompt_id
    return rows_output(RowsOutput(PROMPT_ROWS, prompt_id, choice), 0, rows_of(0, 3))


def test_an_aborted_request_is_recorded_with_all_rows_of_its_tokens(tmp_path: Path) -> None:
    frontend = Frontend()
    recorder, no_rows = (
        recorder_of(frontend, tmp_path),
        metrics.RECORD_DROPPED.labels(metrics._model, "no_rows")._value.get(),
    )
    for name in ("b", "early"):
        queue = frontend.add(name, params=unasked())
    several = frontend.add("c", n=2, params=unasked(n=2))
    frontend.step(
        recorded_prompt(frontend, "b"),
        first_token("b"),
        recorded_prompt(frontend, "0_c"),
        first_token("0_c"),
    )
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


def test_what_is_too_large_for_ever_is_told_from_what_has_no_room_now(tmp_path: Path) -> None:
    files = RecordFiles(tmp_path, 1000)
    files.write([b"x" * 300])
    with pytest.raises(OSError, match="more than the 1000 bytes"):
        files.write([b"y" * 400] * 3)
    with pytest.raises(FullError):
        files.write([b"y" * 400] * 2)
    assert files.write([b"z" * 400]) == 400
    files.rotate(at_once=True)
    assert "".join(path.read_text() for path in tmp_path.iterdir()) == "x" * 300 + "z" * 400


def test_nothing_is_collected_where_no_room_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What others have left in the folder takes all of it."""
    frontend = Frontend()
    recorder = recorder_of(frontend, tmp_path, room=0)
    assert "--routed-experts-record-bytes" in caplog.text
    num_full = metrics.RECORD_DROPPED.labels(metrics._model, "full")._value
    before = num_full.get()
    frontend.add("first", params=unasked())
    assert num_full.get() == before + 1
    recorder.close()


def test_rows_that_only_the_record_needs_come_at_the_end(tmp_path: Path) -> None:
    """Not with a stop string, as the engine does not know where it ends the request."""
    frontend = Frontend()
    recorder = recorder_of(frontend, tmp_path)
    for stop in (None, "x"):
        request = request_of(f"stop {stop}", SamplingParams(stop=stop, output_kind=DELTA))
        frontend.processor.add_request(
            request, None, queue=RequestOutputCollector(DELTA, request.request_id)
        )
        assert request.sampling_params is not None
        opt_in = OptIn.decode((request.sampling_params.extra_args or {})[OPT_IN_ARG])
        assert opt_in is not None
        assert (opt_in.prompt_start, opt_in.allow_missing, opt_in.final_only) == (
            0,
            True,
            stop is None,
        )
    recorder.close()


def test_a_failure_between_two_requests_does_not_end_the_thread_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotate = RecordFiles.rotate
    errors = iter([RuntimeError("nobody expected this")])

    def rotate_or_fail(files: RecordFiles, at_once: bool = False) -> None:
        for error in errors:
            raise error
        rotate(files, at_once)

    monkeypatch.setattr(RecordFiles, "rotate", rotate_or_fail)
    frontend = Frontend()
    recorder = recorder_of(frontend, tmp_path)
    for name in ("first", "second"):
        frontend.add(name)
        frontend.step(prompt(name), first_token(name))
        frontend.step(output(name, 0, finish=ABORT))
    recorder.close()
    (file,) = tmp_path.iterdir()
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == ["first", "second"]
