"""Conversations whose turns are not messages (texts in turn, or pairs of a prompt and its answer) as messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from mbd_core.multitf.data.known_names import PAIRS, SYSTEMS
from mbd_core.multitf.data.tool_calls import as_objects, parsed

TURN_PAIRS = (("input", "output"), ("human", "assistant"), ("user", "assistant"), ("human", "gpt"), *PAIRS)
IN_TURN = "its texts are the user's and the assistant's in turn"


def as_messages(value: Any, what: str) -> tuple[Any, str]:
    """The messages of a list of texts or of pairs, and the name of that form; any other value unchanged, and ""."""
    value = parsed(value, what)
    if _is_list(value) and value and all(isinstance(item, str) for item in value) and not _is_object(value[0]):
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": text} for i, text in enumerate(value)], IN_TURN
    pairs = as_objects(value, what) if _is_list(value) else None
    names = _pair_names(pairs or ())
    if not pairs or names is None:
        return value, ""
    messages: list[Mapping[str, Any]] = []
    for pair in pairs:
        rest = {name: part for name, part in pair.items() if name not in (*names, *SYSTEMS)}
        systems = [pair[name] for name in SYSTEMS if pair.get(name)]
        messages += [{"role": "system", "content": text} for text in systems]
        messages += [
            {"role": "user", "content": pair[names[0]]},
            {**rest, "role": "assistant", "content": pair[names[1]]},
        ]
    return messages, f"its turns are pairs, {names[0]!r} of the user and {names[1]!r} of the assistant"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_object(text: str) -> bool:
    """Whether a text begins as a JSON object does: messages may be JSON texts."""
    return text.lstrip("\ufeff \t\r\n").startswith("{")


def _pair_names(turns: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """The names of a pair that every turn has, if no turn has a role."""
    if any(name in turn for turn in turns for name in ("role", "from", "content", "value")):
        return None
    return next((pair for pair in TURN_PAIRS if turns and all(name in turn for turn in turns for name in pair)), None)
