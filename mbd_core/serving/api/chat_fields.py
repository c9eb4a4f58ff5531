"""The fields of a chat: its messages, the functions that the model may call, and the calls of earlier turns."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from mbd_core.calls.rule import CallRule
from mbd_core.serving.api.errors import FieldError, clip
from mbd_core.serving.api.parsing import MAX_TEXT_PARTS, Ignored, Only, Strict, by_type, items, text_or_list

MAX_MESSAGES, MAX_CALLS, MAX_TOOLS = 4096, 128, 128
MAX_ANSWER = 2**18  # tokens
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]  # Anthropic's and Responses' length


def check_parameters(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """A function's schema, which must be of an object."""
    if schema is not None and schema.get("type", "object") != "object":
        raise ValueError('must be a JSON schema with "type": "object"')
    return schema


class Function(Strict):
    name: FunctionName
    description: str | None = None
    """shown to the model"""
    parameters: dict[str, Any] | None = None
    """a JSON schema with `"type": "object"`; left out for a function without parameters"""
    strict: bool | None = None
    """always honoured: arguments that do not fit the schema are not given"""
    response: dict[str, Any] | None = None
    """a JSON schema of what the function returns; shown to the model by templates that show it"""
    cache_control: Annotated[Any, Ignored()] = None
    defer_loading: Annotated[bool | None, Ignored()] = None

    _of_an_object = field_validator("parameters")(check_parameters)

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return NO_PARAMETERS if self.parameters is None else {"type": "object", **self.parameters}


class Tool(Strict):
    type: Literal["function"]
    """only functions can be called: describe a custom tool as a function with a text parameter"""
    function: Function
    cache_control: Annotated[Any, Ignored()] = None
    defer_loading: Annotated[bool | None, Ignored()] = None

    @field_validator("type", mode="before")
    @classmethod
    def _functions_alone(cls, value: Any) -> Any:
        if value != "function" and value in ("custom", *OTHER_TOOLS):
            raise ValueError(f'a {value} tool is not called here; give type "function", or leave the tool out')
        return value


class NamedFunction(Strict):
    name: FunctionName


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], items(MAX_TOOLS, least=1)]


