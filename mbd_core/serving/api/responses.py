"""OpenAI's `/v1/responses`: a body becomes a chat, and the chat's answer becomes a `Response`.

The server stores nothing: each request brings its whole conversation.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from mbd_core.decoding.blocks.sampling_config import DrawSeed, MinP, Penalty, RepetitionPenalty, TopP
from mbd_core.serving.api.chat_fields import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_TOOLS,
    OTHER_TOOLS,
    FunctionName,
    ReasoningFields,
    Verbosity,
)
from mbd_core.serving.api.dialect import ChatDialect, renamed
from mbd_core.serving.api.errors import ApiError, FieldError
from mbd_core.serving.api.fields import StructuredOutputs
from mbd_core.serving.api.other_fields import NOT_STORED, OtherResponseFields
from mbd_core.serving.api.parsing import (
    MAX_STOPS,
    MAX_TEXT_PARTS,
    Ignored,
    Strict,
    by_type,
    ignored_notes,
    items,
    text_or_list,
    validation_error,
)
from mbd_core.serving.api.requests import (
    BiasByToken,
    ChatRequest,
    NumTops,
    PositiveInt,
    SpeedShare,
    Temperature,
    TopK,
)
from mbd_core.serving.api.shapes import (
    Completion,
    FunctionCallItem,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningTokens,
    Response,
    ShownReasoning,
    Usage,
)
from mbd_core.serving.text.logprobs import TokenLogprob

MOST_NOTES = 8  # notes on items of one input
FIELDS = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"}  # of a chat


class InputText(Strict):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[Any, Ignored()] = None
    logprobs: list[Any] | None = None
    """log-probabilities of an answer; changes nothing"""
    prompt_cache_breakpoint: Annotated[Any, Ignored()] = None
    cache_control: Annotated[Any, Ignored()] = None


class InputRefusal(Strict):
    type: Literal["refusal"]
    refusal: str
    """a part of the assistant's text"""

    @property
    def text(self) -> str:
        return self.refusal


PART_FORMS = {"input_text": "(text)", "output_text": "(text)", "refusal": "(refusal)"}
InputPart = Annotated[
    Annotated[InputText, Tag("(text)")] | Annotated[InputRefusal, Tag("(refusal)")],
    by_type(PART_FORMS),
]
InputParts = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[InputPart], items(MAX_TEXT_PARTS), Tag("(list)")],
    Discriminator(text_or_list),
]
LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]
Status = Literal["in_progress", "completed", "incomplete"]


