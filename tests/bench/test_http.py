"""The benchmark over HTTP: times are those of the bytes, no wrong answer counts as right, and the
table's figures."""

import base64
from typing import Any

import numpy as np
import orjson
import pytest

from bench.http import CASES, Case, figures, front_ends_of, given_rows, lines_of, requests_of
from bench.http_answers import Answer, Arrivals, Expected, Routing, read
from bench.http_load import Load, Request, Result
from bench.http_table import table
from routed_experts.protocol import codec
from tests.protocol.forms import encode

pytestmark = pytest.mark.release

LAYERS, TOP_K, EXPERTS = 3, 2, 16
P, G = 4, 3
WORDS = [" aaaa", " aaab", " aaac"]


def ids(rows: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, EXPERTS, (rows, LAYERS, TOP_K)).astype(np.int16)


def encoded(rows: np.ndarray, start: int, form: str = "object") -> Any:
    return encode(rows, fmt=form, dtype=rows.dtype.name, start=start)


def chunks(tokens: int = G, **changed: Any) -> list[dict[str, Any]]:
    """One choice, a token a chunk, and with each the rows that became known; `changed` are fields
    of the first rows."""
    events: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "text": word}]} for word in WORDS[:tokens]
    ]
    for index, event in enumerate(events[1:]):
        event["choices"][0]["routed_experts"] = encoded(ids(1, index), P + index)
    events[0]["prompt_routed_experts"] = encoded(ids(P), 0)
    if changed:
        events[1]["choices"][0]["routed_experts"].update(changed)
    return events


def head(kind: str, more: str = "transfer-encoding: chunked\r\n") -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n{more}\r\n".encode()


def chunked(parts: list[bytes]) -> list[bytes]:
    return [*(b"%x\r\n%b\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


def streamed(events: list[dict[str, Any]], done: bool = True) -> list[bytes]:
    """What uvicorn sends, a piece an event: the head, chunks, the end."""
    texts = [b"data: " + orjson.dumps(event) + b"\n\n" for event in events]
    return [
        head("text/event-stream; charset=utf-8"),
        *chunked(texts + [b"data: [DONE]\n\n"] * done),
    ]


def seen(pieces: list[bytes], layout: str = "split", n: int = 1) -> Answer:
    """What the benchmark makes of pieces that arrive at the times 0, 1, 2, …"""
    arrivals: Arrivals = [(float(index), piece) for index, piece in enumerate(pieces)]
    return read(arrivals, Expected(P, G, n, layout), Routing(LAYERS, TOP_K, EXPERTS), 5)


def test_streamed_rows_and_times() -> None:
    answer = seen(streamed(chunks()))
    assert (answer.fault, answer.rows) == ("", P + G - 1)
    assert answer.tokens == [[1.0, 2.0, 3.0]]  # the head came at 0
    assert (answer.first, answer.last) == (1.0, 5.0)
    assert answer.size == sum(map(len, streamed(chunks())))


def test_a_token_came_when_the_last_byte_of_its_event_did() -> None:
    raw = b"".join(streamed(chunks()))
    second = raw.index(WORDS[1].encode())
    answer = seen([raw[:second], raw[second : second + 1], raw[second + 1 :]])
    assert (answer.fault, answer.tokens) == ("", [[0.0, 2.0, 2.0]])


def test_unstreamed_choices() -> None:
    arrays = [encoded(ids(G - 1, seed), P) for seed in range(2)]
    choices = [
        {"index": i, "text": "".join(WORDS), "routed_experts": own} for i, own in enumerate(arrays)
    ]
    content = orjson.dumps({"choices": choices, "prompt_routed_experts": encoded(ids(P), 0)})
    parts = chunked([content[at : at + 7] for at in range(0, len(content), 7)])
    whole = [head("application/json", ""), content]
    for pieces in (whole, [head("application/json"), *parts]):
        answer = seen(pieces, n=2)
        assert (answer.fault, answer.rows, answer.tokens) == ("", P + 2 * (G - 1), [])
    assert seen([head("application/json"), *parts[:-1]], n=2).fault


def test_vllms_own_form() -> None:
    body = {
        "choices": [
            {
                "index": 0,
                "text": "".join(WORDS),
                "routed_experts": encoded(ids(P + G - 1).astype(np.uint8), 0, "npy"),
            }
        ]
    }
    answer = seen([b"HTTP/1.1 200 OK\r\n\r\n", orjson.dumps(body)], "joined")
    assert (answer.fault, answer.rows) == ("", P + G - 1)


def test_tokens_as_ids_with_all_rows_in_the_last_chunk() -> None:
    rows = encoded(ids(P + G - 1).astype(np.uint8), 0, "npy")
    events: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "token_ids": [5]}]},
        {"choices": [{"index": 0, "token_ids": [6, 7], "routed_experts": rows}]},
    ]
    answer = seen(streamed(events), "joined")
    assert (answer.fault, answer.rows) == ("", P + G - 1)
    assert answer.tokens == [[1.0, 2.0, 2.0]]
    del events[1]["choices"][0]["routed_experts"]
    assert seen(streamed(events), "joined").fault


