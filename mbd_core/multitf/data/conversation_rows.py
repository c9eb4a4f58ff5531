"""A user's row as a conversation: a column's meaning follows from its name, its neighbours, or an option.

    messages | conversations       a list of messages; beside it a system prompt, tools, variables of the template
    prompt, response               and all pairs of such names; each is a text or a list of messages
    instruction, input, output     and history, a list of pairs of texts (Alpaca)

Each column is read, known to say nothing of the conversation, or refused by its name. A row's `Notes` record each
column's fate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mbd_core.multitf.data.chats import Chat
from mbd_core.multitf.data.known_names import (
    CHATS,
    CONTEXTS,
    HINTS,
    PAIRS,
    PROMPTS,
    RESPONSES,
    SYSTEMS,
    TOOLS,
    is_content,
    says_nothing,
)
from mbd_core.multitf.data.tool_calls import ConversationMessages, as_objects, parsed, tools_of, without_padding
from mbd_core.multitf.data.turn_forms import as_messages
from mbd_core.multitf.data.turns import (
    BY_OPTION,
    LEFT_OUT,
    ROLES,
    TARGETS,
    ChatTurn,
    ColumnRefused,
    Notes,
    TurnReader,
    check_turns,
    text_turn,
)

VARIABLES = "chat_template_kwargs"
EMPTY, REPEATED = "empty", "left out: repeats the conversation"
ANSWERED = "left out: a model answers instead"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The names of the columns that hold conversations: a column of messages, or columns of prompt and response.

    If all are `None`, `found` looks for columns with the usual names. Without `answered`, rows may lack the response,
    and their conversations end before it. `system` and `tools` name further columns; by default they have the usual
    names. `roles` maps a user's names of roles. `ignored` names columns to leave out, and fields of turns, tools or
    variables, like `messages.weight`.
    """

    chat: str | None = None
    prompt: str | None = None
    response: str | None = None
    system: str | None = None
    tools: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    answered: bool = True

    def __post_init__(self) -> None:
        lacks = self.response is None and self.prompt is not None and self.answered
        is_alone = self.response is not None and self.prompt is None
        if lacks or is_alone or (self.chat is not None and self.prompt is not None):
            raise ValueError("name either the column of messages, or both the columns of prompt and response")
        for name in filter(None, (self.chat, self.prompt, self.response, self.system, self.tools)):
            if name in self.ignored:
                raise ValueError(f"the column {name!r} is named both as a column to read and in --ignore-columns")
        for name, role in self.roles.items():
            if role not in TARGETS:
                raise ValueError(f"--roles {name}={role}: a role is one of {', '.join(TARGETS)}")

    @classmethod
    def of(cls, row: Mapping[str, Any], *, answered: bool = True) -> "Columns":
        """The columns by their usual names. Raises `ValueError` listing the row's columns."""
        return cls(answered=answered).found(row)

    def found(self, row: Mapping[str, Any]) -> "Columns":
        """These columns, or the conversation's columns by their usual names if none is named."""
        if self.chat is not None or self.prompt is not None:
            return self
        there = [name for name in row if name not in self.ignored]
        chats = [name for name in CHATS if name in there]
        with_turns = [name for name in chats if row[name] is not None]
        if with_turns:
            return replace(self, chat=with_turns[0])
        if self.answered:
            refuse_preferences(row, self)
        for prompt, response in (*PAIRS, *((prompt, response) for prompt in PROMPTS for response in RESPONSES)):
            if prompt in there and (response in there or not self.answered):
                return replace(self, prompt=prompt, response=response)
        if chats:
            return replace(self, chat=chats[0])
        reasons = [f"{name!r}: {HINTS[name]}" for name in there if name in HINTS]
        raise ColumnRefused(
            f"its columns {', '.join(map(repr, row))} are no conversation: name the column of messages (--messages), "
            "or the columns of prompt and response (--prompt, --response)"
            + "".join(f" ({reason})" for reason in reasons[:1])
        )

    def messages(self, row: Mapping[str, Any]) -> ConversationMessages:
        """The row's conversation, which ends with the answer. Raises `ValueError` for a malformed row."""
        return list(self.conversation("", row, []).messages)  # type: ignore[arg-type]

    def conversation(self, name: str, row: Mapping[str, Any], notes: Notes) -> Chat:
        """The row of this name as a conversation, with its functions and variables. `notes` get the fates of its
        columns.

        Raises `ValueError` for a malformed conversation, `ColumnRefused` for a column that is not read.
        """
        for column in filter(None, (self.chat, self.prompt, self.response if self.answered else None)):
            if row.get(column) is None:
                raise ValueError(f"it has no {column!r}")
        if self.answered:
            refuse_preferences(row, self)
        reader = _RowReader(row, self, notes)
        turns = reader.turns()
        chat = Chat(name, *self._checked(reader, turns))
        reader.check_others(turns)
        return chat

    def _checked(self, reader: "_RowReader", turns: Sequence[ChatTurn]) -> tuple[Any, ...]:
        tools, variables = reader.functions(), reader.variables()
        messages, untrained = check_turns(turns, answered=self.answered)
        if padding := without_padding(messages, tools):
            reader.notes += [("null arguments of calls", "left out: the function has no such parameter")] * padding
        return messages, tools, variables, untrained


