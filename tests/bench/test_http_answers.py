"""The benchmark's reading of answers: its times are those of the bytes, and no wrong answer counts as right."""

import base64
import io
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from bench.http_answers import Arrivals, Expected, Routing, read

pytestmark = pytest.mark.release

LAYERS, TOP_K, EXPERTS = 3, 2, 16
ROUTING = Routing(LAYERS, TOP_K, EXPERTS)
P, G = 4, 3
WORDS = [" aaaa", " aaab", " aaac"]


def ids(rows: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, EXPERTS, (rows, LAYERS, TOP_K)).astype(np.int16)


def in_object(rows: np.ndarray, start: int) -> dict[str, Any]:
    data = base64.b64encode(rows.tobytes()).decode()
    return {"data": data, "shape": list(rows.shape), "dtype": str(rows.dtype), "start": start, "missing": 0}


def in_form(rows: np.ndarray, start: int, form: str) -> Any:
    if form == "object":
        return in_object(rows, start)
    if form == "list":
        return rows.tolist()
    if form == "raw":
        return base64.b64encode(rows.tobytes()).decode()
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


def chunks(form: str = "object", tokens: int = G) -> list[dict[str, Any]]:
    """One choice, a token a chunk, and with each the rows that became known."""
    events: list[dict[str, Any]] = []
    for index in range(tokens):
        choice: dict[str, Any] = {"index": 0, "text": WORDS[index]}
        if index:
            choice["routed_experts"] = in_form(ids(1, index), P + index - 1, form)
        events.append({"choices": [choice]})
    events[0]["prompt_routed_experts"] = in_form(ids(P), 0, form)
    return events


def streamed(events: list[dict[str, Any]], done: bool = True) -> list[bytes]:
    """What uvicorn sends, a piece an event: the head, chunks, the end."""
    texts = [b"data: " + orjson.dumps(event) + b"\n\n" for event in events]
    texts += [b"data: [DONE]\n\n"] if done else []
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *(b"%x\r\n%b\r\n" % (len(text), text) for text in texts), b"0\r\n\r\n"]


def arriving(pieces: list[bytes]) -> Arrivals:
    return [(float(index), piece) for index, piece in enumerate(pieces)]


def unstreamed(body: dict[str, Any]) -> Arrivals:
    content = orjson.dumps(body)
    return arriving([b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(content) + content])


@pytest.mark.parametrize("form", ["object", "npy", "raw", "list"])
def test_streamed_rows_and_times(form: str) -> None:
    answer = read(arriving(streamed(chunks(form))), Expected(P, G, 1, "split", form), ROUTING, 5)
    assert answer.fault == ""
    assert answer.rows == P + G - 1
    assert answer.tokens == [[1.0, 2.0, 3.0]]  # the head came at 0
    assert (answer.first, answer.last) == (1.0, 5.0)
    assert answer.size == sum(map(len, streamed(chunks(form))))


def test_a_token_came_when_the_last_byte_of_its_event_did() -> None:
    raw = b"".join(streamed(chunks()))
    second = raw.index(WORDS[1].encode())
    pieces = [raw[:second], raw[second : second + 1], raw[second + 1 :]]
    answer = read(arriving(pieces), Expected(P, G, 1, "split"), ROUTING, 5)
    assert answer.fault == ""
    assert answer.tokens == [[0.0, 2.0, 2.0]]


def test_merged_tokens_count_as_what_they_are() -> None:
    first, second, third = chunks()
    merged = {"choices": [{**second["choices"][0], "text": WORDS[1] + WORDS[2]}]}
    merged["choices"][0]["routed_experts"] = in_object(ids(2), P)
    answer = read(arriving(streamed([first, merged])), Expected(P, G, 1, "split"), ROUTING, 5)
    assert answer.fault == ""
    assert answer.tokens == [[1.0, 2.0, 2.0]]
    assert third  # the merged chunk has taken its place


def test_pieces_without_text_carry_rows_and_no_tokens() -> None:
    first, *rest = chunks()
    prompt = ids(P)
    pieces = [
        {"choices": [{"index": 0, "text": ""}], "prompt_routed_experts": in_object(prompt[:3], 0)},
        {**first, "prompt_routed_experts": in_object(prompt[3:], 3)},
    ]
    answer = read(arriving(streamed([*pieces, *rest])), Expected(P, G, 1, "split"), ROUTING, 5)
    assert answer.fault == ""
    assert answer.rows == P + G - 1
    assert answer.tokens == [[2.0, 3.0, 4.0]]


