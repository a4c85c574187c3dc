"""The port that several API processes share."""

import socket
import threading

from routed_experts.server.shared import close_for_all


class Listening(socket.socket):
    """A port for which this thread waits before it closes it, as it may for another thread."""

    def shutdown(self, how: int) -> None:
        self.late = Client(self)
        assert not self.late.is_connected.wait(0.2)  # clock: who is let in, is by then
        super().shutdown(how)


class Client(threading.Thread):
    def __init__(self, listening: socket.socket) -> None:
        super().__init__(daemon=True)
        self.address = listening.getsockname()
        self.is_connected = threading.Event()
        self.outcome = ""
        self.start()

    def run(self) -> None:
        try:
            with socket.create_connection(self.address, timeout=60) as connection:
                self.is_connected.set()
                self.outcome = connection.recv(10).decode()
        except OSError as error:
            self.outcome = type(error).__name__

    def learns(self) -> str:
        self.join()
        return self.outcome


def test_no_client_is_reset_when_the_port_closes() -> None:
    """One that has connected is served, and one that comes while the port closes is not let in."""
    with Listening() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        waiting = Client(listening)
        assert waiting.is_connected.wait(60)
        (connection,) = close_for_all(listening)
        with connection:
            connection.sendall(b"served")
        assert waiting.learns() == "served"
        assert listening.late.learns() == "ConnectionRefusedError"
