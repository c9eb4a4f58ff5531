"""The turns of a user's conversation, field by field: read, known to say nothing, or refused by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mbd_core.multitf.data.chats import is_empty
from mbd_core.multitf.data.known_names import FLAGS, REASONING, says_nothing
from mbd_core.multitf.data.tool_calls import ConversationMessages, as_objects, in_order_of_calls, parsed, read_call

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function_call": "call",
    "tool_call": "call",
    "function": "function",
}
"""Roles by their names in data sets; `call` is an assistant's turn whose text is a call."""
TARGETS = ("system", "user", "assistant", "tool", "function_call")
TEXT_PARTS = ("text", "input_text", "output_text")
PART_REMEDIES = {
    "tool_use": "write calls as the message's 'tool_calls'",
    "tool_result": "write each result as a message of the role tool, with its 'tool_call_id'",
    "thinking": "write it as the message's 'reasoning_content'",
    "reasoning": "write it as the message's 'reasoning_content'",
}

Notes = list[tuple[str, str]]
"""Names of columns and of fields, like `messages.weight`, each with its fate."""
LEFT_OUT, BY_OPTION = "left out: says nothing of the conversation", "left out by --ignore-columns"
NO_PLACE = "left out: chat templates have no place for it"


class ColumnRefused(ValueError):
    """A column or a field of turns that is not read. An option settles it for the whole file."""


