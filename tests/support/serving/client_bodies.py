"""The bodies that clients sent, as tests/serving/api/client_bodies.jsonl keeps them: every field, and no text."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recording_proxy import Exchange

FILE = Path(__file__).resolve().parents[2] / "serving" / "api" / "client_bodies.jsonl"
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
LONGEST = 48  # characters of a text that is kept
TEXTS = frozenset(
    {"content", "description", "input", "instructions", "prompt", "system", "text"}
)  # which are never kept
WHOLE = frozenset({"pattern", "regex", "ebnf"})  # which mean something at any length
ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{24,}")


@dataclass(frozen=True)
class Body:
    """What a client sent to a route when it was asked for a kind of answer."""

    client: str
    kind: str
    route: str
    body: dict[str, Any]

    @property
    def fields(self) -> set[str]:
        """The paths of its fields, as `messages.*.content`; what a schema or an object of a user's has is none."""
        return set(_paths(self.body))


def _paths(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{path}{key}"
            if key not in (
                "parameters",
                "input_schema",
                "schema",
                "json",
                "json_schema",
                "client_metadata",
                "metadata",
            ):
                yield from _paths(inner, f"{path}{key}.")
            elif key == "json_schema" and isinstance(inner, dict):  # of a response_format
                yield from (f"{path}{key}.{name}" for name in inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _paths(inner, f"{path}*.")


def _shortened(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _shortened(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shortened(inner) for inner in value]
    if not isinstance(value, str) or key in WHOLE:
        return value
    if key == "arguments":
        return "{}"
    return "text" if key in TEXTS or len(value) > LONGEST else ID.sub("0", value)


def bodies_of(client: str, kind: str, exchanges: Iterable[Exchange]) -> list[Body]:
    """The bodies of a client's requests, but for those without a field that an earlier one lacks."""
    bodies: list[Body] = []
    for exchange in exchanges:
        if exchange.path in ROUTES and isinstance(exchange.body, dict):
            body = Body(client, kind, exchange.path, _shortened(exchange.body))
            known = {path for other in bodies if other.route == body.route for path in other.fields}
            if not body.fields <= known:
                bodies.append(body)
    return bodies


def read_bodies(path: Path) -> list[Body]:
    return [Body(**json.loads(line)) for line in path.read_text().splitlines()]


def write_bodies(path: Path, bodies: Iterable[Body]) -> None:
    lines = [json.dumps(vars(body), ensure_ascii=False) + "\n" for body in bodies]
    path.write_text("".join(lines))
