"""HTTP over a bare socket, for what no client would send."""

import re
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class RawHttp:
    """A server's address; `limit` seconds are the most that it may leave a client without a byte."""

    host: str
    port: int
    limit: float

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=self.limit)

    def exchange(self, *pieces: bytes, half_close: bool = False) -> bytes:
        """Send, then read until the server closes; raises `TimeoutError` if it goes silent without closing."""
        with self.connect() as peer:
            with suppress(ConnectionError):  # it may have answered and closed before all is sent
                for piece in pieces:
                    peer.sendall(piece)
                if half_close:
                    peer.shutdown(socket.SHUT_WR)
            return read_all(peer)

    def reset_after(self, *pieces: bytes, answered: int = 0) -> None:
        """Send, read `answered` bytes, and break the connection off with a reset."""
        with self.connect() as peer:
            for piece in pieces:
                peer.sendall(piece)
            if answered:
                peer.recv(answered)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def read_all(peer: socket.socket) -> bytes:
    parts = []
    with suppress(ConnectionResetError):
        while part := peer.recv(65536):
            parts.append(part)
    return b"".join(parts)


def statuses(answer: bytes) -> list[int]:
    """The statuses of the responses in an answer, in their order."""
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3})", answer)]


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    """A POST request that asks to close the connection; `length` is what Content-Length claims."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: test",
        "Connection: close",
        "Content-Type: application/json",
        *headers,
    ]
    if not any(h.lower().startswith("transfer-encoding") for h in headers):
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body
