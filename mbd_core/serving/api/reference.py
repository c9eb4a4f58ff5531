"""docs/reference/api.md: the tables of its routes, its errors and its objects, from the OpenAPI document.

    python -m mbd_core.serving.api.reference docs/reference/api.md

Tables between `<!-- NAMES -->` and `<!-- end -->` are replaced. NAMES is `routes`, `errors`, `documented`, or the
names of objects that share a table. The text outside is written by hand.
"""

import html
import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mbd_core.serving.api.chat_fields import TemplateFields, ToolFields
from mbd_core.serving.api.documented_fields import DOCUMENTED, SERVERS
from mbd_core.serving.api.errors import ERRORS
from mbd_core.serving.api.messages import MessagesRequest, PromptFields
from mbd_core.serving.api.openapi import ROUTES, ApiRoute, openapi_document
from mbd_core.serving.api.parsing import Ignored, Only, Strict
from mbd_core.serving.api.requests import ChatRequest, CompletionRequest, GenerationRequest
from mbd_core.serving.api.responses import ResponsesRequest
from mbd_core.tables import Table, markdown

TABLE = re.compile(r"<!-- (?!end)([\w ,]+) -->\n.*?<!-- end -->\n", re.DOTALL)
MOST_INLINE = 4  # members of a small object


def filled(page: str) -> str:
    """The page with new tables. Raises `ValueError` unless it has exactly one table for each object."""
    tables = Tables()
    names = [name for names in TABLE.findall(page) for name in names.split(", ")]
    if sorted(names) != sorted(tables.names):
        missing, unknown = set(tables.names) - set(names), set(names) - set(tables.names)
        raise ValueError(f"the page lacks {sorted(missing)} and has {sorted(unknown)}, which are no objects")
    return TABLE.sub(lambda match: f"<!-- {match[1]} -->\n{tables.table(match[1].split(', '))}<!-- end -->\n", page)


