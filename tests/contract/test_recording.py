"""What a server records of requests, as the commands for saved responses read it, while clients
notice nothing."""

import json
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.collect import Routing, collect
from routed_experts.protocol.saved import ModelInfo, read
from routed_experts.server.http.metrics import NotRecorded
from routed_experts.server.http.recording import record_queue, recording
from routed_experts.server.outputs.record_files import PART, RecordFiles
from routed_experts.server.tools.saved import opened
from routed_experts.server.tools.view import viewed_files
from tests.contract.engine import weights_for
from tests.contract.served import LAYER_IDS, rows_of, serving
from tests.e2e.harness import ASK, Server, prompt_of, wait_until

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
MESSAGES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me something about experts."}]
}
SAMPLED = {"temperature": 1.0}
FLAGS = ("--max-num-batched-tokens", "64", "--enable-scale-out")
PROMPT = prompt_of(40, 1)
START = 16
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 80}),
    (
        COMPLETIONS,
        {"prompt": [prompt_of(3, 3), prompt_of(70, 4)], "max_tokens": 4, "n": 2, **SAMPLED},
    ),
    (CHAT, {**MESSAGES, "max_tokens": 12, "n": 3, **SAMPLED}),
    (GENERATE, {"token_ids": prompt_of(17, 2), "sampling_params": {"max_tokens": 5}}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 3}),
    ("/v1/messages", {**MESSAGES, "max_tokens": 2}),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 30, "stop": ["a", "b", "c", "d"]}),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 5, "routed_experts_prompt_start": START, **ASK}),
    (CHAT, {**MESSAGES, "max_tokens": 5, **ASK}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 3, "routed_experts_histogram": True}),
]
(REQUEST_WITH_START,) = (
    at for at, (_, body) in enumerate(REQUESTS) if "routed_experts_prompt_start" in body
)
STREAMS = [(path, {**body, "stream": True}) for path, body in REQUESTS]
NUM_PROMPTS = 2 * (len(REQUESTS) + 1)  # one has two


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stops waits for its disk as long as a busy machine takes."""
    monkeypatch.setattr(record_queue, "_CLOSE_S", 120.0)


def record(folder: Path, *more: str) -> tuple[str, ...]:
    return "--routed-experts-record", str(folder), *more


def send(server: Server, path: str, body: dict[str, Any]) -> str:
    """The response's text, without what differs from one time to the next."""
    with server.client() as client:
        answer = client.post(
            path, json={"model": "tiny", "temperature": 0, **body}, headers={"X-Request-Id": "same"}
        )
    assert answer.status_code == 200, answer.text
    text = re.sub(r'("(created|created_at|completed_at)": ?)[\d.]+', r"\g<1>0", answer.text)
    if body.get("stream"):  # the choices' chunks come in any order
        text = "\n".join(sorted(text.splitlines()))
    return re.sub(r"\b(msg|rs|resp|chatcmpl)[-_][0-9a-f]{16,}\b|\b[0-9a-f]{32}\b", "ID", text)


def files_in(folder: Path) -> list[str]:
    assert not list(folder.glob(f"*{PART}"))
    return sorted(map(str, folder.glob("*.jsonl")))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for file in files_in(folder)
        for line in Path(file).read_text().splitlines()
    ]


def routings_in(folder: Path) -> list[list[Routing]]:
    return [answer.routings() for answer in read(opened(files_in(folder)), ModelInfo())]


def check(routing: Routing) -> None:
    """Every row is the one of its tokens."""
    tokens = [*(routing.prompt_token_ids or ()), *(routing.token_ids or ())]
    assert np.array_equal(routing.rows, rows_of(tokens[:-1], routing.start))