class _RowReader:
    """Reads one row column by column, and keeps the set of read columns."""

    def __init__(self, row: Mapping[str, Any], columns: Columns, notes: Notes) -> None:
        self.row, self.columns, self.notes = row, columns, notes
        self._texts: list[str] = []
        self._read: set[str] = set()

    def turns(self) -> list[ChatTurn]:
        columns = self.columns
        if columns.chat is not None:
            turns = self._chat(columns.chat)
        else:
            assert columns.prompt is not None
            history = self._history()
            turns = [*history, *self._prompt(columns.prompt, len(history) + 1)]
            if columns.answered:
                assert columns.response is not None
                turns += self._part(columns.response, "assistant", "the answer", len(turns) + 1)
        return self._with_system(turns)

    def functions(self) -> list[dict[str, Any]]:
        names = TOOLS if self.columns.tools is None else (self.columns.tools,)
        name = next((name for name in names if self._has(name)), None)
        if name is None:
            return []
        tools = tools_of(self.row, name, self.columns.ignored)
        self._note(name, "the functions")
        self.notes += [(field, BY_OPTION) for field in self.columns.ignored if field.startswith(f"{name}.")]
        return tools

    def variables(self) -> dict[str, Any] | None:
        if not self._has(VARIABLES):
            return None
        value = parsed(self.row[VARIABLES], f"its {VARIABLES!r}")
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"its {VARIABLES!r} is no object of the chat template's variables")
        self._note(VARIABLES, "variables of the chat template")
        given = {name: part for name, part in value.items() if f"{VARIABLES}.{name}" not in self.columns.ignored}
        self.notes += [(f"{VARIABLES}.{name}", BY_OPTION) for name in value if name not in given]
        return given or None

    def check_others(self, turns: Sequence[ChatTurn]) -> None:
        """Takes note of the columns that are not read. Raises `ColumnRefused` naming unknown columns."""
        texts = [*self._texts, *(turn.message["content"] for turn in turns if not turn.joins)]
        unknown = []
        for name, value in self.row.items():
            if name in self._read:
                continue
            if name in self.columns.ignored:
                self.notes.append((name, BY_OPTION))
            elif not value and not isinstance(value, int | float):
                self.notes.append((name, EMPTY))
            elif not self.columns.answered and name in (*RESPONSES, "chosen", "rejected"):
                self.notes.append((name, ANSWERED))
            elif self._repeats(name, value, texts):
                self.notes.append((name, REPEATED))
            elif self._says_nothing(name, value):
                self.notes.append((name, LEFT_OUT))
            else:
                unknown.append(name)
        if unknown:
            raise ColumnRefused(self._refusal(unknown))

    def _refusal(self, unknown: Sequence[str]) -> str:
        names = ",".join(unknown)
        reasons = [f"{name}: {HINTS[name]}" for name in unknown if name in HINTS]
        pairs = [name for name in unknown if name in (*PROMPTS, *RESPONSES, *CHATS)]
        if pairs and not reasons:
            columns = self.columns
            used = [repr(name) for name in (columns.chat, columns.prompt, columns.response) if name]
            reasons = [f"{' and '.join(used)} are; --messages, or --prompt and --response, choose others"]
        what = f"column {unknown[0]!r} is" if len(unknown) == 1 else f"columns {', '.join(map(repr, unknown))} are"
        they, them = ("it says", "it") if len(unknown) == 1 else ("they say", "them")
        return (
            f"its {what} not read{f' ({reasons[0]})' if reasons else ''}; if {they} nothing that the model should "
            f"learn from, leave {them} out with --ignore-columns {names}"
        )

    def _repeats(self, name: str, value: Any, texts: Sequence[str]) -> bool:
        """Whether a column repeats the conversation's text."""
        if name in CHATS or name == "chosen":
            return self.columns.chat is not None and _plain(value) == _plain(self.row[self.columns.chat]) is not None
        if not isinstance(value, str):
            return False
        if name == "text":
            return all(text.strip() in value for text in texts if text.strip())
        if name in (*PROMPTS, *RESPONSES, *CONTEXTS):
            return any(value.strip() in text for text in texts)
        return any(value.strip() == text.strip() for text in texts)

    def _says_nothing(self, name: str, value: Any) -> bool:
        is_read = name in HINTS or (name == "source" and self._translates())
        return says_nothing(name) and not is_content(name, value) and not is_read

    def _translates(self) -> bool:
        """Whether `source` is a text beside its `target`."""
        return self.columns.response in ("target", "targets")

    def _has(self, name: str) -> bool:
        """Whether the row has a value in a column that is not left out."""
        return name not in self.columns.ignored and self.row.get(name) not in (None, "", [], {})

    def _note(self, name: str, fate: str) -> None:
        self._read.add(name)
        self.notes.append((name, fate))

    def _chat(self, name: str) -> list[ChatTurn]:
        value, form = as_messages(self.row[name], f"its {name!r}")
        return self._turns(name, "the conversation" + (f"; {form}" if form else ""), value=value)

    def _turns(self, name: str, fate: str, first: int = 1, *, value: Any = None) -> list[ChatTurn]:
        reader = TurnReader(name, self.columns.roles, self.columns.ignored)
        turns = reader.read(self.row[name] if value is None else value, self.notes, first=first)
        self._note(name, fate)
        return turns

    def _part(self, name: str, role: str, fate: str, number: int) -> list[ChatTurn]:
        """The turns of a column that holds a text or messages."""
        value = self.row[name]
        are_turns = isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str))
        if are_turns and value and not _are_parts(value):
            return self._turns(name, fate, number)
        if not isinstance(value, str) and not are_turns:
            raise ValueError(f"its {name!r} is neither a text nor messages, but {value!r}")
        turn = text_turn(role, value, number)
        self._note(name, fate)
        return [turn]

    def _prompt(self, name: str, number: int) -> list[ChatTurn]:
        turns = self._part(name, "user", "the prompt", number)
        for context in CONTEXTS if name == "instruction" and len(turns) == 1 else ():
            if self._has(context) and context != self.columns.response:
                text = text_turn("user", self.row[context], number).message["content"]
                if text.strip():
                    self._texts += [text, turns[0].message["content"]]
                    instruction = turns[0].message["content"]
                    turns[0].message["content"] = f"{instruction}\n{text}" if instruction.strip() else text
                    turns[0].joins = True
                    self._note(context, "the prompt's second part")
        return turns

    def _history(self) -> list[ChatTurn]:
        if not self._has("history"):
            return []
        pairs = parsed(self.row["history"], "its 'history'")
        if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError("its 'history' is no list of pairs, a user's text and its answer")
        self._note("history", "earlier turns")
        texts = [text for pair in pairs for text in pair]
        return [text_turn(("user", "assistant")[i % 2], text, i + 1) for i, text in enumerate(texts)]

    def _with_system(self, turns: list[ChatTurn]) -> list[ChatTurn]:
        name = self.columns.system or next((name for name in SYSTEMS if self._has(name)), None)
        if name is None or not self._has(name):
            return turns
        system = self.row[name]
        if not isinstance(system, str):
            raise ValueError(f"its {name!r} is no text of a system prompt")
        if not system.strip():
            return turns
        own = next((turn.message["content"] for turn in turns if turn.message["role"] == "system"), None)
        if own is None:
            self._note(name, "the system turn")
            return [text_turn("system", system, 0), *turns]
        if own.strip() != system.strip():
            raise ColumnRefused(
                f"its column {name!r} and a turn of the conversation are system prompts that differ; leave the column "
                f"out with --ignore-columns {name}, or correct the row"
            )
        self._note(name, REPEATED)
        return turns