def filled(value: int) -> str:
    return base64.b64encode(np.full((1, LAYERS, TOP_K), value, np.int16).tobytes()).decode()


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        (
            streamed([*chunks()[:2], {"choices": [{"index": 0, "text": WORDS[2]}]}]),
            "and the choices: 4 and [1]",
        ),
        (streamed(chunks(start=P + 1)), "start 5 instead of 4"),
        (streamed(chunks(missing=1)), "missing 1"),
        (streamed(chunks(data=filled(EXPERTS))), "no expert ids"),
        (streamed(chunks(data=filled(-1))), "no expert ids"),
        (streamed(chunks(data="AAAA")), "CodecError"),
        (streamed(chunks(tokens=2)), "[2] tokens, not 1 times 3"),
        (streamed([*chunks(), {"error": {"message": "lost"}}]), "lost"),
        (streamed(chunks(), done=False), "cut off"),
        (streamed(chunks())[:-2], "ValueError"),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n{}"], "400 Bad Request"),
        ([], "no answer"),
    ],
)
def test_what_is_wrong_is_a_fault(pieces: list[bytes], says: str) -> None:
    assert says in seen(pieces).fault


def result(role: str, sent: float, times: list[float]) -> Result:
    return Result(
        role,
        sent,
        Expected(3, len(times), 1, "split"),
        Answer(times[0], times[-1], 100, [times], rows=7),
    )


def test_figures_of_a_run() -> None:
    load = Load(
        [result("stream", 10.0, [10.5, 10.6, 10.8]), result("stream", 10.0, [10.7, 10.9, 12.0])],
        0.1,
        0.3,
    )
    run = figures(load, stream=True)
    expected = {"tokens_per_s": 6 / 2.0, "cpu_us": 0.3e6 / 6, "bytes": 200 / 6, "rows": 14}
    expected |= {"ttft_p50_ms": 600, "itl_p50_ms": 200, "itl_max_ms": 1100}
    assert {name: run[name] for name in expected} == pytest.approx(expected)