class Counts:
    """What was recorded and what was dropped since it was made: this process has the metrics of
    other tests' servers too."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = {name: self._now(name) for name in ("requests", "bytes", *NotRecorded)}

    def _now(self, name: str) -> int:
        if isinstance(name, NotRecorded):
            return int(self._server.metric("routed_experts_record_dropped_total", reason=name))
        return int(self._server.metric(f"routed_experts_recorded_{name}_total"))

    def recorded(self, name: str) -> int:
        return self._now(name) - self._before[name]

    def dropped(self) -> dict[str, int]:
        since = {reason: self._now(reason) - self._before[reason] for reason in NotRecorded}
        return {reason: count for reason, count in since.items() if count}


def test_all_that_is_asked_is_recorded_and_no_answer_changes(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "folder"
    with serving(tiny_model, *FLAGS) as server:
        expected = send_all(server)
    with serving(tiny_model, *FLAGS, *record(folder)) as server:
        counts = Counts(server)
        assert send_all(server) == expected
        wait_until(lambda: counts.recorded("requests") >= NUM_PROMPTS, "not all was recorded")
        num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        # which are counted after the request
        wait_until(lambda: counts.recorded("bytes") >= num_bytes, "not every byte was counted")
        assert counts.recorded("requests") == NUM_PROMPTS
        written = counts.recorded("bytes")
        assert counts.dropped() == {}

    (file,) = files_in(folder)
    assert Path(file).stat().st_size == written
    assert [path.stat().st_mode & 0o777 for path in (folder, Path(file))] == [0o700, 0o600]
    for line in lines_of(folder):
        assert line["routed_experts_info"]["layer_ids"] == LAYER_IDS
        assert (line["object"], line["model"]) == ("text_completion", "tiny")
    answers = routings_in(folder)
    check_answers(answers, asked_for=expected[REQUEST_WITH_START])
    with ExitStack() as stack:
        assert [shown.name for shown in viewed_files([str(folder)], stack)] == [file]


def send_all(server: Server) -> list[str]:
    return [send(server, path, body) for path, body in REQUESTS + STREAMS]


def check_answers(answers: list[list[Routing]], asked_for: str) -> None:
    """All rows of all choices are there, and those of the requests with a start are the same as
    in the response `asked_for`."""
    num_choices = [1, 2, 2, 3, 1, 1, 1, 1, 1, 1, 1]
    assert sorted(map(len, answers)) == sorted(2 * num_choices)
    for routing in chain.from_iterable(answers):
        check(routing)
        assert not routing.missing
    starts = [routing.start for (routing, *_) in answers]
    assert sorted(starts) == [0] * (NUM_PROMPTS - 2) + [START, START]
    (in_response,) = collect(json.loads(asked_for), prompt_start=START)
    whole, streamed = (routing for (routing, *_) in answers if routing.start == START)
    assert np.array_equal(whole.rows, in_response.rows)
    assert np.array_equal(streamed.rows, in_response.rows)


@contextmanager
def recording_weights(model: Path, folder: Path, *more: str) -> Iterator[Server]:
    with serving(model, "--enable-return-routed-expert-weights", *record(folder, *more)) as server:
        yield server


def test_weights_and_no_tokens(tiny_model: Path, tmp_path: Path) -> None:
    """Who asks for ids alone is recorded with ids alone."""
    with recording_weights(tiny_model, tmp_path, "--no-routed-experts-record-tokens") as server:
        bodies: list[dict[str, Any]] = [{}, ASK, {**ASK, "return_routed_expert_weights": True}]
        answers = [server.complete(prompt=PROMPT, max_tokens=6, **body) for body in bodies]
    tokens = [*PROMPT, *answers[1]["choices"][0]["token_ids"][:-1]]
    for line, routings, has_weights in zip(
        lines_of(tmp_path), routings_in(tmp_path), (True, False, True), strict=True
    ):
        assert "token_ids" not in json.dumps(line)
        for routing in routings:
            assert routing.rows.tolist() == rows_of(tokens).tolist()
            assert (routing.weights is not None) == has_weights
            if routing.weights is not None:
                assert np.array_equal(
                    routing.weights.view(np.int32), weights_for(routing.rows).view(np.int32)
                )


def test_shares_are_drawn_for_all_choices_of_a_prompt(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, *record(tmp_path, "--routed-experts-record-share", "0.5")) as server:
        for index in range(25):
            server.complete(prompt=prompt_of(5, index), max_tokens=2, n=2, **SAMPLED)
    recorded = routings_in(tmp_path)
    assert 0 < len(recorded) < 25
    assert {len(routings) for routings in recorded} == {2}


def test_beam_search_is_counted_once_and_not_recorded(tiny_model: Path, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "use_beam_search": True, "n": 2}
    with serving(tiny_model, *record(tmp_path)) as server:
        counts = Counts(server)
        # which fails behind that, as the arithmetic has no log-probabilities
        with server.client() as client:
            client.post(COMPLETIONS, json=body)
        assert counts.dropped() == {"beam_search": 1}
    assert not files_in(tmp_path)


def test_labels(tiny_model: Path, tmp_path: Path, documented: list[str]) -> None:
    """Of all choices of a prompt; a request's own wins over the server's, on routes that know it."""
    default = '--routed-experts-default={"routed_experts_label": "others"}'
    labelled: list[tuple[str, str | None]] = [
        (COMPLETIONS, "a/b: 'c' é"),
        (CHAT, "x" * 64),
        (GENERATE, "of tokens"),
        (COMPLETIONS, ""),
        (COMPLETIONS, None),
        ("/v1/responses", None),
    ]
    bodies = dict(reversed(REQUESTS))
    with serving(tiny_model, *FLAGS, *record(tmp_path), default) as server:
        for (path, label), stream in product(labelled, (False, True)):
            said = {} if label is None else {"routed_experts_label": label}
            send(server, path, {**bodies[path], **said, "stream": stream})
        (program,) = documented
        program = program.replace("http://localhost:8000", server.url).replace("tiny-moe", "tiny")
        subprocess.run(["bash", "-c", program], check=True, capture_output=True)
        with server.client() as client:
            assert "others" not in client.get("/metrics").text
    expected = Counter("others" if label is None else label for _, label in 2 * labelled)
    written = Counter(line.get("routed_experts_label", "") for line in lines_of(tmp_path))
    assert written == expected + Counter(["gsm8k"])


class SlowFiles(RecordFiles):
    """A disk that stands still until it is told to go on."""

    goes_on = threading.Event()

    def write(self, parts: Iterable[bytes]) -> int:
        assert self.goes_on.wait(60)
        return super().write(parts)


@pytest.mark.parametrize(
    ("module", "limit", "reason", "num_dropped"),
    [
        (record_queue, "_QUEUE_BYTES", NotRecorded.QUEUE, 3),
        (recording, "_RUNNING_BYTES", NotRecorded.MEMORY, 4),
    ],
)
def test_a_slow_disk_drops_and_slows_nobody(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    limit: str,
    reason: str,
    num_dropped: int,
) -> None:
    SlowFiles.goes_on.clear()
    monkeypatch.setattr(recording, "RecordFiles", SlowFiles)
    monkeypatch.setattr(module, limit, rows_of(PROMPT).nbytes + 100)
    with serving(tiny_model, *record(tmp_path)) as server:
        counts = Counts(server)
        for _ in range(4):
            (choice,) = server.complete(prompt=PROMPT, max_tokens=5, **ASK)["choices"]
            assert len(choice["token_ids"]) == 5  # while nothing is written
        assert counts.dropped() == {reason: num_dropped}
        SlowFiles.goes_on.set()
    assert len(lines_of(tmp_path)) == 4 - num_dropped


def test_the_bound(
    tiny_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is there counts, and stays."""
    (old := tmp_path / "old.jsonl").write_text("x" * 5000)
    bound = 400_000
    with serving(
        tiny_model, *record(tmp_path, "--routed-experts-record-bytes", str(bound))
    ) as server:
        counts = Counts(server)
        for _ in range(12):
            server.complete(prompt=PROMPT, max_tokens=5)

        def num_seen() -> int:
            """Recorded, in files that are complete, or dropped."""
            texts = [file.read_text() for file in tmp_path.glob("*.jsonl") if file != old]
            return sum(text.count("\n") for text in texts) + counts.dropped().get("full", 0)

        wait_until(
            lambda: num_seen() >= 12,
            lambda: f"{counts.dropped()} of 12, {[*tmp_path.iterdir()]}",
        )
        assert num_seen() == 12
        assert counts.dropped()["full"] > 4
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= bound
        assert old.read_text() == "x" * 5000
    assert caplog.text.count("reached --routed-experts-record-bytes") == 1


def test_a_disk_that_fails(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tiny_model, *record(folder := tmp_path / "folder")) as server:
        counts = Counts(server)
        folder.rename(away := tmp_path / "away")
        for _ in range(2):
            server.complete(prompt=PROMPT, max_tokens=5)
        wait_until(lambda: counts.dropped() == {"failed": 2}, counts.dropped)
        away.rename(folder)
        server.complete(prompt=PROMPT, max_tokens=5)
    assert len(lines_of(folder)) == 1
    assert caplog.text.count("cannot be recorded: [Errno 2]") == 1