def _are_parts(value: Any) -> bool:
    """Whether a value is a list of text parts of one message."""
    return all(isinstance(part, Mapping) and "type" in part and "role" not in part for part in value)


def _plain(value: Any) -> list[tuple[Any, Any]] | None:
    """The roles and contents of a list of messages, whatever their fields are called."""
    try:
        turns = as_objects(value, "its conversation")
    except ValueError:  # a text that only begins like JSON
        turns = None
    if turns is None:
        return None
    names = [str(turn.get("role") or turn.get("from")) for turn in turns]
    return [(ROLES.get(name), t.get("content") or t.get("value")) for name, t in zip(names, turns, strict=True)]


def refuse_preferences(row: Mapping[str, Any], columns: Columns) -> None:
    """Raises `ColumnRefused` for a row with a preferred and a rejected answer. It names options for the preferred."""
    if "rejected" in columns.ignored or not row.get("chosen") or not row.get("rejected"):
        return
    prompt = next((name for name in (*PROMPTS, *CHATS) if row.get(name) and name not in columns.ignored), None)
    roles = [role for role, _ in _plain(row["chosen"]) or ()]
    if "user" in roles:
        remedy = "--messages chosen --ignore-columns rejected"
    elif prompt is not None:
        remedy = f"--prompt {prompt} --response chosen --ignore-columns rejected"
    else:
        remedy = ""
    settled = f"train the chosen answer with {remedy}" if remedy else "make messages of the chosen answer's text"
    raise ColumnRefused(
        f"its columns 'chosen' and 'rejected' are a pair of answers, and this training compares none; {settled}"
    )
