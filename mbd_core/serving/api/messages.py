"""Anthropic's `/v1/messages`: a body becomes a chat, whose answer `server/message_answer.py` makes a `Message`."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import ValidationError, model_validator

from mbd_core.decoding.blocks.sampling_config import DrawSeed, TopP
from mbd_core.serving.api.dialect import ChatDialect, renamed
from mbd_core.serving.api.errors import ApiError, FieldError
from mbd_core.serving.api.message_fields import (
    AnthropicTool,
    MessageTool,
    MessageToolChoice,
    MessageTools,
    MessageTurns,
    OutputConfig,
    RequestMetadata,
    SystemText,
    ThinkingFields,
)
from mbd_core.serving.api.message_history import History
from mbd_core.serving.api.other_fields import OtherMessageFields
from mbd_core.serving.api.parsing import MAX_STOPS, Ignored, Strict, ignored_notes, items, validation_error
from mbd_core.serving.api.requests import (
    ChatRequest,
    PositiveInt,
    SpeedShare,
    Temperature,
    TokenizeRequest,
    TopK,
)

FIELDS = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "user": "metadata.user_id",
}
"""Fields of a chat under their names here; `messages` have places of their own."""
THINKING = "enable_thinking"  # the chat template's variable
R = TypeVar("R", bound=Strict)


class MessagesChat(ChatRequest):
    """The chat that is equivalent to a `MessagesRequest`."""

    left_out: tuple[str, ...] = ()
    """the reply's notes on the `MessagesRequest`'s own fields"""
    places: tuple[str, ...] = ()
    """the fields from which the messages come"""
    sets_thinking: bool = False
    """whether `thinking` set the template's variable"""

    @property
    def notes(self) -> list[str]:
        return [*self.left_out, *super().notes]

    @property
    def thought_budget_field(self) -> str:
        return "thinking.budget_tokens"

    def template_notes(self, unknown: Callable[[Iterable[str]], list[str]]) -> list[str]:
        notes = super().template_notes(unknown)
        if self.sets_thinking:
            own = f"thinking has no effect: the chat template has no variable {THINKING}"
            notes = [own if note.startswith(f"chat_template_kwargs.{THINKING}:") else note for note in notes]
        places = dict(enumerate(self.places))
        return [re.sub(r"^messages\.(\d+)\.reasoning", lambda m: places[int(m[1])] + ": thinking", n) for n in notes]


class PromptFields(Strict):
    """The fields from which a prompt is made."""

    one_form: ClassVar[frozenset[str]] = frozenset({"tool_choice"})
    model: str
    """the name of a served model or of an adapter; 404 for another"""
    messages: MessageTurns
    """the conversation; if it ends with a text of the assistant, the answer continues this text"""
    system: SystemText | None = None
    """a system message before `messages`"""
    tools: MessageTools | None = None
    """functions that the model may call; tools of Anthropic's own are left out, and `mbd.notes` says so"""
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingFields | None = None
    """whether the model thinks first; default: as its chat template has it"""
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """as of a chat"""
    cache_control: Annotated[Any, Ignored()] = None
    context_management: Annotated[
        dict[str, Any] | None, Ignored("nothing is dropped from messages", silent=({}, {"edits": []}))
    ] = None

    @model_validator(mode="after")
    def _check_thinking(self) -> "PromptFields":
        if self.thinking is not None and (self.thinking.type == "enabled") != (
            self.thinking.budget_tokens is not None
        ):
            raise FieldError("thinking.budget_tokens", "is given with type enabled, and with no other type")
        return self

    @cached_property
    def history(self) -> History:
        return History.of(self.system, self.messages)

    @property
    def prompt_fields(self) -> dict[str, Any]:
        """The same fields of a chat, which `/tokenize` takes too."""
        choice = self.tool_choice
        parallel = None if choice is None else choice.disable_parallel_tool_use
        return {
            "model": self.model,
            "messages": self.history.messages,
            "continue_final_message": self.history.continues,
            "tools": [_chat_tool(tool) for tool in self.tools or () if isinstance(tool, MessageTool)],
            "tool_choice": None if choice is None else _chat_choice(choice),
            "parallel_tool_calls": None if parallel is None else not parallel,
            "chat_template_kwargs": self._variables or None,
            "reasoning_effort": None if self.output_config is None else self.output_config.effort,
        }

    @property
    def _variables(self) -> dict[str, Any]:
        """The chat template's variables; the client's own override `thinking`."""
        given, kind = dict(self.chat_template_kwargs or {}), None if self.thinking is None else self.thinking.type
        return {THINKING: kind == "enabled"} | given if kind in ("enabled", "disabled") else given

    @property
    def left_out(self) -> list[str]:
        """Notes on fields and parts that change nothing."""
        tools = [tool for tool in self.tools or () if isinstance(tool, AnthropicTool)]
        kinds = dict.fromkeys(tool.type for tool in tools)
        notes = [f"tools of type {kind} are left out: functions alone are called here" for kind in kinds]
        return [*ignored_notes(self), *notes, *self.history.notes]

    def own_error(self, error: ApiError) -> ApiError:
        """A chat's refusal, with the chat's field replaced by the field of this request."""
        root, _, rest = (error.param or "").partition(".")
        number = rest.partition(".")[0]
        if root == "messages" and number.isdecimal():
            return renamed(error, self.history.places[int(number)])
        return renamed(error, FIELDS.get(root, error.param))

    def _as(self, kind: type[R], body: Mapping[str, Any]) -> R:
        """Another request from these fields. Raises its `ApiError`, with this request's field."""
        try:
            return kind.model_validate(body)
        except ValidationError as error:
            raise self.own_error(validation_error(error, kind)) from None