class AllowedChoice(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ToolFields(Strict):
    tools: Annotated[list[Tool], items(MAX_TOOLS)] | None = None
    """functions that the model may call; two functions of one name are refused"""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    """`auto` (default, with `tools`): the model decides; `none`: text; `required`: calls; a tool's name: one call of
    it; `allowed_tools`: all tools are shown, only these may be called"""
    parallel_tool_calls: bool | None = None
    """whether an answer may have several calls; default `true`"""

    @model_validator(mode="after")
    def _check_tools(self) -> "ToolFields":
        names = [tool.function.name for tool in self.tools or ()]
        repetition = next((name for name in names if names.count(name) > 1), None)
        if repetition is not None:
            raise FieldError("tools", f"two functions are called {repetition}", remedy="give each a name of its own")
        chosen = self._chosen
        if not names and (self.tool_choice == "required" or chosen is not None):
            raise FieldError("tool_choice", "asks for a call, and no tools are given")
        unknown = next((name for name in chosen or () if name not in names), None)
        if unknown is not None:
            raise FieldError("tool_choice", f"{unknown} is not among the tools: {', '.join(names)}")
        return self

    @property
    def _chosen(self) -> list[str] | None:
        """The functions that `tool_choice` names; `None` if it names no function."""
        if isinstance(self.tool_choice, NamedTool):
            return [self.tool_choice.function.name]
        if isinstance(self.tool_choice, AllowedChoice):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return None

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools for the chat template; empty if the model may not call any tool."""
        if self.tool_choice == "none":
            return []
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.function.name,
                    **({} if tool.function.description is None else {"description": tool.function.description}),
                    "parameters": tool.function.schema_of_arguments,
                    **({} if tool.function.response is None else {"response": tool.function.response}),
                },
            }
            for tool in self.tools or ()
        ]

    @property
    def call_rule(self) -> CallRule | None:
        """The rule for calls in the answer; `None` if the answer may have no calls."""
        if not self.tools or self.tool_choice == "none":
            return None
        chosen, choice = self._chosen, self.tool_choice
        functions = [tool.function for tool in self.tools if chosen is None or tool.function.name in chosen]
        once = isinstance(choice, NamedTool)
        allowed = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
        return CallRule(
            functions=tuple((f.name, f.schema_of_arguments) for f in functions),
            must=once or allowed == "required",
            several=not once and self.parallel_tool_calls is not False,
        )


OTHER_TOOLS = (
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "file_search",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "image_generation",
    "mcp",
    "local_shell",
    "shell",
    "apply_patch",
    "custom",
    "namespace",
    "tool_search",
    "programmatic_tool_calling",
)
"""OpenAI's kinds of tools other than functions."""


class ReasoningFields(Strict):
    effort: ReasoningEffort | None = None
    """as `reasoning_effort` of a chat"""
    summary: Annotated[Literal["auto", "concise", "detailed"] | None, Ignored()] = None
    generate_summary: Annotated[Literal["auto", "concise", "detailed"] | None, Ignored()] = None
    context: Annotated[Literal["auto", "current_turn", "all_turns"] | None, Ignored()] = None
    mode: Annotated[str | None, Ignored()] = None


class TemplateFields(Strict):
    """How a chat is written out in the model's template."""

    add_generation_prompt: bool | None = None
    """whether the beginning of the assistant's turn follows the messages; default `true`"""
    continue_final_message: bool | None = None
    """the answer continues the last message, a turn of the assistant; not beside `add_generation_prompt`"""
    chat_template_kwargs: dict[str, Any] | None = None
    """variables of the chat template, such as `enable_thinking`, also where it says `thinking`; `mbd.notes` names the
    variables that it lacks"""
    reasoning_effort: ReasoningEffort | None = None
    """sets the chat template's variable `reasoning_effort`, and `enable_thinking`, which `none` turns off, unless
    `chat_template_kwargs` sets them; no effect under a template with neither, and `mbd.notes` then says so"""
    reasoning: ReasoningFields | None = None
    """`effort` is another name of `reasoning_effort`; a request gives one of the two"""
    documents: list[dict[str, Any]] | None = None
    """the chat template's variable `documents`; no effect under a template without it, and `mbd.notes` then says so"""

    @model_validator(mode="after")
    def _check_ending(self) -> "TemplateFields":
        if self.continue_final_message and self.add_generation_prompt:
            why = "the last message goes on, and no turn begins"
            raise FieldError("add_generation_prompt", why, remedy="leave it out")
        if self.reasoning_effort is not None and self.reasoning is not None and self.reasoning.effort is not None:
            raise FieldError("reasoning.effort", "reasoning_effort says it already", remedy="give one of them")
        return self

    @property
    def effort(self) -> ReasoningEffort | None:
        """How much the model may reason."""
        return self.reasoning.effort if self.reasoning is not None else self.reasoning_effort

    def variables(self, unknown: Callable[[Iterable[str]], list[str]]) -> dict[str, Any]:
        """The variables of the chat template; the client's own override the others. `unknown` returns the names that
        the template lacks.

        An effort sets the same variables as in vLLM (https://github.com/vllm-project/vllm/pull/43401).
        """
        given, effort = dict(self.chat_template_kwargs or {}), self.effort
        meant: dict[str, Any] = {} if self.documents is None else {"documents": self.documents}
        if effort is not None:
            meant["enable_thinking"] = effort != "none"
        if effort not in (None, "none"):  # "none" is no level of a template
            meant["reasoning_effort"] = effort
        absent = unknown(meant)
        return {name: value for name, value in meant.items() if name not in absent} | given

    def template_notes(self, unknown: Callable[[Iterable[str]], list[str]]) -> list[str]:
        """A note for each field without effect; `unknown` as in `variables`."""
        names = unknown(self.chat_template_kwargs or {})
        notes = [f"chat_template_kwargs.{clip(name)}: the chat template has no such variable" for name in names]
        meant = ["reasoning_effort", "enable_thinking"]
        if self.effort not in (None, "none") and unknown(meant) == meant:
            notes.append(f"reasoning_effort has no effect: the chat template has neither {' nor '.join(meant)}")
        if self.documents and unknown(["documents"]):
            notes.append("documents has no effect: the chat template has none; put them into a message")
        return notes

    def check_continued(self, messages: Sequence["ChatMessage"]) -> None:
        """Raise `FieldError` if `continue_final_message` is set and the last message is no text of the assistant."""
        last = messages[-1]
        if self.continue_final_message and (last.role != "assistant" or last.tool_calls):
            why = f"the last message, of role {last.role}, is no text of the assistant"
            raise FieldError("continue_final_message", why, remedy="leave it out")


class CalledFunction(Strict):
    name: FunctionName
    arguments: str
    """a JSON object as text; empty for none"""
    parsed_arguments: dict[str, Any] | None = None
    """OpenAI's client adds it to an answer; changes nothing"""

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
    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None
    """of a streamed call; changes nothing"""
    cache_control: Annotated[Any, Ignored()] = None
    provider_specific_fields: Annotated[dict[str, Any] | None, Ignored()] = None
    extra_content: Annotated[dict[str, Any] | None, Ignored()] = None

    @property
    def turn(self) -> dict[str, Any]:
        """The call in the form of chat templates, with its arguments as an object."""
        arguments = json.loads(self.function.arguments or "{}")
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


class TextPart(Strict):
    type: Literal["text"]
    text: str
    cache_control: Annotated[Any, Ignored()] = None
    prompt_cache_breakpoint: Annotated[Any, Ignored()] = None


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str
    """as `refusal` of a message"""

    @property
    def text(self) -> str:
        return self.refusal


class ThinkingPart(Strict):
    type: Literal["thinking", "reasoning"]
    thinking: str | None = None
    """as `reasoning` of a message; or in `text`"""
    text: str | None = None
    closed: Annotated[bool | None, Ignored()] = None
    signature: Annotated[str | None, Ignored()] = None


PART_FORMS = {"text": "(text)", "refusal": "(refusal)", "thinking": "(thinking)", "reasoning": "(thinking)"}


ContentPart = Annotated[
    Annotated[TextPart, Tag("(text)")]
    | Annotated[RefusalPart, Tag("(refusal)")]
    | Annotated[ThinkingPart, Tag("(thinking)")],
    by_type(PART_FORMS),
]
Content = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[ContentPart], items(MAX_TEXT_PARTS), Tag("(list)")],
    Discriminator(text_or_list),
]