@dataclass(frozen=True)
class TurnReader:
    """Reads the turns of one column; `roles` are a user's names of roles, `ignored` columns and `COLUMN.FIELD`s."""

    column: str
    roles: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    def read(self, value: Any, notes: Notes, *, first: int = 1) -> list["ChatTurn"]:
        """The turns of a list of messages; the list or each message may be a JSON text. `first` numbers them."""
        turns = as_objects(value, f"its {self.column!r}")
        if turns is None:
            items = parsed(value, f"its {self.column!r}")
            if isinstance(items, list | tuple) and None in items:
                raise ValueError(f"its message {first + items.index(None)} is null, no message")
            raise ValueError(f"its {self.column!r} is no list of messages, each with a role and a content")
        results: list[ChatTurn] = []
        for number, turn in enumerate(turns, start=first):
            self._add(results, turn, number, notes)
        return results

    def _add(self, turns: list["ChatTurn"], fields: Mapping[str, Any], number: int, notes: Notes) -> None:
        fields = {name: value for name, value in fields.items() if value is not None and not self._skips(name, notes)}
        kind = self._role(fields, number, turns)
        role = "assistant" if kind == "call" else kind
        calls = self._calls(fields, number, role)
        content = self._one_of(fields, ("content", "value"), number)
        if kind == "call":
            what = f"its message {number} has a call whose text"
            parsed_calls = as_objects(content, what)
            if not parsed_calls:
                raise ValueError(f"its message {number} is a call whose text is not JSON with a name and arguments")
            calls, content = [read_call(call, number) for call in parsed_calls], ""
        if content is None and not calls:
            others = ", ".join(repr(name) for name in fields if name not in ("role", "from"))
            raise ValueError(f"its message {number} needs a content" + (f", and has {others}" if others else ""))
        message: dict[str, Any] = {
            "role": role,
            "content": _text("" if content is None and calls else content, number),
        }
        if calls:
            message["tool_calls"] = calls
        if (call_id := fields.get("tool_call_id")) not in (None, ""):
            if role != "tool":
                raise ValueError(f"its message {number} has a 'tool_call_id', which only a result of a call has")
            if not isinstance(call_id, str | int):
                raise ValueError(
                    f"its message {number} has a 'tool_call_id' that is neither a text nor a number, but {call_id!r}; "
                    "make it a text"
                )
            message["tool_call_id"] = str(call_id)
        message |= self._reasoning(fields, number, role)
        is_trained = self._flag(fields, number, role, notes)
        for name, value in fields.items():
            self._check_field(name, value, number, notes)
        last = turns[-1] if turns else None
        if kind == "call" and last is not None and last.message["role"] == "assistant":
            last.message["tool_calls"] = [*last.message.get("tool_calls", ()), *calls]
            last.is_trained = is_trained if last.is_trained is None else last.is_trained
        else:
            turns.append(ChatTurn(message, is_trained))

    def _skips(self, name: str, notes: Notes) -> bool:
        if f"{self.column}.{name}" not in self.ignored:
            return False
        notes.append((f"{self.column}.{name}", BY_OPTION))
        return True

    def _role(self, fields: Mapping[str, Any], number: int, turns: Sequence["ChatTurn"]) -> str:
        name = self._one_of(fields, ("role", "from"), number)
        role = ROLES.get(self.roles.get(name, name).lower()) if isinstance(name, str) else None
        if role is None:
            unknown = isinstance(name, str) and name.strip() != ""
            likely = "assistant" if turns and turns[-1].message["role"] in ("user", "tool") else "user"
            raise ValueError(
                f"its message {number} needs a role ({', '.join(sorted(ROLES))})"
                + (f", not {name!r}; --roles {name}={likely} says what it is" if unknown else "")
            )
        if role != "function":
            return role
        # OpenAI's role is a result; ShareGPT's tag is a call if a user or a result precedes it
        after = turns[-1].message if turns else None
        return "tool" if "role" in fields or (after is not None and "tool_calls" in after) else "call"

    def _one_of(self, fields: Mapping[str, Any], names: Sequence[str], number: int) -> Any:
        """The value under one of two names."""
        values = {name: fields[name] for name in names if name in fields}
        texts = [ROLES.get(value, value) if isinstance(value, str) else value for value in values.values()]
        if len(texts) > 1 and texts[0] != texts[1]:
            first, second = values
            raise ColumnRefused(
                f"its message {number} has both {first!r} and {second!r}, which differ; leave one out with "
                f"--ignore-columns {self.column}.{second}"
            )
        return next(iter(values.values()), None)

    def _calls(self, fields: Mapping[str, Any], number: int, role: str) -> list[dict[str, Any]]:
        calls = as_objects(fields.get("tool_calls") or [], f"its message {number} has calls whose text")
        if calls is None:
            raise ValueError(f"its message {number} has 'tool_calls' that are no list of calls")
        if old := fields.get("function_call"):
            if calls:
                raise ValueError(f"its message {number} has both 'tool_calls' and 'function_call'; remove one")
            calls = as_objects(old, f"its message {number} has a call whose text") or []
        if calls and role != "assistant":
            raise ValueError(
                f"its message {number} needs a role ({', '.join(sorted(ROLES))}); only an assistant calls"
            )
        return [read_call(call, number) for call in calls]

    def _reasoning(self, fields: Mapping[str, Any], number: int, role: str) -> dict[str, str]:
        """An answer's reasoning, under either name."""
        found = {name: fields[name] for name in REASONING if fields.get(name) not in (None, "", [])}
        if not found:
            return {}
        name, text = next(iter(found.items()))
        if role != "assistant":
            raise ValueError(f"its message {number}, of the role {role}, has {name!r}, which only an assistant has")
        if not isinstance(text, str):
            raise ValueError(f"its message {number} has {name!r} that is no text")
        if any(other != text for other in found.values()):
            raise ColumnRefused(
                f"its message {number} has {' and '.join(map(repr, found))}, which differ; leave one out with "
                f"--ignore-columns {self.column}.{list(found)[-1]}"
            )
        return {name: text} if text.strip() else {}

    def _flag(self, fields: Mapping[str, Any], number: int, role: str, notes: Notes) -> bool | None:
        """Whether the turn is to be trained; `None` if it does not say."""
        verdicts: dict[str, bool] = {}
        for name in [name for name in FLAGS if name in fields]:
            value = fields[name]
            if not isinstance(value, bool | int | float) or value not in (0, 1):
                raise ValueError(
                    f"its message {number} has {name} {value!r}: an answer is trained or not, so it must be 0 or 1, "
                    f"false or true; or leave it out with --ignore-columns {self.column}.{name}"
                )
            verdicts[name] = bool(value) == FLAGS[name]
        if len(set(verdicts.values())) > 1:
            raise ValueError(
                f"its message {number} has {' and '.join(sorted(verdicts))}, which say different things of its "
                "training; remove one"
            )
        is_trained = next(iter(verdicts.values()), None)
        if is_trained and role != "assistant":
            name = next(iter(verdicts))
            raise ValueError(
                f"its message {number}, of the role {role}, has {name} {fields[name]!r}, but answers alone are "
                f"trained; change it, or leave it out with --ignore-columns {self.column}.{name}"
            )
        if role == "assistant":
            notes += [(f"{self.column}.{name}", "trained" if is_trained else "not trained") for name in verdicts]
        return is_trained

    def _check_field(self, name: str, value: Any, number: int, notes: Notes) -> None:
        """Takes note of a field that says nothing; refuses an unknown one."""
        read = ("role", "from", "content", "value", "tool_calls", "function_call", "tool_call_id", *REASONING, *FLAGS)
        if name in read or (not isinstance(value, bool) and not value and value != 0):
            if name in REASONING and value:
                notes.append((f"{self.column}.{name}", "the answer's reasoning"))
            return
        if name != "name" and not says_nothing(name, of_turn=True):
            raise ColumnRefused(
                f"its message {number} has the field {name!r}, which is not read; if it says nothing of the "
                f"conversation, leave it out with --ignore-columns {self.column}.{name}"
            )
        notes.append((f"{self.column}.{name}", NO_PLACE if name == "name" else LEFT_OUT))


