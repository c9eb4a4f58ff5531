"""The kinds of values that a JSON schema admits."""

from collections.abc import Mapping
from typing import Any, Literal, get_args
from urllib.parse import unquote

Kind = Literal["string", "integer", "number", "boolean", "null", "array", "object"]
ALL: frozenset[Kind] = frozenset(get_args(Kind))
MAX_DEPTH = 32
MAPS_OF_SHARED = ("$defs", "definitions")


def property_schema(schema: Mapping[str, Any], name: str) -> Any:
    """The schema of an object's property. A property that is not listed has the schema of `additionalProperties`, or
    `{}`, which admits anything."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return schema.get("additionalProperties", {})


def target_of(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that `$ref` names in the document `root`; `schema` itself if it has no `$ref`. A reference that leads
    nowhere gives `{}`, which admits anything."""
    depth = 0
    while isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str) and depth < MAX_DEPTH:
        if not reference.startswith("#"):
            return {}
        found: Any = root
        for step in reference[1:].split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, Mapping) else None
        schema, depth = found if found is not None else {}, depth + 1
    return schema


def kinds_of(schema: Any, root: Mapping[str, Any], *, depth: int = 0) -> frozenset[Kind]:
    """The kinds of values that may fit a schema; all kinds if the schema does not decide."""
    schema = target_of(schema, root)
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return ALL
    kinds = ALL
    named = schema.get("type")
    if named is not None:
        names = [named] if isinstance(named, str) else named
        kinds &= frozenset(kind for kind in ALL if isinstance(names, list) and kind in names)
        kinds |= frozenset(["integer"] if "number" in kinds else [])
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        kinds &= frozenset(kind_of(value) for value in values)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            kinds &= frozenset().union(*(kinds_of(part, root, depth=depth + 1) for part in schema[keyword]))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        kinds &= kinds_of(part, root, depth=depth + 1)
    return kinds


def kind_of(value: Any) -> Kind:
    """The kind of a value of JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, int):
        return "integer"
    return "number" if isinstance(value, float) else "array" if isinstance(value, list) else "object"