class MessagesRequest(PromptFields, OtherMessageFields, ChatDialect):
    """A conversation to continue, in the form of Anthropic's Messages."""

    max_tokens: PositiveInt
    """as of a chat; required"""
    stop_sequences: Annotated[list[str], items(MAX_STOPS)] | None = None
    """as `stop` of a chat"""
    stream: bool | None = None
    """the answer as server-sent events; tokens that come together share an event; default `false`"""
    temperature: Temperature | None = None
    """as of a chat, with its default"""
    top_p: TopP | None = None
    """as of a chat"""
    top_k: TopK | None = None
    """as of a chat"""
    metadata: RequestMetadata | None = None
    seed: DrawSeed | None = None
    """as of a chat"""
    decoding: dict[str, Any] | None = None
    """as of a chat"""
    speed: SpeedShare | Literal["standard"] | None = None
    """as of a chat; `standard` changes nothing"""

    @model_validator(mode="after")
    def _check_budget(self) -> "MessagesRequest":
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            why = f"must be less than max_tokens, {self.max_tokens}"
            raise FieldError("thinking.budget_tokens", why, value=budget)
        return self

    @cached_property
    def chat(self) -> ChatRequest:
        form = None if self.output_config is None else self.output_config.format
        schema = None if form is None else {"name": "answer", "schema": form.json_schema}
        kwargs = self.chat_template_kwargs or {}
        body = {
            **self.prompt_fields,
            **{name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k")},
            **{name: getattr(self, name) for name in ("seed", "decoding")},
            "thinking_token_budget": None if self.thinking is None else self.thinking.budget_tokens,
            "left_out": tuple(self.left_out),
            "places": tuple(self.history.places),
            "sets_thinking": THINKING in self._variables and THINKING not in kwargs,
            "stop": self.stop_sequences,
            "user": None if self.metadata is None else self.metadata.user_id,
            "speed": None if self.speed == "standard" else self.speed,
            "response_format": None if schema is None else {"type": "json_schema", "json_schema": schema},
            "stream": True,  # a whole message is made from the same pieces
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        return self._as(MessagesChat, body)


class CountTokensRequest(PromptFields):
    """A prompt whose tokens are counted, in the form of Anthropic's Messages."""

    speed: Annotated[Any, Ignored()] = None

    @model_validator(mode="after")
    def _makes_a_prompt(self) -> "CountTokensRequest":
        _ = self.tokenize  # while the body is parsed, as a chat
        return self

    @cached_property
    def tokenize(self) -> TokenizeRequest:
        """The same request of `/tokenize`."""
        return self._as(TokenizeRequest, self.prompt_fields)


def _chat_tool(tool: MessageTool) -> dict[str, Any]:
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**fields, "strict": tool.strict}}


def _chat_choice(choice: MessageToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
