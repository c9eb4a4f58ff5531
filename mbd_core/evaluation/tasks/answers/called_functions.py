"""Whether an answer's calls are the right ones: the rule of the Berkeley Function-Calling Leaderboard, for Python.

A question has one or several right calls. Of each argument the right values are listed; the value `""` in that list
means that the argument may be missing. Texts are compared without case, spaces and some punctuation. The tests hold
this rule to the leaderboard's own checker (package `bfcl-eval` 2026.3.23, `ast_checker`), its oddities included.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TYPES: Mapping[str, type] = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}
"""The types of parameters in the leaderboard's descriptions of functions."""
MISSING = ""  # among the right values: the argument may be missing


@dataclass(frozen=True)
class FunctionCall:
    """A function's name, and its arguments by name."""

    name: str
    arguments: Mapping[str, Any]


class WrongCall(ValueError):
    """Why a call is not the right one."""


def check_calls(
    functions: Sequence[Mapping[str, Any]], calls: Sequence[FunctionCall], right: Sequence[FunctionCall]
) -> None:
    """Raise `WrongCall` unless the calls are the right ones, in any order.

    `functions` are the leaderboard's descriptions. The arguments of `right` are lists of right values.
    """
    if len(calls) != len(right):
        raise WrongCall(f"{len(calls)} calls where {len(right)} are right")
    by_name, left = {function["name"]: function for function in reversed(functions)}, list(calls)
    for wanted in right:
        errors: list[str] = []
        for call in left:
            try:
                _check_call(by_name[wanted.name], call, wanted)
            except WrongCall as error:
                errors.append(str(error))
            else:
                left.remove(call)
                break
        else:
            raise WrongCall(errors[0] if len(errors) == 1 else f"no call is the right one of {wanted.name}")


def _check_call(function: Mapping[str, Any], call: FunctionCall, right: FunctionCall) -> None:
    if call.name != right.name:
        raise WrongCall(f"{call.name} is called, and {right.name} is right")
    schema, values = function["parameters"], right.arguments
    for name in schema["required"]:
        if name not in call.arguments:
            raise WrongCall(f"{call.name}: the argument {name} is missing")
    for name, value in call.arguments.items():
        if name not in schema["properties"] or name not in values:
            raise WrongCall(f"{call.name}: no argument {name} is right")
        if not _is_right(schema["properties"][name], value, values[name]):
            raise WrongCall(f"{call.name}: {name} is {value!r}; right is one of {values[name]!r}")
    for name, right_values in values.items():
        if name not in call.arguments and MISSING not in right_values:
            raise WrongCall(f"{call.name}: the argument {name} is missing")


def _is_right(schema: Mapping[str, Any], value: Any, right: Sequence[Any]) -> bool:
    """Whether `value` is one of the right values of a parameter."""
    kind = schema["type"]
    value_type = TYPES[kind]
    inner_type = TYPES[schema["items"]["type"]] if kind in ("array", "tuple") else None
    if kind == "float" and type(value) is int:
        value = float(value)
    given_type, right_type = type(value), _type_of(right)
    if given_type is not value_type:
        # The value may be a variable's name although another type is declared; the type of the right values counts.
        return given_type is right_type and value in right
    if inner_type is not None and not _items_fit(value, right, inner_type):
        return False
    if right_type not in (None, value_type):
        return value in right
    if value_type is dict:
        return _is_right_dict(value, right)
    if value_type is list and inner_type is dict:
        return any(_are_right_dicts(value, each) for each in right)
    if value_type is str:
        return _plain(value) in [_plain(each) for each in right if isinstance(each, str)]
    if value_type is list:
        return [_plain(item) for item in value] in [[_plain(item) for item in each] for each in right]
    return value in right


def _type_of(right: Iterable[Any]) -> type | None:
    """The type of the right values; `None` if the argument may only be missing."""
    return next((type(value) for value in right if value != MISSING), None)


def _items_fit(value: Sequence[Any], right: Sequence[Any], inner_type: type) -> bool:
    """Whether the items have the declared type, or the type of the items in one of the right lists."""
    for each in right:
        if not isinstance(each, list):
            return True
        if all(type(item) in (inner_type, _type_of(each)) for item in value):
            return True
    return False


def _is_right_dict(value: Mapping[str, Any], right: Iterable[Any]) -> bool:
    return any(_has_right_items(value, each) for each in right if each != MISSING)


def _has_right_items(value: Mapping[str, Any], right: Mapping[str, Sequence[Any]]) -> bool:
    """Whether each key has one of its right values, and no required key is missing."""
    return all(
        name in right and _plain(item) in [_plain(each) for each in right[name]] for name, item in value.items()
    ) and all(name in value or MISSING in right_values for name, right_values in right.items())


def _are_right_dicts(value: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(value) == len(right) and all(
        isinstance(item, dict) and _is_right_dict(item, [each]) for item, each in zip(value, right, strict=True)
    )


def _plain(value: Any) -> Any:
    """A text without the differences that do not count; another value as it is."""
    if not isinstance(value, str):
        return value
    return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"')