class InputMessage(Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: InputParts
    id: str | None = None
    """changes nothing"""
    status: Status | None = None
    """changes nothing"""
    phase: str | None = None
    """changes nothing"""


class InputCall(Strict):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: FunctionName
    arguments: str
    """a JSON object as text"""
    parsed_arguments: dict[str, Any] | None = None
    """what OpenAI's client adds to an answer; changes nothing"""
    id: str | None = None
    """changes nothing"""
    status: Status | None = None
    """changes nothing"""
    namespace: Annotated[str | None, Ignored()] = None
    caller: Annotated[Any, Ignored()] = None
    created_by: Annotated[Any, Ignored()] = None


class InputCustomCall(Strict):
    """A call of a custom tool, shown as a call of a function with the parameter `input`."""

    type: Literal["custom_tool_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: FunctionName
    input: str
    id: str | None = None
    """changes nothing"""
    status: Status | None = None
    """changes nothing"""
    namespace: Annotated[str | None, Ignored()] = None
    caller: Annotated[Any, Ignored()] = None
    created_by: Annotated[Any, Ignored()] = None

    @property
    def arguments(self) -> str:
        return json.dumps({"input": self.input}, ensure_ascii=False)


class InputResult(Strict):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: InputParts
    id: str | None = None
    """changes nothing"""
    status: Status | None = None
    """changes nothing"""
    name: Annotated[str | None, Ignored()] = None
    caller: Annotated[Any, Ignored()] = None
    created_by: Annotated[Any, Ignored()] = None


class ReasoningText(Strict):
    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class InputReasoning(Strict):
    """Reasoning before the next item, as `reasoning` of a chat's message."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], items(MAX_TEXT_PARTS)] | None = None
    """its text"""
    summary: Annotated[list[ReasoningText], items(MAX_TEXT_PARTS)] | None = None
    """its text if there is no `content`"""
    encrypted_content: str | None = None
    """cannot be read; if the item has no text, it is left out, and `mbd.notes` says so"""
    id: str | None = None
    """changes nothing"""
    status: Status | None = None
    """changes nothing"""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary or ())


OTHER_ITEMS = (
    "file_search_call",
    "web_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "computer_call",
    "computer_call_output",
    "local_shell_call",
    "local_shell_call_output",
    "shell_call",
    "shell_call_output",
    "apply_patch_call",
    "apply_patch_call_output",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "tool_search_call",
    "tool_search_output",
    "additional_tools",
    "program",
    "program_output",
    "configuration_update",
    "compaction_trigger",
)


class OtherItem(Strict):
    """An item of another server's built-in tool. It is left out, and `mbd.notes` says so."""

    model_config = ConfigDict(extra="allow")
    type: Literal[OTHER_ITEMS]  # type: ignore[valid-type]  # of constants


ITEM_FORMS = {
    "message": "(message)",
    "function_call": "(call)",
    "custom_tool_call": "(custom)",
    "function_call_output": "(result)",
    "custom_tool_call_output": "(result)",
    "reasoning": "(reasoning)",
    **dict.fromkeys(OTHER_ITEMS, "(other)"),
    "item_reference": "(reference)",
    "compaction": "(compaction)",
}


def _no_reference(value: Any) -> Any:
    raise ValueError(f"{NOT_STORED}; send the item itself instead of a reference")


def _no_compaction(value: Any) -> Any:
    raise ValueError("a compaction can be read by the server that made it alone; send the items that it stands for")


class ItemReference(Strict):
    """An item of an earlier response: refused, because nothing is stored."""

    model_config = ConfigDict(extra="allow")
    type: Annotated[Literal["item_reference"], BeforeValidator(_no_reference)]


class Compaction(Strict):
    """Another server's encrypted summary of earlier items: refused."""

    model_config = ConfigDict(extra="allow")
    type: Annotated[Literal["compaction"], BeforeValidator(_no_compaction)]


InputItem = Annotated[
    Annotated[InputMessage, Tag("(message)")]
    | Annotated[InputCall, Tag("(call)")]
    | Annotated[InputCustomCall, Tag("(custom)")]
    | Annotated[InputResult, Tag("(result)")]
    | Annotated[InputReasoning, Tag("(reasoning)")]
    | Annotated[OtherItem, Tag("(other)")]
    | Annotated[ItemReference, Tag("(reference)")]
    | Annotated[Compaction, Tag("(compaction)")],
    by_type(ITEM_FORMS, default="message"),
]
Input = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[InputItem], items(MAX_MESSAGES, least=1), Tag("(list)")],
    Discriminator(text_or_list),
]


class ResponseTool(Strict):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    """shown to the model"""
    parameters: dict[str, Any] | None = None
    """a JSON schema with `"type": "object"`"""
    strict: bool | None = None
    """always honoured"""
    cache_control: Annotated[Any, Ignored()] = None
    defer_loading: Annotated[bool | None, Ignored()] = None
    allowed_callers: Annotated[list[str] | None, Ignored()] = None
    output_schema: Annotated[dict[str, Any] | None, Ignored()] = None


class OtherTool(Strict):
    """A tool other than a function. It is left out, and `mbd.notes` says so."""

    model_config = ConfigDict(extra="allow")
    type: Literal[OTHER_TOOLS]  # type: ignore[valid-type]  # of constants


OF_A_CHAT = {"name", "description", "parameters", "strict"}
TOOL_FORMS = {"function": "(function)", **dict.fromkeys(OTHER_TOOLS, "(other)")}
AnyTool = Annotated[
    Annotated[ResponseTool, Tag("(function)")] | Annotated[OtherTool, Tag("(other)")],
    by_type(TOOL_FORMS),
]


class ResponseToolChoice(Strict):
    type: Literal["function"]
    name: FunctionName


