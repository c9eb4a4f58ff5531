"""docs/reference/api.md says what the OpenAPI document says: routes, fields, types, bounds, errors."""

import re
from pathlib import Path

import pytest

from actors.serving.gateway import api
from mbd_core.serving.api.errors import ERRORS
from mbd_core.serving.api.openapi import RESPONSES, ROUTES, openapi_document
from mbd_core.serving.api.reference import Tables, filled

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "api.md").read_text()
CODES = re.compile(r"""code="(\w+)"|Code = Literal\[(.*)\]|code = "[^"]*", "(\w+)"|, code = "(\w+)\"""")


def test_the_page_is_what_the_types_say() -> None:
    assert filled(PAGE) == PAGE, "run python -m mbd_core.serving.api.reference docs/reference/api.md"


def test_each_object_has_just_one_table() -> None:
    for wrong in (PAGE.replace("<!-- ChatRequest -->", "<!-- ChatMessage -->"), PAGE.replace("<!-- errors -->", "")):
        with pytest.raises(ValueError):
            filled(wrong)


def test_a_table_has_each_field_with_its_type_and_bounds() -> None:
    tables = Tables()
    for name in ("GenerationRequest", "Choice", "SleepOrder"):
        text = tables.table([name])
        for field in openapi_document()["components"]["schemas"].get(name, {}).get("properties", ()):
            assert f"`{field}`" in text
    assert "| `n` | integer, 1 to 128 |" in tables.table(["GenerationRequest"])
    assert "| **`prompt`** | string or list of string, at most 128 items or " in tables.table(["CompletionRequest"])
    assert "default `600.0`" in tables.table(["SleepOrder"])


def test_every_route_that_is_served_is_described() -> None:
    served = {f"{method} {route.path}" for route in api.routes for method in route.methods - {"HEAD"}}  # type: ignore[attr-defined]
    served = {re.sub(r"\{(\w+)(:path)?\}", r"{\1}", label) for label in served}
    described = {f"{route.method.upper()} {route.path}" for route in ROUTES}
    assert described < served
    assert all(f"`{label}`" in PAGE for label in served)


def test_every_error_is_described() -> None:
    """Each status that the document names, and each code that stands in the sources."""
    sources = "".join(
        path.read_text()
        for folder in ("mbd_core/serving", "mbd_core/engine", "actors")
        for path in (ROOT / folder).rglob("*.py")
    )
    used = {code for groups in CODES.findall(sources) for group in groups for code in re.findall(r"\w+", group)}
    assert used - {""} == {code for kind in ERRORS for code in kind.codes}
    assert set(RESPONSES) <= {kind.status for kind in ERRORS}
