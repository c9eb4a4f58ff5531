"""The table of docs/reference/clients.md, from tests/clients/clients.toml and the recorded bodies."""

from pathlib import Path

from client_bodies import FILE, read_bodies
from client_installs import CLIENTS, Client

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "clients.md"
COLUMNS = ("chat", "stream", "tools", "structured")
HEAD = "| client | " + " | ".join(COLUMNS) + " | also | what is missing |\n|---|" + "---|" * (len(COLUMNS) + 2) + "\n"


def _row(client: Client, has_streamed: bool) -> str:
    registry = "npm" if client.is_npm else "PyPI"
    kinds = {*client.kinds, "stream"} if has_streamed else client.kinds
    marks = ["yes" if column in kinds else "" for column in COLUMNS]
    others = ", ".join(kind for kind in client.kinds if kind not in COLUMNS)
    return "| " + " | ".join([f"{client.versions} ({registry})", *marks, others, client.missing]) + " |\n"


def table() -> str:
    streaming = {body.client for body in read_bodies(FILE) if body.body.get("stream")}
    return HEAD + "".join(_row(client, client.name in streaming) for client in CLIENTS)


def with_table(page: str) -> str:
    """The page with the present table instead of its own."""
    start = page.index("| client |")
    end = page.find("\n\n", start)
    return page[:start] + table() + ("" if end < 0 else page[end + 1 :])
