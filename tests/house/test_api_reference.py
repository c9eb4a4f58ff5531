"""docs/api.md says what the served OpenAPI document says, and nothing else: routes, fields, types, bounds, errors."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from schema_text import type_text

from actors.serving.gateway import api
from mbd_core.serving.api.openapi import MAY_BE_EMPTY, ORDERS, REQUESTS, openapi_document
from mbd_core.serving.api.replies import SHAPES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
DOCUMENT = openapi_document()
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
HERE = re.compile(r"""code="(\w+)"|Code = Literal\[(.*)\]|code = "[^"]*", "(\w+)"|, code = "(\w+)\"""")
ANSWERED = {*SHAPES, "FrameEvent", "FrameFields", "SlotFields"}
ASKED = SCHEMAS.keys() - ANSWERED  # `null` in a request's field is as if it were left out, and not named
NO_KEY = {"/health", "/ready", "/version", "/openapi.json", "/", "/playground.css", "/playground.js"}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" |")]


def tables() -> dict[str, dict[str, list[str]]]:
    """For each schema the rows that stand under a heading with its name, by field."""
    found: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for section in re.split(r"^#+ ", PAGE, flags=re.MULTILINE)[1:]:
        heading, *lines = section.splitlines()
        for name in re.findall(r"`(\w+)`", heading):
            for line in lines:
                if line.startswith("| `"):
                    row = cells(line)
                    assert row[0].strip("`") not in found[name], f"{name}: {row[0]} stands there twice"
                    found[name][row[0].strip("`")] = row
    return found


def test_the_page_has_every_schema_and_no_other() -> None:
    assert tables().keys() == SCHEMAS.keys()


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_field_has_its_type_its_bounds_and_its_default(name: str) -> None:
    rows, schema = tables()[name], SCHEMAS[name]
    assert rows.keys() == schema["properties"].keys()
    for field, described in schema["properties"].items():
        _, kind, default, *_ = rows[field]
        assert kind == type_text(described, null=name not in ASKED), f"{name}.{field}"
        needed = field in schema.get("required", ())
        assert (default in ("required", "always")) is needed, f"{name}.{field}"
        if described.get("default") not in (None, []) and not needed:
            assert default == f"`{json.dumps(described['default'])}`", f"{name}.{field}"


def test_the_page_has_every_route_with_its_key_body_and_answer() -> None:
    rows = {row[0].strip("`"): row[1:] for row in map(cells, re.findall(r"^\| `[A-Z]+ /.*$", PAGE, re.MULTILINE))}
    served = {f"{method} {route.path}" for route in api.routes for method in route.methods - {"HEAD"}}  # type: ignore[attr-defined]
    assert {re.sub(r"\{(\w+)(:path)?\}", r"{\1}", label) for label in served} == rows.keys()
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            key, body, answer = rows[f"{method.upper()} {path}"]
            assert key == ("none" if path in NO_KEY else "administrator's" if path in {*ORDERS, "/metrics"} else "any")
            asked = operation.get("requestBody")
            name = "" if asked is None else type_text(asked["content"]["application/json"]["schema"])
            assert body == name + (", or empty" if name.strip("`") in MAY_BE_EMPTY else "")
            for content in operation["responses"]["200"]["content"].values():
                shown = content["schema"].get("$ref", "Prometheus text").rpartition("/")[2]
                assert shown in answer


def test_the_page_has_every_error() -> None:
    """Each status that the document names, and each code that stands in the sources."""
    text = PAGE.partition("## Errors")[2].partition("\n### ")[0]
    errors = [cells(line) for line in text.splitlines() if re.match(r"\| \d", line)]
    listed = {code for row in errors for code in re.findall(r"`(\w+)`", row[1])}
    sources = "".join(
        path.read_text()
        for folder in ("mbd_core/serving", "mbd_core/engine", "actors")
        for path in (ROOT / folder).rglob("*.py")
    )
    used = {code for groups in HERE.findall(sources) for group in groups for code in re.findall(r"\w+", group)}
    assert used - {""} == listed
    statuses = {
        status
        for methods in DOCUMENT["paths"].values()
        for operation in methods.values()
        for status in operation["responses"]
    }
    assert statuses - {"200"} <= {status for row in errors for status in row[0].split(", ")}


def test_every_request_is_of_the_document() -> None:
    assert {kind.__name__ for kind in REQUESTS} <= SCHEMAS.keys()
