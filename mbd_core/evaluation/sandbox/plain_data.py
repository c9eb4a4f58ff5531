"""Values of a candidate's function as text that is safe to read: plain data, with the names of its types.

The candidate's process encodes, the judging process decodes; neither runs code of the other. An object that is no
plain data arrives as an `Opaque`, which equals nothing. A subclass arrives as its base type, so that a `__eq__` of its
own has no effect; the name of the outermost type is kept beside the value (EvalPlus compares it). The encoder imports
nothing, because every candidate's process pays for imports.
"""

from __future__ import annotations

import marshal
from _blake2 import blake2b
from _json import encode_basestring_ascii  # `json` itself costs as much as the process's start

TYPE_CHECKING = False  # `typing` itself costs a third of the process's start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

DEEPEST = 200
LARGEST_DECIMAL = 1 << 64
LONG = 16
MANY_VALUES = 1000
DIGEST_BYTES = 16 << 20
CHUNK = 4096


class Opaque:
    """The stand-in of an object that is no plain data."""


class Digest:
    """The stand-in of a list or tuple that is too large to send. Digests of equal items of the same types are equal.
    One input of MBPP+ has a result of a gigabyte."""

    def __init__(self, digest: str, length: int) -> None:
        self.digest = digest
        self.length = length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digest) and self.digest == other.digest

    __hash__ = None  # type: ignore[assignment]


class Value:
    """A decoded value, the name of the type that it had, and the seconds that its call took, by its own process."""

    def __init__(self, value: Any, type_name: str, seconds: float = 0.0) -> None:
        self.value = value
        self.type_name = type_name
        self.seconds = seconds


def encode(value: Any, seconds: float = 0.0) -> str:
    """The value as one line of JSON: `[type name, tagged value, seconds]`."""
    kind = type(value)
    large = _digest(value) if (kind is list or kind is tuple) and len(value) >= MANY_VALUES else None
    return f"[{_text(kind.__name__)},{large or _encode(value, 0)},{seconds!r}]"


def _digest(items: Any) -> str | None:
    """The digest of a list or tuple; `None` if it is small enough to send, or its items are no plain data."""
    state, length = blake2b(type(items).__name__.encode(), digest_size=32), 0
    try:
        for start in range(0, len(items), CHUNK):
            content = marshal.dumps(items[start : start + CHUNK], 2)  # this version writes equal items alike
            state.update(content)
            length += len(content)
    except ValueError:
        return None
    return f'{{"digest":["{state.hexdigest()}",{length}]}}' if length > DIGEST_BYTES else None


def _encode(value: Any, depth: int) -> str:
    if value is None:
        return "null"
    kind = type(value)
    if kind is bool:
        return "true" if value else "false"
    if depth > DEEPEST:
        return '{"opaque":""}'
    for base in kind.__mro__:
        write = _WRITERS.get(base)
        if write is not None:
            return write(value, depth + 1)
    return _foreign(value, kind, depth)


def _foreign(value: Any, kind: type, depth: int) -> str:
    """Numbers of numpy are plain numbers, exact numbers are text; all else is opaque."""
    module, name = str(kind.__module__), str(kind.__name__)
    if module == "numpy" and not name.endswith("array"):
        return _encode(value.item(), depth + 1) if type(value.item()) is not kind else '{"opaque":""}'
    if (module, name) in (("fractions", "Fraction"), ("decimal", "Decimal")):
        return f'{{"{name}":{_text(str(value))}}}'
    return '{"opaque":""}'


def _text(text: str) -> str:
    """A JSON string of ASCII characters."""
    return encode_basestring_ascii(str.__str__(text))


def _integer(value: Any, _depth: int) -> str:
    plain = int.__index__(value)
    return f'{{"int":"{plain:x}"}}' if abs(plain) >= LARGEST_DECIMAL else int.__repr__(plain)


def _float(value: Any, _depth: int) -> str:
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text := float.__repr__(value), text)


def _sequence(tag: str, items: Any, depth: int) -> str:
    values = list(items)
    body = _numbers(values) or "[" + ",".join([_encode(item, depth) for item in values]) + "]"
    return f'{{"{tag}":{body}}}' if tag else body


def _numbers(items: list[Any]) -> str | None:
    """A long list of plain numbers at once; `None` if it is something else. Benchmarks have lists of a million."""
    if len(items) < LONG or not {*map(type, items)} <= {int, float}:
        return None
    try:
        text = list.__repr__(items)
    except ValueError:  # an integer of more than 4,300 digits
        return None
    return None if "n" in text else text  # nan, inf


def _pairs(value: Any, depth: int) -> str:
    pairs = [f"[{_encode(key, depth)},{_encode(item, depth)}]" for key, item in dict.items(value)]
    return '{"dict":[' + ",".join(pairs) + "]}"


def _complex(value: Any, _depth: int) -> str:
    return f'{{"complex":[{_float(float(value.real), 0)},{_float(float(value.imag), 0)}]}}'


_WRITERS: dict[type, Callable[[Any, int], str]] = {
    int: _integer,
    float: _float,
    complex: _complex,
    str: lambda value, _: _text(value),
    bytes: lambda value, _: f'{{"bytes":"{bytes.hex(value)}"}}',
    list: lambda value, depth: _sequence("", list.__iter__(value), depth),
    tuple: lambda value, depth: _sequence("tuple", tuple.__iter__(value), depth),
    set: lambda value, depth: _sequence("set", set.__iter__(value), depth),
    frozenset: lambda value, depth: _sequence("frozenset", frozenset.__iter__(value), depth),
    type({}.keys()): lambda value, depth: _sequence("set", iter(value), depth),
    type({}.items()): lambda value, depth: _sequence("set", iter(value), depth),
    dict: _pairs,
}


def decode(line: bytes | str) -> Value:
    """The value of one line of `encode`; `ValueError` for anything else, however it is nested."""
    import json  # the candidate's process has no use for it

    try:
        type_name, tagged, seconds = json.loads(line)
        if not (isinstance(type_name, str) and isinstance(seconds, float)):
            raise ValueError
        return Value(_decode(tagged), type_name, seconds)
    except (ValueError, TypeError, KeyError, RecursionError, MemoryError, ArithmeticError) as error:
        raise ValueError(f"an answer is no plain data: {type(error).__name__}") from None


def _decode(tagged: Any) -> Any:
    if isinstance(tagged, list):
        if {*map(type, tagged)} <= _PLAIN:
            return tagged
        return [_decode(item) for item in tagged]
    if isinstance(tagged, dict):
        ((tag, content),) = tagged.items()
        return _READERS[tag](content)
    return tagged


_PLAIN = {int, float, str, bool, type(None)}


def _number(name: str, text: str) -> Any:
    import decimal
    import fractions

    if len(text) > 1000 or "e" in text.lower():  # `1e999999999` is small as text only
        raise ValueError("a number is too long")
    return fractions.Fraction(text) if name == "Fraction" else decimal.Decimal(text)


_READERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "complex": lambda parts: complex(*parts),
    "bytes": bytes.fromhex,
    "tuple": lambda items: tuple(map(_decode, items)),
    "set": lambda items: set(map(_decode, items)),
    "frozenset": lambda items: frozenset(map(_decode, items)),
    "dict": lambda pairs: {_decode(key): _decode(item) for key, item in pairs},
    "Fraction": lambda text: _number("Fraction", text),
    "Decimal": lambda text: _number("Decimal", text),
    "opaque": lambda _: Opaque(),
    "digest": lambda parts: Digest(*parts),
}
