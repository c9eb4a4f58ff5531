"""What the serving processes of this machine hold in memory, by role."""

from contextlib import suppress
from urllib.parse import urlsplit

import psutil

from jobs.load.soak_watch import ROLES


def served_memory(url: str) -> dict[str, int]:
    """Resident bytes of the processes behind an endpoint of this machine, by role and pid.

    They are those of the node whose proxy listens on the port of `url`. Raises `ValueError` where there is none here.
    """
    port = urlsplit(url).port
    proxy = next((process for process in psutil.process_iter() if _listens(process, port)), None)
    if proxy is None or (node := proxy.parent()) is None:
        raise ValueError(f"no process of this machine that we may look at listens on the port of {url}")
    found = {}
    for process in node.children():
        with suppress(psutil.Error, IndexError):
            title = process.cmdline()[0]
            role = next((role for role, begin in ROLES.items() if title.startswith(begin)), None)
            if role is not None:
                found[f"{role} {process.pid}"] = process.memory_info().rss
    return found


def _listens(process: psutil.Process, port: int | None) -> bool:
    with suppress(psutil.Error, IndexError):
        if process.cmdline()[0].startswith(ROLES["proxy"]):
            listening = (c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
            return any(connection.laddr.port == port for connection in listening)
    return False
