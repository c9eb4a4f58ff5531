"""The values at a JSON schema's bounds, and the first ones beyond them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

UNBOUNDED = 4000  # characters of a string without a bound
MOST_ITEMS = 3  # items of a list without a bound


class SchemaBounds:
    """`document` holds what the schemas refer to."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def resolve(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema:
            part_of_document: Any = self._document
            for part in schema["$ref"].removeprefix("#/").split("/"):
                part_of_document = part_of_document[part]
            schema = part_of_document
        return schema

    def inside(self, schema: Mapping[str, Any]) -> list[Any]:
        """Values that the schema allows, each once: all of an enumeration, both ends of a range."""
        return _distinct_values(self._values_inside(self.resolve(schema)))

    def outside(self, schema: Mapping[str, Any]) -> list[Any]:
        """Values just beyond its bounds; of several forms, what is none of them."""
        schema = self.resolve(schema)
        forms = schema.get("anyOf") or schema.get("oneOf") or [schema]
        return _distinct_values(value for form in forms for value in _values_beyond(self.resolve(form), self))

    def _values_inside(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        for form in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from self._values_inside(self.resolve(form))
        if "enum" in schema:
            yield from schema["enum"]
            return
        if "const" in schema:
            yield schema["const"]
            return
        kind = schema.get("type")
        if kind in ("integer", "number"):
            yield from _ends(schema)
        elif kind == "string":
            yield from (_word(schema, n) for n in (schema.get("minLength", 0), schema.get("maxLength", UNBOUNDED)))
        elif kind == "boolean":
            yield from (False, True)
        elif kind == "null":
            yield None
        elif kind == "array":
            item = self.inside(schema.get("items", {"type": "null"}))[0]
            yield from ([item] * n for n in (schema.get("minItems", 0), schema.get("maxItems", MOST_ITEMS)))
        elif kind == "object":
            yield from self._objects(schema)

    def _objects(self, schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """With what is needed alone, and with each other member at its bounds."""
        members = schema.get("properties", {})
        required = {name: self.inside(members[name])[0] for name in schema.get("required", ())}
        yield required
        for name, member in members.items():
            yield from (required | {name: value} for value in self.inside(member))


def _ends(schema: Mapping[str, Any]) -> Iterator[int | float]:
    is_integer = schema["type"] == "integer"
    minimum, maximum = schema.get("minimum"), schema.get("maximum")
    if minimum is None and "exclusiveMinimum" in schema:
        minimum = schema["exclusiveMinimum"] + 1
    if maximum is None and "exclusiveMaximum" in schema:
        maximum = schema["exclusiveMaximum"] - 1
    yield (-(2**31) if is_integer else -1e9) if minimum is None else minimum
    yield (2**31 if is_integer else 1e9) if maximum is None else maximum


def _word(schema: Mapping[str, Any], length: int) -> str:
    return "a" * (max(length, 1) if "pattern" in schema else length)


def _values_beyond(schema: Mapping[str, Any], bounds: SchemaBounds) -> Iterator[Any]:
    if "enum" in schema or "const" in schema:
        yield from ("neither this", -7)
        return
    kind = schema.get("type")
    if kind in ("integer", "number"):
        step = 1 if kind == "integer" else 0.5
        minimum, maximum = _ends(schema)
        if {"minimum", "exclusiveMinimum"} & schema.keys():
            yield minimum - step
        if {"maximum", "exclusiveMaximum"} & schema.keys():
            yield maximum + step
    elif kind == "string" and schema.get("minLength"):
        yield _word(schema, schema["minLength"] - 1)
    if kind == "string" and "maxLength" in schema:
        yield _word(schema, schema["maxLength"] + 1)
    elif kind == "array":
        item = bounds.inside(schema.get("items", {"type": "null"}))[0]
        if schema.get("minItems"):
            yield [item] * (schema["minItems"] - 1)
        if "maxItems" in schema:
            yield [item] * (schema["maxItems"] + 1)
    elif kind == "object" and schema.get("additionalProperties") is False:
        yield {"unknown": 1}


def _distinct_values(values: Iterator[Any]) -> list[Any]:
    """In their order; JSON tells 1 from true, and Python does not."""
    return list({json.dumps(value): value for value in values}.values())
