"""Random JSON schemas of the kinds that clients send, each with some answer."""

import json
import random
from collections.abc import Callable
from typing import Any

from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.grammar.grammar import Grammar
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.serving.tokens.load import LoadedModel

WORDS = ("name", "age", "tags", "a", "price per kg", "id", "überschrift", "is_ok", "items", "x1")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
PATTERNS = ("^[a-z]{2,5}$", "^(ab|c)+z[0-9]{3}$", "^[A-Z][0-9]+$", "^\\d{4}-\\d{2}$")


def schema_requests(
    loaded: LoadedModel, number: int, ask: Callable[[int, Grammar, random.Random], Request], *, seed: int
) -> list[tuple[Request, dict[str, Any]]]:
    """Requests for objects of random schemas, with their schemas; `ask` makes the request of a number.

    A request is left out if no answer is short enough for it.
    """
    rng, found = random.Random(seed), list[tuple[Request, dict[str, Any]]]()
    while len(found) < number:
        schema = random_object_schema(rng)
        request = ask(len(found), Grammar(syntax="json_schema", text=json.dumps(schema)), rng)
        if has_answer(loaded, request):
            found.append((request, schema))
    return found


def has_answer(loaded: LoadedModel, request: Request) -> bool:
    """Whether some answer of the request's grammar fits into `max_tokens`."""
    try:
        loaded.engine.compile(request)
    except RequestRefused as refusal:
        if "raise max_tokens" in str(refusal):
            return False
        raise
    return True


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of at most `depth` levels."""
    scalars = [_string, _string, _number, _choice, _const]
    kinds = scalars if depth == 0 else [*scalars, _object, _object, _object, _array, _array, _any_of]
    return rng.choice(kinds)(rng, depth - 1)


def random_object_schema(rng: random.Random) -> dict[str, Any]:
    """A schema of an object; one in eight refers to itself."""
    schema = _object(rng, 2)
    if rng.random() < 0.125:
        schema["properties"]["children"] = {"type": "array", "items": {"$ref": "#"}}
    return schema


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(5)
    if kind == 0:
        return {"type": "string", "format": rng.choice(FORMATS)}
    if kind == 1:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 2:
        low = rng.randrange(6)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(9)}
    return {"type": "string"}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": rng.choice(("integer", "number"))}
    if rng.random() < 0.5:
        low = rng.randrange(-50, 1000)
        schema |= {"minimum": low, "maximum": low + rng.randrange(1, 500)}
    return schema


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 1, 2.5, None, True, -3], rng.randrange(1, 6))}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(({"type": "boolean"}, {"type": "null"}, {"const": "fixed"}, {"type": ["string", "null"]}))


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randrange(1, 5))
    required = [name for name in names if rng.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: random_schema(rng, max(depth, 0)) for name in names},
        "required": required,
        "additionalProperties": rng.random() < 0.2,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    schema: dict[str, Any] = {"type": "array", "items": random_schema(rng, max(depth, 0)), "minItems": low}
    if rng.random() < 0.6:
        schema["maxItems"] = low + rng.randrange(1, 4)
    return schema


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, max(depth, 0)) for _ in range(rng.randrange(2, 4))]}