class Tables:
    """The tables of the OpenAPI document.

    `GenerationRequest` holds the fields that several routes share. A small object without descriptions has no table;
    its fields are shown inline.
    """

    def __init__(self) -> None:
        self._schemas: dict[str, Any] = openapi_document()["components"]["schemas"]
        self._inline = {name for name, schema in self._schemas.items() if self._is_small(name, schema)}
        for name in ("ChatRequest", "CompletionRequest"):
            route_fields = self._schemas[name]["properties"]
            shared = ("max_tokens", "logprobs")  # their types differ between routes
            self._schemas[name] = self._without_fields(name, GenerationRequest.model_fields.keys() - shared)
            other_fields = self._schemas[name]["properties"]
            generation = {field: schema for field, schema in route_fields.items() if field not in other_fields}
        self._schemas["GenerationRequest"] = {"required": ["model"], "properties": generation}
        self._schemas["TokenizeRequest"] = self._without_fields(
            "TokenizeRequest", ToolFields.model_fields | TemplateFields.model_fields
        )
        self._schemas["CountTokensRequest"] = self._without_fields("CountTokensRequest", PromptFields.model_fields)

    def _without_fields(self, name: str, fields: Collection[str]) -> dict[str, Any]:
        schema = self._schemas[name]
        return schema | {"properties": {f: s for f, s in schema["properties"].items() if f not in fields}}

    def _is_small(self, name: str, schema: Mapping[str, Any]) -> bool:
        fields = schema["properties"].values()
        replies = {route.reply.__name__ for route in ROUTES if route.reply is not None}
        return name not in replies and len(fields) <= MOST_INLINE and not any("description" in f for f in fields)

    @property
    def names(self) -> list[str]:
        """The tables that the page must have."""
        return ["routes", "errors", "documented", *(name for name in self._schemas if name not in self._inline)]

    def table(self, names: Sequence[str]) -> str:
        """One table of these objects."""
        heads, rows = self.columns(names)
        return markdown([Table(columns=heads, rows=[*rows])])

    def columns(self, names: Sequence[str]) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        """The heads and rows of the table of these objects."""
        if names == ["routes"]:
            return ("route", "key", "body", "reply", ""), map(_route_row, ROUTES)
        if names == ["errors"]:
            errors = ((str(e.status), ", ".join(f"`{code}`" for code in e.codes), e.meaning) for e in ERRORS)
            return ("status", "code", ""), errors
        if names == ["documented"]:
            return ("of", "routes", "here", "fields"), _documented_rows()
        if len(names) == 1:
            return ("field", "type", ""), self._rows(names[0])
        rows = []
        for name in names:
            first, *other_rows = self._rows(name)
            rows += [(f"`{name}`", *first), *(("", *row) for row in other_rows)]
        return ("object", "field", "type", ""), rows

    def _rows(self, name: str) -> list[tuple[str, str, str]]:
        """A row for each description, required fields first and in bold. If the fields of a row differ in type, each
        name is followed by its type."""
        schema = self._schemas[name]
        required = schema.get("required", ())
        grouped: dict[tuple[bool, str], dict[str, str]] = {}
        for field, field_schema in schema["properties"].items():
            meaning = " ".join(field_schema.get("description", "").split())
            if field_schema.get("default") is not None:
                meaning += f"; default `{json.dumps(field_schema['default'])}`"
            kind = self.type_text(field_schema, null="default" not in field_schema)
            cell = f"**`{field}`**" if field in required else f"`{field}`"
            grouped.setdefault((field not in required, meaning), {})[cell] = kind
        rows = []
        for (_, meaning), kinds in sorted(grouped.items(), key=lambda item: item[0][0]):
            if len(set(kinds.values())) == 1:
                rows.append((", ".join(kinds), next(iter(kinds.values())), meaning))
            else:
                rows.append((", ".join(f"{field} ({kind})" for field, kind in kinds.items()), "", meaning))
        return rows

    def type_text(self, schema: Mapping[str, Any], *, null: bool = True) -> str:
        """The types and bounds of a value. `null=False` drops `null` from a union, because an omitted request field is
        null."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in self._inline:
                return f"`{name}`"
            fields = self._schemas[name]["properties"].items()
            return "{" + ", ".join(f"`{field}`: {self.type_text(s)}" for field, s in fields) + "}"
        forms = schema.get("anyOf") or schema.get("oneOf")
        if forms:
            members = [form for form in forms if null or form != {"type": "null"}]
            return " or ".join(dict.fromkeys(map(self.type_text, members)))
        if "const" in schema:
            return f"`{json.dumps(schema['const'])}`"
        if "enum" in schema:
            values = [value for value in schema["enum"] if null or value is not None] or [None]
            return " or ".join(f"`{json.dumps(value)}`" for value in values)
        kind = str(schema.get("type", "any value"))
        if kind == "array":
            items = self.type_text(schema.get("items", {}))
            text = f"list of ({items})" if " or " in items or ", " in items else f"list of {items}"
            return text + _range(schema.get("minItems"), schema.get("maxItems"), " items")
        if kind == "string":
            pattern = f", `{schema['pattern']}`" if "pattern" in schema else ""
            return kind + _range(schema.get("minLength"), schema.get("maxLength"), " characters") + pattern
        if kind in ("integer", "number"):
            most = schema.get("maximum")
            if "exclusiveMaximum" in schema:
                most = schema["exclusiveMaximum"] - 1
            return kind + _range(schema.get("minimum"), most, "")
        return kind


def _route_row(route: ApiRoute) -> tuple[str, ...]:
    body = "" if route.body is None else f"`{route.body.__name__}`" + (", or empty" if route.may_be_empty else "")
    reply = "" if route.reply is None else f"`{route.reply.__name__}`"
    return f"`{route.method.upper()} {route.path}`", route.key, body, reply, route.note


def _documented_rows() -> Iterable[Sequence[str]]:
    """The fields that other servers document: the servers, the routes, and the treatment of the field here."""
    kinds: dict[str, type[Strict]] = {
        "chats": ChatRequest,
        "completions": CompletionRequest,
        "responses": ResponsesRequest,
        "messages": MessagesRequest,
    }
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name in sorted({name for names in DOCUMENTED.values() for name in names}):
        routes_by_verdict: dict[str, list[str]] = {}
        for route, kind in kinds.items():
            if name in kind.model_fields:
                routes_by_verdict.setdefault(_verdict(kind, name), []).append(route)
        by_route = [names.get(name, ()) for names in DOCUMENTED.values()]
        servers = ", ".join(server for server in SERVERS if any(server in documents for documents in by_route))
        for verdict, routes in routes_by_verdict.items():
            rows.setdefault((verdict, servers, ", ".join(routes)), []).append(f"`{name}`")
    return [(servers, routes, verdict, ", ".join(names)) for (verdict, servers, routes), names in sorted(rows.items())]


def _verdict(kind: type[Strict], name: str) -> str:
    """How a field of a request is treated."""
    field = kind.model_fields.get(name)
    if field is None:
        return "unknown"
    marks = [mark for mark in field.metadata if isinstance(mark, Only | Ignored)]
    if marks:
        return marks[0].verdict
    return "changes nothing" if (field.description or "").startswith("changes nothing") else "honoured"


def _range(least: float | None, most: float | None, unit: str) -> str:
    if least in (None, 0) and most is None:
        return f", at least {least}{unit}" if least is not None and not unit else ""
    if most is None:
        return f", at least {_number(least)}{unit}"
    if least is None or (least == 0 and unit):
        return f", at most {_number(most)}{unit}"
    return f", {_number(least)} to {_number(most)}{unit}"


def _number(value: float | None) -> str:
    powers = {2**63 - 1: "2^63 - 1", -(2**63): "-2^63", 2**31 - 1: "2^31 - 1", 2**53 - 1: "2^53 - 1"}
    return powers.get(value, f"{value:,}") if isinstance(value, int) else f"{value:g}"


@cache
def docs_page() -> str:
    """The tables as an HTML page, which loads nothing from elsewhere."""
    tables = Tables()
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><title>API</title>"]
    parts.append('<h1>API</h1><p>As an OpenAPI document: <a href="/openapi.json">/openapi.json</a></p>')
    for name in tables.names:
        heads, rows = tables.columns([name])
        parts.append(f'<h2 id="{name}">{name}</h2><table><tr>{_html_row("th", heads)}</tr>')
        parts += [f"<tr>{_html_row('td', row)}</tr>" for row in rows]
        parts.append("</table>")
    return "".join(parts)


def _html_row(tag: str, cells: Iterable[str]) -> str:
    texts = (html.escape(cell).replace("**", "").split("`") for cell in cells)
    codes = ("".join(f"<code>{t}</code>" if i % 2 else t for i, t in enumerate(parts)) for parts in texts)
    return "".join(f"<{tag}>{text}</{tag}>" for text in codes)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(filled(path.read_text()))