def test_beside_a_long_answer_only_what_happens_while_it_comes_counts() -> None:
    stream = result("stream", 0.0, [0.5, 1.9, 2.1, 2.2, 3.9])
    others = [
        result("other", sent, [sent + wait]) for sent, wait in ((1.8, 0.9), (2.1, 0.2), (3.2, 0.7))
    ]
    run = figures(Load([stream, *others, result("long", 1.0, [2.0, 2.5])], 0.1, 0.3), stream=True)
    assert (run["ttft_max_ms"], run["itl_max_ms"]) == pytest.approx((200, 100))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_sent(case: Case) -> None:
    variants = ["off", "captured", "returned", "input", "vllm"]
    ours, _ = lines_of(variants, ["streamed", "unstreamed"])
    routing = Routing(LAYERS, TOP_K, EXPERTS)
    for line in ours:
        requests = requests_of(case, line, 1, 100, routing)
        streams = [request for request in requests if request.role == "stream"]
        assert len(streams) == case.streams
        assert {len(request.prompt) for request in streams} == {case.prompt_len}
        if case.mixed:
            assert len(set(new_tokens_of(streams))) > 1
        asking = [b'"return_routed_experts"' in request.encoded() for request in requests]
        assert set(asking) == {line.rows == "split"}
        assert sum(request.apart for request in requests) == (case.long > 0)
        saying = [b"routed_experts_replay" in request.encoded() for request in requests]
        assert sum(saying) == (case.says_experts and line.variant == "input")

        others = requests_of(case, line, 2, 100, routing)
        assert new_tokens_of(requests) == new_tokens_of(others)
        assert not prompts_of(requests) & prompts_of(others)


def test_what_is_sent_to_front_ends() -> None:
    lines = front_ends_of(["streamed"])
    routing = Routing(LAYERS, TOP_K, EXPERTS)
    case = next(case for case in CASES if case.name == "64")
    asking = {}
    for line in lines:
        sent = [request.encoded() for request in requests_of(case, line, 1, 100, routing)]
        assert {body.partition(b" HTTP")[0] for body in sent} == {b"POST /inference/v1/generate"}
        asking[line.variant] = {b'"return_routed_experts"' in body for body in sent}
    # the front end in Rust returns them to every request
    ours = {"off": {False}, "returned": {True}, "at_end": {True}}
    assert asking == {**ours, "Rust: off": {False}, "Rust: returned": {False}}


def test_given_rows_have_distinct_experts() -> None:
    array = given_rows(50, Routing(LAYERS, TOP_K, EXPERTS))
    rows = codec.decode(array)
    assert rows.shape == (50, LAYERS, TOP_K)
    assert (rows[:, :, 0] != rows[:, :, 1]).all()
    assert 0 <= rows.min() <= rows.max() < EXPERTS


def test_beside_a_request_that_says_experts_what_happens_until_its_first_token_counts() -> None:
    stream = result("stream", 0.0, [0.5, 1.1, 1.4, 2.2, 3.9])
    run = figures(Load([stream, result("says experts", 1.0, [2.0, 2.5])], 0.1, 0.3), stream=True)
    assert run["itl_max_ms"] == pytest.approx(300)


def new_tokens_of(requests: list[Request]) -> list[int]:
    return [request.expected.new_tokens for request in requests]


def prompts_of(requests: list[Request]) -> set[tuple[int, ...]]:
    return {tuple(request.prompt) for request in requests}


def run_of(variant: str, cpu: float, **more: Any) -> dict[str, Any]:
    keys = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
    common = {
        "device": "here",
        "date": "today",
        "commit": "abc",
        "client_busy": 0.1,
        "baseline": "off",
    }
    numbers = {
        "tokens_per_s": 100.0,
        "cpu_us": cpu,
        "bytes": 10.0,
        "rows": 5,
        "faults": [],
        **dict.fromkeys(keys, 2.0),
    }
    return {
        "case": "64",
        "api_servers": 1,
        "mode": "streamed",
        "variant": variant,
        **common,
        **numbers,
        **more,
    }


def test_table_has_medians_beside_off_and_says_what_was_wrong() -> None:
    runs = [
        run_of("off", 40),
        run_of("off", 44),
        run_of("off", 42),
        run_of("captured", 43, faults=["lost"]),
    ]
    runs += [run_of("returned", cpu, tokens_per_s=90.0) for cpu in (60, 50)]
    lines = {
        line.split("|")[3].strip(): line
        for line in table(runs).splitlines()
        if line.startswith("| 64")
    }
    assert "| 42.0 |" in lines["off"]
    assert "| 55.0 | +13.0 |" in lines["returned"]
    assert "| 90.0 | -10.0 % |" in lines["returned"]
    assert "1 ANSWERS WRONG" in lines["captured"]
