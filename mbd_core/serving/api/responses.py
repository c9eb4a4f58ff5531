"""OpenAI's `/v1/responses`: a body becomes a chat, and the chat's answer becomes a `Response`.

The server stores nothing: each request brings its whole conversation.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import ValidationError, model_validator

from mbd_core.decoding.blocks.sampling_config import DrawSeed, MinP, Penalty, RepetitionPenalty, TopP
from mbd_core.serving.api.chat_fields import MAX_CALLS, MAX_TOOLS, ReasoningFields
from mbd_core.serving.api.dialect import ChatDialect, renamed
from mbd_core.serving.api.errors import ApiError, FieldError
from mbd_core.serving.api.fields import StructuredOutputs
from mbd_core.serving.api.other_fields import OtherResponseFields
from mbd_core.serving.api.parsing import MAX_STOPS, ignored_notes, items, validation_error
from mbd_core.serving.api.requests import (
    BiasByToken,
    ChatRequest,
    NumTops,
    PositiveInt,
    SpeedShare,
    Temperature,
    TopK,
)
from mbd_core.serving.api.response_fields import (
    LOGPROBS,
    OF_A_CHAT,
    AllowedResponseTools,
    AnyTool,
    Included,
    Input,
    InputCall,
    InputCustomCall,
    InputMessage,
    InputReasoning,
    InputRefusal,
    InputResult,
    InputText,
    OtherItem,
    OtherTool,
    OtherToolChoice,
    ResponsesTextFormat,
    ResponseStreamOptions,
    ResponseText,
    ResponseTool,
    ResponseToolChoice,
    ToolChoice,
)
from mbd_core.serving.api.response_shapes import Response

MOST_NOTES = 8  # notes on items of one input
FIELDS = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"}  # of a chat


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
