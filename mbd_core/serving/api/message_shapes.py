"""The shapes of the replies of Anthropic's `/v1/messages`, as typed dicts: see `shapes.py`."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from mbd_core.serving.api.shapes import Measures, ReplyId

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"]


class AnswerText(TypedDict):
    type: Literal["text"]
    text: str


class AnswerThinking(TypedDict):
    type: Literal["thinking"]
    thinking: str
    """empty if `thinking.display` is `omitted`"""
    signature: str
    """a constant: thoughts are not signed here"""


class AnswerToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    """the id that the `tool_result` names"""
    name: str
    input: dict[str, Any]


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class ThinkingTokens(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    input_tokens: int
    """tokens of the prompt that the prefix cache did not hold; in `message_start` all tokens of the prompt"""
    cache_creation_input_tokens: int
    """0: nothing is paid for tokens that are cached"""
    cache_read_input_tokens: int
    """tokens of the prompt from the prefix cache"""
    output_tokens: int
    output_tokens_details: NotRequired[ThinkingTokens]
    """if there are thoughts: their tokens, which `output_tokens` counts too"""


class Message(TypedDict):
    id: ReplyId
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    """thoughts if there are any, then text, calls, or both"""
    stop_reason: StopReason | None
    """`pause_turn`: an administrator ended it; `null` at a stream's beginning"""
    stop_sequence: str | None
    """the member of `stop_sequences` that ended it"""
    usage: MessageUsage
    mbd: NotRequired[Measures]
    """at the end"""


class MessageEvent(TypedDict):
    """An event of a streamed message; its other members depend on its `type`, as in Anthropic's API."""

    type: str
    """the event's name too; `message_delta` has `mbd`"""


class InputTokens(TypedDict):
    input_tokens: int
    """of the whole prompt: messages, system and tools in the model's chat template"""


class MessageError(TypedDict):
    """An error of `/v1/messages` and of `/v1/messages/count_tokens`."""

    type: Literal["error"]
    error: "MessageErrorFields"
    request_id: str | None
    """as the header `request-id`"""


class MessageErrorFields(TypedDict):
    type: str
    """`invalid_request_error`, `authentication_error`, `permission_error`, `not_found_error`, `request_too_large`,
    `timeout_error`, `rate_limit_error`, `overloaded_error` (503) or `api_error`"""
    message: str
    """one sentence, at most 400 characters"""
    details: "MessageErrorDetails"


class MessageErrorDetails(TypedDict):
    error_code: str | None
    """the code of the other routes' errors"""
    param: str | None
    """the wrong field"""
