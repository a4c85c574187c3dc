"""Where arrays are fetched from. `tests/contract/test_references.py` tests with a server that the right bytes come."""

from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import StreamRequestHandler
from threading import Thread

import pytest

from routed_experts.protocol.fetch import FetchError, fetch

REFERENCE = {"url": "http://inside:1/llm/v1/routed_experts/rows/7", "shape": [1, 2, 2], "dtype": "uint8"}


@pytest.mark.parametrize("path", ["", "/", "/v1", "/a/b", "/a/b/v1/"])
def test_another_address_of_the_server(path: str) -> None:
    asked = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bytes(4))

    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        (thread := Thread(target=server.handle_request)).start()
        assert fetch(REFERENCE, base_url=f"http://127.0.0.1:{server.server_port}{path}").tolist() == [
            [[0, 0]],
            [[0, 0]],
        ]
        thread.join()
    prefix = path.rstrip("/").removesuffix("/v1")
    assert asked == [f"{prefix}/v1/routed_experts/rows/7?layers=0:2&tokens=0:1"]


def test_an_answer_that_is_not_http() -> None:
    class Nonsense(StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(b"nonsense\r\n")

    with HTTPServer(("127.0.0.1", 0), Nonsense) as server:
        (thread := Thread(target=server.handle_request)).start()
        with pytest.raises(FetchError, match="nonsense"):
            fetch(REFERENCE, base_url=f"http://127.0.0.1:{server.server_port}")
        thread.join()
