"""JSON of users and of other programs: parsed with errors of one sentence, merged and compared field by field."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

MOST_SHOWN = 5  # of the fields that differ
LONGEST_VALUE = 80  # characters of a value that is shown
ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")
HALF = re.compile("[\ud800-\udfff]")
MISSING = object()


class RepeatedName(ValueError):
    """An object of a JSON text has a name twice, with values that differ."""


def parse_json(content: str | bytes, where: str, *, unique: bool = False) -> Any:
    """The value of a JSON text, which may begin with a byte-order mark.

    Raises `ValueError`, a sentence that begins with `where`, if the text is not UTF-8, is not JSON, or has an integer
    or a depth that Python refuses; also for half of a surrogate pair, which no tokenizer and no UTF-8 file takes. With
    `unique` an object must not have a name twice with different values.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_with_unique_names if unique else None)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be read: lists or objects in about 1,000 others") from None
    except RepeatedName as error:
        raise ValueError(f"{where} has {error.args[0]!r} twice in one object, with values that differ") from None
    except ValueError:  # Python's own bound on digits
        raise ValueError(f"{where} holds an integer of more than 4,300 digits, which is not read") from None
    if ESCAPED_HALF.search(text):
        half = HALF.search(json.dumps(value, ensure_ascii=False))
        if half is not None:
            raise ValueError(f"{where} holds \\u{ord(half[0]):04x}, half of a surrogate pair, which is no character")
    return value


def _with_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        for name, value in pairs:
            if value != values[name]:
                raise RepeatedName(name)
    return values


def merge_fields(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the fields of `changes` replaced. Objects in both are merged field by field."""
    parts = {
        name: merge_fields(base[name], part)
        for name, part in changes.items()
        if isinstance(part, Mapping) and isinstance(base.get(name), Mapping)
    }
    return {**base, **changes, **parts}


def merge_paths(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with each value at its dotted path: `{"train.lr": 1}` changes `lr` of the object `train`."""
    result = dict(base)
    for path, value in values.items():
        for name in reversed(path.split(".")):
            value = {name: value}
        result = merge_fields(result, value)
    return result


def differing_fields(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Which fields of two JSON objects differ, with both values: `train.steps is 12 there, not 9`; "" if none does.

    Objects are compared field by field, lists as a whole.
    """
    sentences = [f"{name} is {old} there, not {new}" for name, old, new in differences(theirs, ours)]
    more = len(sentences) - MOST_SHOWN
    return "; ".join(sentences[:MOST_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The fields in which two JSON objects differ, by their paths, with both values as texts."""
    return [(name, _value_text(old), _value_text(new)) for name, old, new in _differing(theirs, ours, "")]


def _differing(theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys((*ours, *theirs)):
        their_value, our_value = theirs.get(name, MISSING), ours.get(name, MISSING)
        if isinstance(their_value, Mapping) and isinstance(our_value, Mapping):
            yield from _differing(their_value, our_value, f"{prefix}{name}.")
        elif their_value != our_value:
            yield f"{prefix}{name}", their_value, our_value


def _value_text(value: Any) -> str:
    text = "not set" if value is MISSING else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