@dataclass
class ChatTurn:
    """A message in the form for a chat template, the same as serving's; and whether it is trained.

    `joins`: it is made of several columns.
    """

    message: dict[str, Any]
    is_trained: bool | None = None
    joins: bool = False


def text_turn(role: str, content: Any, number: int) -> ChatTurn:
    """A turn of a text in its own column."""
    return ChatTurn({"role": role, "content": _text(content, number)})


def _text(content: Any, number: int) -> str:
    """A content that is a text, or a list of text parts."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if isinstance(parts, Sequence) and not isinstance(parts, str):
        parts = [parsed(part, f"its message {number} has a part whose text") for part in parts]
    needs = f"its message {number} needs a content that is text, or a list of text parts"
    if not isinstance(parts, Sequence):
        raise ValueError(needs)
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind not in TEXT_PARTS:
            remedy = f"; {PART_REMEDIES[kind]}" if kind in PART_REMEDIES else ""
            raise ValueError(f"{needs}, not a part of the type {kind!r}{remedy}")
        if kind is None or not isinstance(part.get("text"), str):
            raise ValueError(needs)
    for part in parts:
        extra = [name for name, value in part.items() if value and name not in ("type", "text", "cache_control")]
        if extra:
            raise ValueError(
                f"its message {number} has a part with the field {extra[0]!r}, which is not read; remove it"
            )
    return "".join(part["text"] for part in parts)


def check_turns(turns: Sequence[ChatTurn], *, answered: bool) -> tuple[ConversationMessages, tuple[int, ...]]:
    """The messages of a conversation, and the places of untrained answers. Not `answered`: without the last answer."""
    for turn in turns:
        turn.message["is_trained"] = turn.is_trained
    messages = in_order_of_calls([turn.message for turn in turns])
    flags = [message.pop("is_trained") for message in messages]
    roles = [message["role"] for message in messages]
    untrained = tuple(i for i, flag in enumerate(flags) if flag is False and roles[i] == "assistant")
    if not answered:
        prompt = _prompt(messages)
        return prompt, tuple(place for place in untrained if place < len(prompt))
    if len(messages) < 2 or messages[-1]["role"] != "assistant" or messages[-2]["role"] == "assistant":
        raise ValueError("its conversation does not end with a user's message and the assistant's answer")
    if is_empty(messages[-1]):
        raise ValueError("its answer is empty")
    return messages, untrained


def _prompt(messages: ConversationMessages) -> ConversationMessages:
    """The messages before the last answer; a last answer is optional."""
    prompt = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    if not prompt or prompt[-1]["role"] not in ("user", "tool"):
        raise ValueError("its conversation does not end with a user's message, nor with the answer to one")
    return prompt