def test_unstreamed_choices() -> None:
    choices = [{"index": i, "text": "".join(WORDS), "routed_experts": in_object(ids(G - 1, i), P)} for i in range(2)]
    body = {"choices": choices, "prompt_routed_experts": in_object(ids(P), 0)}
    answer = read(unstreamed(body), Expected(P, G, 2, "split"), ROUTING, 5)
    assert answer.fault == ""
    assert answer.rows == P + 2 * (G - 1)
    assert answer.tokens == []


@pytest.mark.parametrize("part", [1000, 7])
def test_unstreamed_in_parts(part: int) -> None:
    choice = {"index": 0, "text": "".join(WORDS), "routed_experts": in_object(ids(G - 1), P)}
    content = orjson.dumps({"choices": [choice], "prompt_routed_experts": in_object(ids(P), 0)})
    parts = [content[at : at + part] for at in range(0, len(content), part)]
    pieces = [b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"]
    pieces += [*(b"%x\r\n%b\r\n" % (len(one), one) for one in parts), b"0\r\n\r\n"]
    answer = read(arriving(pieces), Expected(P, G, 1, "split"), ROUTING, 5)
    assert answer.fault == ""
    assert answer.rows == P + G - 1
    assert read(arriving(pieces[:-1]), Expected(P, G, 1, "split"), ROUTING, 5).fault


def test_messagepack() -> None:
    arrays = [in_object(ids(n), start) for n, start in ((P, 0), (G - 1, P))]
    prompt, rows = [{**array, "data": base64.b64decode(array["data"])} for array in arrays]
    body = {"choices": [{"index": 0, "text": "".join(WORDS), "routed_experts": rows}], "prompt_routed_experts": prompt}
    content = msgspec.msgpack.encode(body)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/msgpack\r\n\r\n"
    answer = read(arriving([head, content]), Expected(P, G, 1, "split"), ROUTING, 5)
    assert answer.fault == ""
    assert answer.rows == P + G - 1


def test_vllms_own_form() -> None:
    rows = in_form(ids(P + G - 1).astype(np.uint8), 0, "npy")
    body = {"choices": [{"index": 0, "text": "".join(WORDS), "routed_experts": rows}]}
    answer = read(unstreamed(body), Expected(P, G, 1, "joined", "npy"), ROUTING, 5)
    assert answer.fault == ""
    assert answer.rows == P + G - 1


def without(events: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    events[index]["choices"][0].pop("routed_experts")
    return events


def changed(field: str, value: Any) -> list[dict[str, Any]]:
    events = chunks()
    events[1]["choices"][0]["routed_experts"][field] = value
    return events


IMPOSSIBLE = base64.b64encode(np.full((1, LAYERS, TOP_K), EXPERTS, np.int16).tobytes()).decode()
UNKNOWN = base64.b64encode(np.full((1, LAYERS, TOP_K), -1, np.int16).tobytes()).decode()


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        (streamed(without(chunks(), 2)), "rows of the prompt and the choices: 4 and [1]"),
        (streamed(changed("start", P + 1)), "start 5 instead of 4"),
        (streamed(changed("missing", 1)), "missing 1"),
        (streamed(changed("data", IMPOSSIBLE)), "no expert ids"),
        (streamed(changed("data", UNKNOWN)), "no expert ids"),
        (streamed(changed("data", "AAAA")), "ValueError"),
        (streamed(chunks(tokens=2)), "[2] tokens, not 1 times 3"),
        (streamed([*chunks(), {"error": {"message": "lost"}}]), "lost"),
        (streamed(chunks(), done=False), "cut off"),
        (streamed(chunks())[:-2], "ValueError"),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n{}"], "400 Bad Request"),
        ([], "no answer"),
    ],
)
def test_what_is_wrong_is_a_fault(pieces: list[bytes], says: str) -> None:
    answer = read(arriving(pieces), Expected(P, G, 1, "split"), ROUTING, 5)
    assert says in answer.fault


def test_rows_that_nobody_asked_for_are_a_fault() -> None:
    answer = read(arriving(streamed(chunks())), Expected(P, G, 1, "none"), ROUTING, 5)
    assert "rows of the prompt" in answer.fault
