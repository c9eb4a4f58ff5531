"""OpenAI's fields for tools: the functions that a chat may call, the choice among them, and the turns with calls."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from mbd_core.checkpoint.tool_turns import CallRule
from mbd_core.serving.strict_model import Strict, items

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
