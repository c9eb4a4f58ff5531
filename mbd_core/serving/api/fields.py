"""The fields of a request with a form of their own: what an answer's text must match, tools, templates with holes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mbd_core.checkpoint.chat import CallRule
from mbd_core.decoding.grammar.grammar import MAX_CHARACTERS, Grammar
from mbd_core.serving.text.committed import Decode

# What every part of a request is: of the types that are named, without unknown fields, and never changed.
#
# Requests are read on the loop that serves everybody, so lists are bounded, and the first wrong item ends them.


class Strict(BaseModel):
    """A string is not a number here, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def items(most: int, *, least: int | None = None) -> Any:
    """The bounds of a list. An item that is wrong is the list's only error: a million of them took half a minute."""
    return Field(min_length=least, max_length=most, fail_fast=True)


# The fields of a request that say what the text of its answer must match.

MAX_CHOICES_GUIDED = 1000
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
GUIDED = ("guided_json", "guided_regex", "guided_grammar", "guided_choice")


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    type: Literal["json_object"]


class NamedSchema(Strict):
    """`strict` is always honoured: an answer that does not fit its schema is not given."""

    name: Annotated[str, Field(max_length=64)]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class StructuredFields(Strict):
    """OpenAI's `response_format`, and the `guided_*` fields of other servers, of which a request gives one at most.

    guided_json     a JSON schema, as an object or as its text
    guided_regex    a regular expression (Rust's syntax)
    guided_grammar  a context-free grammar in llguidance's variant of Lark
    guided_choice   the answers that are possible
    """

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | GrammarText | None = None
    guided_regex: GrammarText | None = None
    guided_grammar: GrammarText | None = None
    guided_choice: Annotated[list[Annotated[str, Field(min_length=1)]], items(MAX_CHOICES_GUIDED, least=1)] | None = (
        None
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> "StructuredFields":
        given = [name for name in GUIDED if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type != "text":
            given.insert(0, "response_format")
        if len(given) > 1:
            raise ValueError(f"{given[1]}: {given[0]} says already what the answer must match; give one of them")
        return self

    @property
    def grammar_field(self) -> str | None:
        """The field that asks for a grammar."""
        if self.response_format is not None and self.response_format.type != "text":
            return "response_format"
        return next((name for name in GUIDED if getattr(self, name) is not None), None)

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must match; `GrammarRefused` for what is too long."""
        if isinstance(self.response_format, ObjectFormat):
            return Grammar(syntax="json_schema", text='{"type":"object"}')
        if isinstance(self.response_format, SchemaFormat):
            return Grammar(syntax="json_schema", text=_text(self.response_format.json_schema.json_schema))
        if self.guided_json is not None:
            schema = self.guided_json
            return Grammar(syntax="json_schema", text=schema if isinstance(schema, str) else _text(schema))
        if self.guided_regex is not None:
            return Grammar(syntax="regex", text=self.guided_regex)
        if self.guided_grammar is not None:
            return Grammar(syntax="lark", text=self.guided_grammar)
        if self.guided_choice is not None:
            return Grammar(syntax="lark", text="start: " + " | ".join(map(_text, self.guided_choice)))
        return None


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# OpenAI's fields for tools: the functions that a chat may call, the choice among them, and the turns with calls.

MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(Strict):
    """A function. `parameters` is a JSON schema of an object, left out for a function without any. `strict` is always
    honoured: arguments that do not fit the schema are not given."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and schema.get("type", "object") != "object":
            raise ValueError('must be a JSON schema with "type": "object"')
        return schema

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return NO_PARAMETERS if self.parameters is None else {"type": "object", **self.parameters}


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: FunctionName


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ToolFields(Strict):
    """The tools of a chat request.

    tool_choice          auto (where there are tools): the model decides; none: text; required: calls; or a function,
                         which is called once
    parallel_tool_calls  whether an answer may have several calls (it may, unless this is false)
    """

    tools: Annotated[list[Tool], items(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> "ToolFields":
        names = [tool.function.name for tool in self.tools or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"tools: two functions are called {twice}; give each a name of its own")
        if not names and (self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)):
            raise ValueError("tool_choice: asks for a call, and no tools are given")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: {self.tool_choice.function.name} is none of tools: {', '.join(names)}")
        return self

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools as a chat template shows them; none where the model may not call any."""
        if self.tool_choice == "none":
            return []
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.function.name,
                    **({} if tool.function.description is None else {"description": tool.function.description}),
                    "parameters": tool.function.schema_of_arguments,
                },
            }
            for tool in self.tools or ()
        ]

    @property
    def call_rule(self) -> CallRule | None:
        """Which calls the answer may have; `None` where it has none."""
        if not self.tools or self.tool_choice == "none":
            return None
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        functions = [t.function for t in self.tools if named in (None, t.function.name)]
        return CallRule(
            functions=tuple((f.name, f.schema_of_arguments) for f in functions),
            must=named is not None or self.tool_choice == "required",
            several=named is None and self.parallel_tool_calls is not False,
        )


class CalledFunction(Strict):
    """`arguments` is a JSON object, as text; an empty text is an object without members. `parsed_arguments` is what
    OpenAI's client reads in it, and changes nothing."""

    name: FunctionName
    arguments: str
    parsed_arguments: dict[str, Any] | None = None

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, text: str) -> str:
        try:
            value = json.loads(text or "{}")
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is no text
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ValueError("must be the text of a JSON object, as an answer's tool_calls have it")
        return text


class AssistantCall(Strict):
    """A call in a turn of the assistant."""

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None  # of a streamed call; changes nothing

    @property
    def turn(self) -> dict[str, Any]:
        """The call as chat templates take it, its arguments as an object."""
        arguments = json.loads(self.function.arguments or "{}")
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


def ordered_results(calls: Sequence[Sequence[str]], results: Sequence[str | None]) -> list[int]:
    """The order in which a template takes the messages of a chat: results in the order of their calls, because
    templates show no ids.

    `calls` are the ids that each message's calls have, `results` the id that each message is the result of, if it is
    one. Raises `ValueError` naming the message whose calls have no result, or that is no call's result.
    """
    order: list[int] = []
    open_calls: dict[str, int | None] = {}  # the ids of the last turn's calls, and their results' numbers
    asked_by = 0

    def close() -> None:
        missing = next((call for call, number in open_calls.items() if number is None), None)
        if missing is not None:
            raise ValueError(f"messages.{asked_by}.tool_calls: no message of role tool has the result of {missing}")
        order.extend(number for number in open_calls.values() if number is not None)
        open_calls.clear()

    for number, (ids, result) in enumerate(zip(calls, results, strict=True)):
        if result is None:
            close()
            order.append(number)
            asked_by, open_calls = number, dict.fromkeys(ids)
            if len(open_calls) < len(ids):
                twice = next(call for call in open_calls if ids.count(call) > 1)
                raise ValueError(f"messages.{number}.tool_calls: two calls have the id {twice}")
        elif open_calls.get(result, number) is not None:
            raise ValueError(f"messages.{number}.tool_call_id: the turn before has no open call with this id")
        else:
            open_calls[result] = number
    close()
    return order


# Templates: fixed text and holes behind a prompt, as token positions and back as text.

MAX_PARTS = 256
MAX_HOLE = 65_536


class Hole(BaseModel):
    """`hole` tokens to be filled in."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    hole: Annotated[int, Field(ge=1, le=MAX_HOLE)]


Template = Annotated[list[str | Hole], items(MAX_PARTS, least=1)]


def check_template(parts: Sequence[str | Hole]) -> None:
    """Raise `ValueError` for a template that has no hole first."""
    if not isinstance(parts[0], Hole):
        raise ValueError(
            "template: begins with text; a template begins with a hole, put the text before it into prompt"
        )


@dataclass(frozen=True)
class TemplateTokens:
    """A template as the engine takes it: `tokens`, `None` in holes; each part with its number of tokens."""

    parts: tuple[tuple[str | Hole, int], ...]
    tokens: tuple[int | None, ...]

    def texts(self, tokens: Sequence[int], decode: Decode) -> tuple[str, list[str]]:
        """The whole text of an answer of these tokens, fixed text exactly as it was given, and the text of each hole
        that they reach."""
        whole, holes, start = "", list[str](), 0
        for part, length in self.parts:
            if start >= len(tokens):
                break
            if isinstance(part, Hole):
                holes.append(decode(list(tokens[start : start + length])))
                whole += holes[-1]
            else:
                whole += part
            start += length
        return whole, holes


def template_tokens(
    parts: Sequence[str | Hole], encode: Callable[[str], Sequence[int]], *, limit: int
) -> TemplateTokens:
    """`encode` gives the tokens of fixed text, without special ones. Raises `ValueError` where the holes alone are
    more than `limit` tokens."""
    in_holes = sum(part.hole for part in parts if isinstance(part, Hole))
    if in_holes > limit:
        raise ValueError(f"its holes are {in_holes} tokens; the limit is {limit} in all")
    tokens: list[int | None] = []
    lengths: list[int] = []
    for part in parts:
        ids: list[Any] = [None] * part.hole if isinstance(part, Hole) else list(encode(part))
        tokens += ids
        lengths.append(len(ids))
    return TemplateTokens(tuple(zip(parts, lengths, strict=True)), tuple(tokens))
