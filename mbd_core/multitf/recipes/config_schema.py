"""The JSON Schema of `--config` files, for editors: made of the dataclasses that read them, and of their options."""

import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.options import LISTS, Option, members, split

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCALARS: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Path: {"type": "string"},
    type(None): {"type": "null"},
}
BY_NAME = {
    "recipe": "The recipe that is changed: a name, or FILE.py:NAME. Without one the file is a whole recipe.",
    "data": "A folder or URL of prepared data, in place of an object.",
}


def config_schema() -> dict[str, Any]:
    """The schema: every field of a recipe may be there, and no other."""
    schema = _object(TrainingRecipe)
    schema["properties"]["recipe"] = {"type": "string", "description": BY_NAME["recipe"]}
    data = schema["properties"]["data"]
    data["anyOf"].append({"type": "string", "description": BY_NAME["data"]})
    return {"$schema": DIALECT, "title": "A training's --config file", **schema}


def _object(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    properties = {}
    for field in fields(kind):
        hint, option = split(hints[field.name])
        properties[field.name] = _value(hint, option) | ({"description": option.help} if option else {})
        default = field.default if field.default_factory is MISSING else MISSING
        if isinstance(default, bool | int | float | str):
            properties[field.name]["default"] = default
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _value(hint: Any, option: Option | None) -> dict[str, Any]:
    """The schema of a value; an option's bounds hold for numbers, and for each number of a list."""
    kinds = members(hint)
    if len(kinds) > 1:
        return {"anyOf": [_value(kind, option) for kind in kinds]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        return _object(typing.cast(type, hint))
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in LISTS:
        return {"type": "array", "items": _value(split(arguments[0])[0], option)}
    if origin in (dict, Mapping) or hint is dict:
        return {"type": "object"}
    if hint in (int, float) and option is not None:
        bounds = {"minimum": option.at_least, "exclusiveMinimum": option.above, "maximum": option.at_most}
        return SCALARS[hint] | {name: bound for name, bound in bounds.items() if bound is not None}
    return dict(SCALARS.get(hint, {}))