class NamedResponseTool(Strict):
    model_config = ConfigDict(extra="allow")
    type: str
    name: str | None = None


class AllowedResponseTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedResponseTool], items(MAX_TOOLS, least=1)]


class OtherToolChoice(Strict):
    """The choice of a tool other than a function: refused, because such tools are left out."""

    model_config = ConfigDict(extra="allow")
    type: Literal[OTHER_TOOLS]  # type: ignore[valid-type]  # of constants


CHOICE_FORMS = {"function": "(function)", "allowed_tools": "(allowed)", **dict.fromkeys(OTHER_TOOLS, "(other)")}


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("(word)")]
    | Annotated[ResponseToolChoice, Tag("(function)")]
    | Annotated[AllowedResponseTools, Tag("(allowed)")]
    | Annotated[OtherToolChoice, Tag("(other)")],
    by_type(CHOICE_FORMS),
]


class ResponsesTextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    """changes nothing"""
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """required with type `json_schema`, refused with other types"""
    description: str | None = None
    """changes nothing"""
    strict: bool | None = None
    """always honoured"""

    @model_validator(mode="after")
    def _schema_of_its_type(self) -> "ResponsesTextFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise FieldError("text.format.schema", "is given with type json_schema, and with no other type")
        return self


class ResponseText(Strict):
    format: ResponsesTextFormat | None = None
    """the form of the answer, as `response_format` of a chat"""
    verbosity: Verbosity | None = None
    """as `verbosity` of a chat"""


class ResponseStreamOptions(Strict):
    include_obfuscation: Annotated[bool | None, Ignored()] = None


class ResponsesChat(ChatRequest):
    """The chat that is equivalent to a `ResponsesRequest`."""

    left_out: tuple[str, ...] = ()
    """the reply's notes on the `ResponsesRequest`'s own fields"""

    @property
    def notes(self) -> list[str]:
        return [*self.left_out, *super().notes]