REASONING = ("reasoning", "reasoning_content")  # the names of reasoning in chat templates


class ChatMessage(Strict):
    """A message. An answer of this server, of another server or of a client's library is accepted unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """`developer` is `system`; `tool` is a called function's result"""
    tool_calls: Annotated[list[AssistantCall], items(MAX_CALLS)] | None = None
    """only in a turn of the assistant; each needs a message of role `tool`"""
    content: Annotated[Content | None, Field(validate_default=True)] = None
    """text; required except in a turn of the assistant; only such a turn may have parts of refusal and reasoning"""
    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], items(MAX_ANSWER)] | None = None
    """an answer's own tokens, from `return_token_ids`. The prompt then has these tokens, and the prefix cache finds
    them. Only in a turn of the assistant, whose `content` they spell; after thoughts `content` counts instead. `[]`
    means `null`"""
    tool_call_id: Annotated[str | None, Field(validate_default=True)] = None
    """the id of the call whose result this is; required with role `tool`, refused with other roles"""
    name: str | None = None
    """changes nothing: chat templates have no place for it"""
    parsed: dict[str, Any] | None = None
    """OpenAI's client adds it to an answer; changes nothing"""
    provider_specific_fields: dict[str, Any] | None = None
    """LiteLLM adds it to an answer; changes nothing"""
    refusal: str | None = None
    """the text of a turn without content"""
    reasoning: str | None = None
    """the assistant's reasoning, for a chat template that shows `reasoning` or `reasoning_content`; otherwise left
    out, and `mbd.notes` says so"""
    reasoning_content: str | None = None
    """as `reasoning`"""
    annotations: Annotated[Any, Ignored()] = None
    audio: Annotated[Any, Only(instead="send its transcript as content")] = None
    images: Annotated[Any, Only([], instead="images are not read; leave them out")] = None
    function_call: Annotated[Any, Only(instead="send it as tool_calls, with an id that its result names")] = None
    tools: Annotated[Any, Only([], instead="give them in tools of the request")] = None
    task: Annotated[Any, Only(instead="say it in content")] = None
    prefix: Annotated[Any, Only(False, instead="give continue_final_message, with which the last message goes on")] = (
        None
    )
    phase: Annotated[str | None, Ignored()] = None
    cache_control: Annotated[Any, Ignored()] = None
    reasoning_details: Annotated[Any, Ignored()] = None
    thinking_blocks: Annotated[Any, Ignored()] = None
    extra_content: Annotated[dict[str, Any] | None, Ignored()] = None

    @field_validator("tool_calls")
    @classmethod
    def _calls_of_assistants(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("role") != "assistant":
            raise ValueError("only a turn of the assistant has calls; leave it out")
        return value

    @field_validator("content")
    @classmethod
    def _of_assistants_alone(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("role") != "assistant":
            raise ValueError("a turn of this role needs a string or a list of text parts")
        own = [part.type for part in value if not isinstance(part, TextPart)] if isinstance(value, list) else []
        if own and info.data.get("role") != "assistant":
            raise ValueError(f"only a turn of the assistant has parts of type {own[0]}; leave it out")
        return value

    @field_validator("token_ids")
    @classmethod
    def _of_answers_alone(cls, value: Any, info: ValidationInfo) -> Any:
        if value and (info.data.get("role") != "assistant" or info.data.get("tool_calls")):
            raise ValueError("only a turn of the assistant without calls has token ids; leave it out")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _of_results_alone(cls, value: Any, info: ValidationInfo) -> Any:
        if (value is not None) != (info.data.get("role") == "tool"):
            raise ValueError(
                "a message of role tool needs the id of the call whose result it is, and other messages have none"
            )
        return value

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content or self.refusal or ""
        texts = [part.text for part in self.content or () if not isinstance(part, ThinkingPart)]
        return "".join(texts) or self.refusal or ""

    @property
    def reasoned(self) -> str:
        """The reasoning before the text."""
        parts = () if isinstance(self.content, str) else self.content or ()
        thought = "".join(part.thinking or part.text or "" for part in parts if isinstance(part, ThinkingPart))
        return self.reasoning_content or self.reasoning or thought

    @property
    def turn(self) -> dict[str, Any]:
        """The turn in the form of chat templates, with an answer's `token_ids` added."""
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.token_ids:
            turn["token_ids"] = tuple(self.token_ids)
        if self.tool_calls:
            turn["tool_calls"] = [call.turn for call in self.tool_calls]
        if self.reasoned:
            turn |= dict.fromkeys(REASONING, self.reasoned)
        return turn if self.tool_call_id is None else turn | {"tool_call_id": self.tool_call_id}


ChatMessages = Annotated[list[ChatMessage], items(MAX_MESSAGES, least=1)]


def turns(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages in the form of chat templates, in the order of `check_calls`, whose errors it raises."""
    return [messages[i].turn for i in check_calls(messages)]


def check_calls(messages: Sequence[ChatMessage]) -> list[int]:
    """The messages' order for a template. Raises the `FieldError` of `ordered_results`."""
    calls = [[call.id for call in message.tool_calls or ()] for message in messages]
    return ordered_results(calls, [message.tool_call_id for message in messages])


def ordered_results(calls: Sequence[Sequence[str]], results: Sequence[str | None]) -> list[int]:
    """The order of a chat's messages for a template: results follow the order of their calls, because templates show
    no ids.

    `calls` holds the ids of each message's calls. `results` holds, for a message that is a call's result, the call's
    id. Raises `FieldError` that names a message whose call has no result, or a result without a call.
    """
    order: list[int] = []
    open_calls: dict[
        str, int | None
    ] = {}  # the ids of the last turn's calls, with the message numbers of their results
    caller = 0

    def close() -> None:
        missing = next((call for call, number in open_calls.items() if number is None), None)
        if missing is not None:
            raise FieldError(f"messages.{caller}.tool_calls", f"the call {missing} has no result after this turn")
        order.extend(number for number in open_calls.values() if number is not None)
        open_calls.clear()

    for number, (ids, result) in enumerate(zip(calls, results, strict=True)):
        if result is None:
            close()
            order.append(number)
            caller, open_calls = number, dict.fromkeys(ids)
            if len(open_calls) < len(ids):
                repetition = next(call for call in open_calls if ids.count(call) > 1)
                raise FieldError(f"messages.{number}.tool_calls", f"two calls have the id {repetition}")
        elif open_calls.get(result, number) is not None:
            raise FieldError(f"messages.{number}.tool_call_id", "the turn before has no open call with this id")
        else:
            open_calls[result] = number
    close()
    return order
