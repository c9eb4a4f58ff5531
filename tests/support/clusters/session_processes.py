"""The processes of a Ray session: which are alive, and where they listen."""

import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest


def listeners(session: str) -> dict[int, set[str]]:
    """The addresses that a Ray session's processes listen on, by port; `session` is the session's folder."""
    ports: dict[int, set[str]] = {}
    for process in psutil.process_iter():
        try:
            if session in " ".join(process.cmdline()):
                for member in [process, *process.children(recursive=True)]:
                    for connection in member.net_connections("tcp"):
                        if connection.status == psutil.CONN_LISTEN:
                            ports.setdefault(connection.laddr.port, set()).add(connection.laddr.ip)
        except psutil.Error:
            continue
    return ports


def metrics_port(session: str, *, seconds: float = 60) -> int:
    """The port of the session's metrics agent, once it listens."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for path in Path(session).rglob("metrics_export_port_*"):
            if port := int(path.read_text() or 0):
                return port
        time.sleep(0.1)
    raise TimeoutError(f"no metrics agent in {session}")


def check_loopback_only(session: str) -> None:
    """Every port of the session is bound to loopback, and the metrics agent refuses on the other addresses."""
    port = metrics_port(session)
    ports = listeners(session)
    assert port in ports
    bound = {ip for ips in ports.values() for ip in ips}
    assert bound <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, ports
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    own_addresses = [
        a.address for group in psutil.net_if_addrs().values() for a in group if a.family == socket.AF_INET
    ]
    for address in own_addresses:
        if not address.startswith("127."):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), timeout=5)


def living_with(folder: str) -> list[str]:
    """The commands of the processes that hold `folder` in their command line or environment, zombies left out."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            command, environment = ((process / name).read_bytes() for name in ("cmdline", "environ"))
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and folder.encode() in command + environment:
                commands.append(command.replace(b"\0", b" ").decode())
    return commands