class ResponsesRequest(OtherResponseFields, ChatDialect):
    """A conversation to continue, in the form of OpenAI's Responses."""

    model: str
    """the name of a served model or of an adapter; 404 for another"""
    input: Input
    """the user's text, or the conversation's items; an answer's items are accepted unchanged; references to items, and
    compactions, are refused"""
    instructions: str | None = None
    """a system message before `input`"""
    tools: Annotated[list[AnyTool], items(MAX_TOOLS)] | None = None
    """functions that the model may call; other tools are left out, and `mbd.notes` says so"""
    tool_choice: ToolChoice | None = None
    """as of a chat; a choice of a tool other than a function is refused"""
    parallel_tool_calls: bool | None = None
    """as of a chat"""
    text: ResponseText | None = None
    """the form of the answer"""
    max_output_tokens: PositiveInt | None = None
    """as `max_tokens` of a chat"""
    stream: bool | None = None
    """the answer as server-sent events, each with its `sequence_number`; default `false`"""
    stream_options: ResponseStreamOptions | None = None
    temperature: Temperature | None = None
    """as of a chat"""
    top_p: TopP | None = None
    """as of a chat"""
    top_k: TopK | None = None
    """as of a chat"""
    min_p: MinP | None = None
    """as of a chat"""
    presence_penalty: Penalty | None = None
    """as of a chat"""
    frequency_penalty: Penalty | None = None
    """as of a chat"""
    repetition_penalty: RepetitionPenalty | None = None
    """as of a chat"""
    logit_bias: BiasByToken | None = None
    """as of a chat"""
    stop: str | Annotated[list[str], items(MAX_STOPS)] | None = None
    """as of a chat"""
    ignore_eos: bool | None = None
    """as of a chat"""
    structured_outputs: StructuredOutputs | None = None
    """as of a chat; not beside `text.format`"""
    chat_template_kwargs: dict[str, Any] | None = None
    """as of a chat"""
    seed: DrawSeed | None = None
    """as of a chat"""
    decoding: dict[str, Any] | None = None
    """as of a chat"""
    speed: SpeedShare | None = None
    """as of a chat"""
    user: str | None = None
    """as of a chat"""
    metadata: dict[str, Any] | None = None
    """returned in the answer"""
    include: Annotated[list[Included], items(16)] | None = None
    """`message.output_text.logprobs`: each token's log-probability, not beside tools that may be called; the other
    values change nothing"""
    reasoning: ReasoningFields | None = None
    """as of a chat"""
    top_logprobs: NumTops | None = None
    """number of likeliest tokens beside each token; only with the log-probabilities"""
    truncation: Literal["auto", "disabled"] | None = None
    """changes nothing: no item is dropped, and an input that is too long is always refused"""

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ResponsesRequest":
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise FieldError("top_logprobs", f"only allowed with {LOGPROBS}", remedy="name that in include")
        if self.chat.wants_logprobs and self.chat.call_rule is not None:  # what a chat refuses is refused here
            why = f"{LOGPROBS} is not given of an answer that may call tools"
            raise FieldError("include", why, remedy="leave it out, or give tool_choice none")
        return self

    @cached_property
    def chat(self) -> ChatRequest:
        """The same request as a chat. Raises the chat's `ApiError`, with this request's field."""
        form = None if self.text is None else self.text.format
        messages, left_out = self._messages
        body = {
            **{name: getattr(self, name) for name in CHAT_FIELDS},
            "left_out": (*ignored_notes(self), *self._left_out_tools, *left_out),
            "logprobs": LOGPROBS in (self.include or ()),
            "messages": messages,
            "tools": [
                {"type": "function", "function": tool.model_dump(include=OF_A_CHAT)} for tool in self._functions
            ],
            "tool_choice": self._chat_choice,
            "max_completion_tokens": self.max_output_tokens,
            "verbosity": None if self.text is None else self.text.verbosity,
            "response_format": None if form is None else _chat_format(form),
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
        }
        try:
            return ResponsesChat.model_validate(body)
        except ValidationError as error:
            raise self.own_error(validation_error(error, ResponsesChat)) from None

    def own_error(self, error: ApiError) -> ApiError:
        field = (error.param or "").partition(".")[0]
        return renamed(error, FIELDS.get(field, error.param))

    @property
    def _functions(self) -> list[ResponseTool]:
        return [tool for tool in self.tools or () if isinstance(tool, ResponseTool)]

    @property
    def _left_out_tools(self) -> list[str]:
        """The reply's notes on tools other than functions."""
        kinds = dict.fromkeys(str(tool.type) for tool in self.tools or () if isinstance(tool, OtherTool))
        return [f"tools of type {kind} are left out: functions alone are called here" for kind in kinds]

    @property
    def _chat_choice(self) -> Any:
        """The choice of tools in a chat's form."""
        choice = self.tool_choice
        if isinstance(choice, ResponseToolChoice):
            return {"type": "function", "function": {"name": choice.name}}
        if isinstance(choice, OtherToolChoice):
            why = f"a tool of type {choice.type} is left out, functions alone are called here"
            raise FieldError("tool_choice", why, remedy='give "auto", or name a function')
        if not isinstance(choice, AllowedResponseTools):
            return choice
        names = [tool.name for tool in choice.tools if tool.type == "function"]
        if not names:
            why = "no function is among the allowed tools, and functions alone are called here"
            raise FieldError("tool_choice", why, remedy='give "none", or allow a function')
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}

    @property
    def _messages(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The input as a chat's messages, and notes on items that are left out.

        Calls belong to the assistant's message before them, and reasoning to the assistant's message after it.
        """
        messages: list[dict[str, Any]] = []
        notes: list[str] = []
        reasoning = ""
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}], notes
        for number, item in enumerate(self.input):
            if isinstance(item, InputReasoning):
                reasoning += item.text
                if item.encrypted_content and not item.text:
                    notes.append(f"input.{number} is left out: its reasoning is encrypted")
            elif isinstance(item, OtherItem):
                notes.append(f"input.{number} is left out: an item of type {item.type} has no place here")
            elif isinstance(item, InputMessage):
                messages.append({"role": item.role, "content": _text(item.content)})
                if item.role == "assistant":
                    messages[-1]["reasoning"], reasoning = reasoning or None, ""
            elif isinstance(item, InputResult):
                messages.append({"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id})
            elif isinstance(item, InputCall | InputCustomCall):
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None, "reasoning": reasoning or None})
                    reasoning = ""
                calls = messages[-1].setdefault("tool_calls", [])
                if len(calls) == MAX_CALLS:
                    raise FieldError("input", f"a turn has more than {MAX_CALLS} calls, the most that are taken")
                function = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
        if len(notes) > MOST_NOTES:
            notes[MOST_NOTES:] = [f"{len(notes) - MOST_NOTES} more items of input are left out"]
        return messages, notes

    def response(self, *, id: str, created: int) -> Response:
        """The response at its beginning."""
        form = {"type": "text"}
        if self.text is not None and self.text.format is not None:
            form = self.text.format.model_dump(by_alias=True, exclude_none=True)
        choice = self.tool_choice
        shown_choice = choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump()
        return {
            "id": id,
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "model": self.model,
            "output": [],
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self.temperature,
            "text": {"format": form},
            "tool_choice": shown_choice,
            "tools": [tool.model_dump(exclude_none=True) for tool in self._functions],
            "top_p": self.top_p,
            "truncation": self.truncation or "disabled",
            "usage": None,
            "user": self.user,
            "metadata": self.metadata or {},
        }


CHAT_FIELDS = (
    "model",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "ignore_eos",
    "structured_outputs",
    "chat_template_kwargs",
    "reasoning",
    "seed",
    "decoding",
    "speed",
    "user",
    "top_logprobs",
)
"""Fields with the same name in a chat."""


def _text(content: str | Sequence[InputText | InputRefusal]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _chat_format(form: ResponsesTextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": form.type, "json_schema": {"name": form.name or "answer", "schema": form.json_schema}}


# The parts of a response.


def output_text(text: str, logprobs: Sequence[TokenLogprob] = ()) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message_item(
    id: str, text: str | None, logprobs: Sequence[TokenLogprob] = (), *, status: Status = "completed"
) -> MessageItem:
    """A message of the assistant; without text it has no content yet."""
    content = [] if text is None else [output_text(text, logprobs)]
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def reasoning_item(id: str, text: str | None, *, status: Status = "completed") -> ReasoningItem:
    """An answer's thoughts; without text they have no content yet."""
    content: list[ShownReasoning] = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": id, "type": "reasoning", "summary": [], "content": content, "status": status}


def call_item(id: str, call_id: str, name: str, arguments: str, *, status: Status = "completed") -> FunctionCallItem:
    return {
        "id": id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def finished(response: Response, completion: dict[str, Any], output: list[Any], reason: str) -> Response:
    """The response at its end, with the usage and measures of the chat's `completion`."""
    usage = cast(Usage, completion["usage"])
    whole = reason in ("stop", "tool_calls")
    none: ReasoningTokens = {"reasoning_tokens": 0}
    reasoning = usage.get("completion_tokens_details", none)
    return {
        **response,
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens" if reason == "length" else reason},
        "output": output,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": reasoning,
            "total_tokens": usage["total_tokens"],
        },
        "mbd": completion["mbd"],
    }


def entries(choice: Mapping[str, Any]) -> list[TokenLogprob]:
    """The log-probabilities in a chat's choice, if it has any."""
    return list((choice["logprobs"] or {}).get("content", ()))


def whole_response(response: Response, completion: Completion) -> Response:
    """The response of a chat's whole answer."""
    choice = completion["choices"][0]
    message, reason = choice["message"], choice["finish_reason"]
    suffix = response["id"].removeprefix("resp_")
    calls = message.get("tool_calls", [])
    status: Status = "completed" if reason in ("stop", "tool_calls") else "incomplete"
    output: list[Any] = []
    if reasoning := message.get("reasoning"):
        output.append(reasoning_item(f"rs_{suffix}", reasoning))
    if message["content"] or not (calls or (output and status == "incomplete")):
        output.append(message_item(f"msg_{suffix}", message["content"] or "", entries(choice), status=status))
    for number, call in enumerate(calls):
        function = call["function"]
        output.append(call_item(f"fc_{suffix}_{number}", call["id"], function["name"], function["arguments"]))
    return finished(response, cast(dict[str, Any], completion), output, reason)
