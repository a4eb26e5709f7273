"""A TCP proxy before a server, on this machine, that breaks connections as a network does."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

CHUNK_BYTES = 4096
SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.'
    b"</Message></Error>"
)


@dataclass(frozen=True)
class Fault:
    """What happens to one connection."""

    kind: str
    """``refuse``, ``cut`` (after some bytes from the client), ``cut_answer``, ``unavailable`` (HTTP 503), ``slow``,
    ``silent`` (nothing is answered), or ``none``."""
    num_bytes: int = 0
    """For ``cut``: bytes that pass; for ``slow``: bytes a second."""


class FaultyProxy:
    """Passes connections on to a server. The next faults are taken from a queue, one for each connection.

    Attributes:
        address: URL of the proxy.
        default: the fault of connections for which none is queued.
        num_connections: connections so far.
    """

    def __init__(self, server: tuple[str, int]) -> None:
        self.default = Fault("none")
        self.num_connections = 0
        self._server = server
        self._faults: deque[Fault] = deque()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def inject(self, faults: Sequence[Fault]) -> None:
        """Queue faults, and break the connections that are open, so that new ones meet them."""
        self._faults = deque(faults)
        for connection in list(self._open):
            _reset(connection)

    def close(self) -> None:
        """Stop."""
        _reset(self._listener)
        self.inject(())

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            try:
                fault = self._faults.popleft()
            except IndexError:
                fault = self.default
            threading.Thread(target=self._serve, args=(client, fault), daemon=True).start()

    def _serve(self, client: socket.socket, fault: Fault) -> None:
        self._open.add(client)
        with suppress(OSError):
            if fault.kind == "unavailable":
                _receive_request(client)
                client.sendall(
                    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(SLOW_DOWN) + SLOW_DOWN
                )
            elif fault.kind == "silent":
                while client.recv(CHUNK_BYTES):
                    pass
            elif fault.kind != "refuse":
                self._pass(client, fault)
        _reset(client)
        self._open.discard(client)

    def _pass(self, client: socket.socket, fault: Fault) -> None:
        with socket.create_connection(self._server) as server:
            answers = threading.Thread(target=_forward_answers, args=(server, client, fault), daemon=True)
            answers.start()
            num_left = fault.num_bytes
            while data := client.recv(CHUNK_BYTES):
                if fault.kind == "slow":
                    time.sleep(len(data) / fault.num_bytes)
                if fault.kind == "cut":
                    data, num_left = data[:num_left], num_left - len(data)
                server.sendall(data)
                if fault.kind == "cut" and num_left <= 0:
                    return
            server.shutdown(socket.SHUT_WR)
            answers.join()


def _forward_answers(server: socket.socket, client: socket.socket, fault: Fault) -> None:
    with suppress(OSError):
        while data := server.recv(CHUNK_BYTES):
            if fault.kind == "cut_answer" and not data.startswith(b"HTTP/1.1 100"):
                _reset(client)
                return
            client.sendall(data)
        client.shutdown(socket.SHUT_WR)


def _receive_request(client: socket.socket) -> None:
    """Receive a request as far as it comes at once, so that the answer is not lost in a reset."""
    head = b""
    while b"\r\n\r\n" not in head:
        data = client.recv(CHUNK_BYTES)
        if not data:
            return
        head += data
    headers, _, body = head.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in headers.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
    )
    if b"100-continue" in headers.lower():
        return
    while len(body) < length:
        data = client.recv(CHUNK_BYTES)
        if not data:
            return
        body += data


def _reset(connection: socket.socket) -> None:
    """Close a connection as a machine that fails does: the other side gets an error."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        connection.close()
