"""Bodies with long arrays are read as `json.loads` reads them."""

import asyncio
import json
import threading
import time
from base64 import b64encode
from typing import Any

import msgspec
import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.testclient import TestClient

from routed_experts.protocol.input_fields import LongText
from routed_experts.protocol.models import BIAS, REPLAY
from routed_experts.server.http.long_body import LONG_BYTES, joined, parse, read
from routed_experts.server.http.request import MSGPACK, PackedRoute

LONG = "A" * LONG_BYTES
ARRAY = {"data": LONG, "shape": [1, 2, 3]}
BODIES: dict[str, Any] = {
    "an array": {"prompt": "data", REPLAY: ARRAY},
    "a list of arrays": {
        REPLAY: [ARRAY, {"id": "data"}, {**ARRAY, "data": LONG + "B"}],
        BIAS: ARRAY,
    },
    "a short array": {REPLAY: {"data": "AA"}, "prompt": LONG},
    "another field": {"messages": [{"content": [{"audio": {"data": LONG}}]}], REPLAY: ARRAY},
    "a text with the key": {"prompt": f'say "data": "{LONG}"', REPLAY: ARRAY},
    "a key that ends like it": {'x"data': LONG, 'x\\"data': LONG},
    "escapes": {REPLAY: {"data": LONG + "\n\u00e9\\"}},
    "no array": {REPLAY: "data", BIAS: ["data", LONG]},
    "a list": [ARRAY],
    "many keys": {"messages": [{"data": "A"}] * 5000, REPLAY: ARRAY},
    "many blanks": {REPLAY: {"data": LONG, "x": "data"}, "y": " " * 100},
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("separators", [(",", ":"), (" ,\n", "\t: ")])
def test_as_the_parser_reads_it(name: str, separators: tuple[str, str]) -> None:
    for is_ascii in (True, False):
        body = json.dumps(BODIES[name], separators=separators, ensure_ascii=is_ascii).encode()
        assert with_texts(parse(body)) == BODIES[name]


def with_texts(parsed: Any) -> Any:
    """With a text where a `LongText` is."""
    if isinstance(parsed, LongText):
        return str(parsed.text, "ascii")
    if isinstance(parsed, dict):
        return {name: with_texts(value) for name, value in parsed.items()}
    if isinstance(parsed, list):
        return list(map(with_texts, parsed))
    return parsed


def test_a_body_with_more_keys_than_arrays_is_the_parsers() -> None:
    keys = ",".join(['{"data":"A"}'] * 5000)
    body = f'{{"messages":[{keys}],"{REPLAY}":{json.dumps(ARRAY)}}}'.encode()
    assert parse(body)[REPLAY]["data"] == LONG


def test_a_text_that_stands_for_a_long_one_elsewhere() -> None:
    """The first is what a reader that knows the places, and nothing else, would take for a mark."""
    for at in range(40, 120):
        body = f'{{"{REPLAY}":{{"data":"cut out at {at}"}},"other":{{"data":"{LONG}"}}}}'.encode()
        assert with_texts(parse(body)) == json.loads(body)


def test_a_long_text_is_no_copy() -> None:
    body = json.dumps({"prompt": [1], REPLAY: [ARRAY, {"data": "AA"}]}).encode()
    text = parse(body)[REPLAY][0]["data"]
    assert isinstance(text, LongText)
    assert text.text.obj is body
    assert bytes(text[:8]) == b"AAAAAAAA"
    assert len(text) == len(LONG)
    assert LONG[:100] not in repr(text)


def test_in_the_event_loop_a_long_body_is_joined_and_read_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = json.dumps({"prompt": "a", REPLAY: ARRAY}).encode()
    parts = [long[at : at + 65536] for at in range(0, len(long), 65536)]
    loads = json.loads
    names: list[str] = []

    def noting(body: bytes) -> Any:
        names.append(threading.current_thread().name)
        return loads(body)

    monkeypatch.setattr(json, "loads", noting)
    assert asyncio.run(joined(parts)) == long
    assert asyncio.run(joined([b"a", b"b"])) == b"ab"
    asyncio.run(read(long, parse))
    asyncio.run(read(b'{"prompt": "a"}', parse))
    assert names == ["routed-experts-body", "MainThread"]


def test_a_field_that_is_there_twice() -> None:
    text = json.dumps(ARRAY)
    body = f'{{"{REPLAY}": {text}, "{REPLAY}": {{"data": "B"}}}}'.encode()
    assert parse(body) == {REPLAY: {"data": "B"}}


@pytest.mark.parametrize(
    "end", ["", '"', '"}', '"}}}', '" "}}', '"}} "data": "', '\\"}}', '\n"}}', '\xff"}}']
)
def test_what_is_no_json_is_refused_or_read_alike(end: str) -> None:
    body = f'{{"{REPLAY}": {{"data": "{LONG}{end}'.encode("latin-1")

    def outcome(read: Any) -> Any:
        try:
            return read(body)
        except ValueError as error:
            return type(error)

    expected = outcome(json.loads)
    if end not in ('\n"}}', '\xff"}}'):  # which are refused later, as they are no base64
        assert with_texts(outcome(parse)) == expected


def test_a_long_array_does_not_hold_up_others() -> None:
    body = json.dumps({REPLAY: {"data": "A" * 32_000_000}}).encode()

    def seconds(read: Any) -> float:
        begun = time.process_time()
        read(body)
        return time.process_time() - begun

    assert min(seconds(parse) for _ in range(5)) < 0.5 * min(seconds(json.loads) for _ in range(5))


def test_a_long_body_in_messagepack_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where bytes that are long are in no array: they become text."""
    encode = msgspec.json.encode
    names: list[str] = []

    def noting(body: Any) -> bytes:
        names.append(threading.current_thread().name)
        return encode(body)

    monkeypatch.setattr(msgspec.json, "encode", noting)
    app = FastAPI()
    router = APIRouter(route_class=PackedRoute)

    @router.post("/")
    async def length(raw_request: Request) -> int:
        return len((await raw_request.json())["other"])

    app.include_router(router)
    with TestClient(app) as client:
        for other in (b"short", b"A" * LONG_BYTES):
            content = msgspec.msgpack.encode({"prompt": "a", "other": other})
            answer = client.post("/", content=content, headers={"Content-Type": MSGPACK})
            assert answer.json() == len(b64encode(other))
    assert names[1] == "routed-experts-body" != names[0]
