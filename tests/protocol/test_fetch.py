"""Where arrays are fetched from. `tests/contract/test_references.py` tests with a server that the
right bytes come."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, StreamRequestHandler
from threading import Thread
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.batch import join_turns
from routed_experts.protocol.fetch import FetchError, Range, Span, fetch, fetch_spans
from routed_experts.protocol.routing import RoutingError

REFERENCE = {"url": "routed_experts/rows/7", "shape": [1, 2, 2], "dtype": "uint8"}
NOBODY = "http://127.0.0.1:1/v1"


@contextmanager
def running(handler: type[BaseRequestHandler]) -> Iterator[int]:
    """The port of a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def serving(
    *answers: tuple[int, dict[str, str]], content: bytes = bytes(4)
) -> Iterator[tuple[int, list[tuple[str, Any]]]]:
    """The port of a server that gives these answers, with their headers and `content`, and what it
    was asked: path and key."""
    requests, left = [], list(answers)

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append((self.path, self.headers["Authorization"]))
            status, headers = left.pop(0)
            self.send_response(status)
            for header in headers.items():
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(content)

    with running(Proxy) as port:
        yield port, requests


@contextmanager
def serving_ranges(file: bytes, says_length: bool) -> Iterator[int]:
    """The port of a server that answers each request for a range of `file`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            part = file[first : last + 1]
            self.send_response(206)
            if says_length:
                self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part)

    with running(Handler) as port:
        yield port


def test_the_url_is_relative_to_the_base_of_the_api() -> None:
    bases = ("/v1", "/v1/", "/a/b/v1")
    with serving(*[(200, {})] * len(bases)) as (port, requests):
        for base in bases:
            array = fetch(REFERENCE, base_url=f"http://127.0.0.1:{port}{base}", api_key="k")
            assert array.tolist() == [[[0, 0]], [[0, 0]]]
    query = "routed_experts/rows/7?layers=0:2&tokens=0:1"
    assert requests == [(f"{base.rstrip('/')}/{query}", "Bearer k") for base in bases]


def test_a_key_goes_to_the_origin_of_base_url_alone() -> None:
    """Whatever a reference says, and wherever the server redirects."""
    with serving((200, {})) as (port, requests):
        here = f"localhost:{port}"
        for url in (f"//{here}/rows/7", "/rows/7", f"@{here}/7", "../7", "file:///etc/passwd"):
            with pytest.raises(ValueError, match="relative"):
                fetch({**REFERENCE, "url": url}, base_url=NOBODY, api_key="k")
        with serving((302, {"Location": f"http://localhost:{port}/elsewhere"})) as (first, _):
            fetch(REFERENCE, base_url=f"http://127.0.0.1:{first}/v1", api_key="k")
    assert requests == [("/elsewhere", None)]


def test_a_signed_url_gets_no_key_and_stands_in_no_message() -> None:
    with serving((206, {}), (403, {})) as (port, requests):
        signed = f"http://127.0.0.1:{port}/7.npy?X-Amz-Signature=abc"
        reference = {**REFERENCE, "url": signed, "uri": "s3://bucket/7.npy"}
        options = {"base_url": NOBODY, "api_key": "k"}
        assert fetch(reference, **options).tolist() == [[[0, 0]], [[0, 0]]]
        with pytest.raises(FetchError, match=r"s3://bucket/7\.npy: 403") as error:
            fetch(reference, **options)
    assert requests == [("/7.npy?X-Amz-Signature=abc", None)] * 2
    assert (error.value.status, "Signature" in str(error.value)) == (403, False)


@pytest.fixture
def turns(tmp_path: Path) -> tuple[list[dict[str, Any]], np.ndarray]:
    """References to the files of two turns, the second of which repeats two rows, and all rows."""
    rows = np.arange(3 * 12 * 2, dtype=np.int16).reshape(3, 12, 2)
    references = []
    for start, end in ((0, 5), (5, 8), (6, 10), (10, 10), (10, 12)):
        path = tmp_path / f"{start}-{end}.npy"
        np.save(path, np.ascontiguousarray(rows[:, start:end]))
        fields = {"start": start, "shape": [end - start, 3, 2], "dtype": "int16"}
        references.append({"path": str(path), **fields})
    return references, rows


@pytest.mark.parametrize("layers", [None, (1, 3), (2, 2)])
@pytest.mark.parametrize("tokens", [None, (0, 3), (4, 11), (7, 7), (9, 12)])
def test_a_rank_reads_its_layers_and_tokens_of_several_turns(
    turns: tuple[list[dict[str, Any]], np.ndarray], layers: Range | None, tokens: Range | None
) -> None:
    references, rows = turns
    part = rows[slice(*(layers or (0, 3))), slice(*(tokens or (0, 12)))]
    fetched = fetch_spans(join_turns(references), layers=layers, tokens=tokens)
    assert np.array_equal(fetched, part)


def test_turns_are_joined_without_reading_an_array(
    turns: tuple[list[dict[str, Any]], np.ndarray],
) -> None:
    references = [{**reference, "path": "/nowhere"} for reference in turns[0]]
    spans = join_turns(references)
    assert [(span.first, span.end) for span in spans] == [(0, 5), (0, 3), (2, 4), (0, 2)]
    assert [span.reference for span in spans] == [*references[:3], references[4]]
    with pytest.raises(RoutingError, match="a gap: rows up to 5, and a reference that begins at 6"):
        join_turns([references[0], references[2]])
    with pytest.raises(RoutingError, match="rows of shapes"):
        join_turns([references[0], {**references[1], "shape": [3, 9, 2]}])


def test_a_span_beyond_its_array() -> None:
    with pytest.raises(ValueError, match="rows of each of spans must be within 0 and 1"):
        fetch_spans([Span(REFERENCE, 0, 1 << 40)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [10, 1 << 20, 4]}, r"Expected `int` <= 4096 - at `\$.shape\[1\]`"),
        ({"shape": [10, 4, 1 << 20]}, r"Expected `int` <= 32768 - at `\$.shape\[2\]`"),
        ({"dtype": "int64"}, "Invalid enum value 'int64'"),
        ({"path": 5}, r"Expected `str | null`, got `int` - at `\$.path`"),
    ],
)
def test_what_is_no_reference(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"not what the server sends: .*{message}"):
        fetch({**REFERENCE, **change}, base_url=NOBODY)


@pytest.mark.parametrize("shape", [[1, 1, 2], [1, 2, 3]])
def test_another_number_of_bytes_is_refused(shape: list[int]) -> None:
    with serving((200, {}), (200, {"Content-Length": "4"})) as (port, _):
        for _ in range(2):
            with pytest.raises(FetchError, match="another number of bytes"):
                fetch({**REFERENCE, "shape": shape}, base_url=f"http://127.0.0.1:{port}/v1")


@pytest.mark.parametrize("says_length", [False, True])
def test_parts_of_a_signed_url(says_length: bool) -> None:
    """Several at once."""
    array = np.random.default_rng(0).integers(0, 128, (5, 3000, 4), np.int16)
    file = bytes(128) + array.tobytes()
    reference: dict[str, Any] = {"shape": [3000, 5, 4], "dtype": "int16"}
    with serving_ranges(file, says_length) as port:
        reference["url"] = f"http://127.0.0.1:{port}/7.npy?X-Amz-Signature=abc"
        for layers, tokens in [((0, 5), (0, 3000)), ((1, 4), (500, 2777)), ((2, 3), (1, 2))]:
            part = fetch(reference, layers=layers, tokens=tokens)
            assert np.array_equal(part, array[slice(*layers), slice(*tokens)])


def test_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FetchError, match="has expired, or is on another machine"):
        fetch({"path": str(tmp_path / "pipe"), "shape": [1, 2, 2], "dtype": "uint8"})


def test_an_array_that_came_inline_is_no_reference() -> None:
    """Where a store is full, arrays come inline to who asked for references."""
    inline = {"data": "AAAAAA==", "shape": [1, 2, 2], "dtype": "uint8", "start": 0, "missing": 0}
    for read in (lambda: fetch(inline, base_url=NOBODY), lambda: fetch(inline, by_uri=True)):
        with pytest.raises(ValueError, match=r"came inline: decode it with .*codec\.decode"):
            read()


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (404, r"404 .*: is base_url right\? It ends in /v1"),
        (410, r"410 .*: it has expired, was deleted or is in another machine's folder"),
        (500, r"500 Internal Server Error$"),
    ],
)
def test_what_a_status_of_the_server_means(status: int, hint: str) -> None:
    with serving((status, {})) as (port, _), pytest.raises(FetchError, match=hint) as raised:
        fetch(REFERENCE, base_url=f"http://127.0.0.1:{port}/v1")
    assert raised.value.status == status


def test_without_an_address() -> None:
    with pytest.raises(FetchError, match="base_url"):
        fetch(REFERENCE, api_key="k")


def test_an_answer_that_is_not_http() -> None:
    class Nonsense(StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(b"nonsense\r\n")

    with running(Nonsense) as port, pytest.raises(FetchError, match="nonsense"):
        fetch(REFERENCE, base_url=f"http://127.0.0.1:{port}/v1")


def saved(path: Path, array: np.ndarray, start: int, **more: str) -> dict[str, Any]:
    """A reference to the file of an array [L, n, K]."""
    np.save(path, array)
    num_layers, num_rows, top_k = array.shape
    fields = {"shape": [num_rows, num_layers, top_k], "dtype": array.dtype.name, "start": start}
    return {"path": str(path), **fields, **more}


def test_a_row_that_is_missing_in_one_turn_stays_so_beside_narrower_ids(tmp_path: Path) -> None:
    """-1 is no expert 255."""
    narrow = np.full((2, 3, 2), 7, np.uint8)
    missing = np.full((2, 4, 2), -1, np.int16)
    turns = [saved(tmp_path / "1.npy", narrow, 0), saved(tmp_path / "2.npy", missing, 3)]
    rows = fetch_spans(join_turns(turns))
    assert rows.dtype == np.int16
    assert rows[0, :, 0].tolist() == [7, 7, 7, -1, -1, -1, -1]


def test_weights_do_not_become_ids(tmp_path: Path) -> None:
    ids, weights = np.full((2, 3, 2), 7, np.int16), np.full((2, 3, 2), 0.7, np.float32)
    turns = [saved(tmp_path / "1.npy", ids, 0), saved(tmp_path / "2.npy", weights, 3)]
    with pytest.raises(ValueError, match="fetch them apart"):
        fetch_spans(join_turns(turns))


def test_references_out_of_order_or_of_two_choices_are_no_conversation(tmp_path: Path) -> None:
    def reference(start: int, end: int, part: str) -> dict[str, Any]:
        return {"start": start, "shape": [end - start, 2, 2], "dtype": "int16", "part": part}

    prompt, short, long = (
        reference(0, 5, "prompt"),
        reference(5, 8, "generated"),
        reference(5, 9, "generated"),
    )
    assert len(join_turns([prompt, short])) == 2
    for turns in ([short, prompt], [prompt, short, long], [prompt, long, short]):
        with pytest.raises(RoutingError, match="in order, of one choice each turn"):
            join_turns(turns)
