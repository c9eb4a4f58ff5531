"""The shapes of the replies of OpenAI's `/v1/responses`, as typed dicts: see `shapes.py`."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from mbd_core.serving.api.shapes import CachedTokens, Created, Measures, ReasoningTokens, ReplyId


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class MessageItem(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class FunctionCallItem(TypedDict):
    id: str
    type: Literal["function_call"]
    call_id: str
    """the id that the call's result names"""
    name: str
    arguments: str
    """a JSON object as text"""
    status: Literal["in_progress", "completed", "incomplete"]


class ShownReasoning(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(TypedDict):
    """The thoughts before a message or calls."""

    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ShownReasoning]
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: "CachedTokens"
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: str
    """`max_output_tokens`, or `abort`: an administrator ended it"""


class Response(TypedDict):
    id: ReplyId
    object: Literal["response"]
    created_at: Created
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    """set if the status is `incomplete`"""
    instructions: str | None
    """as in the request"""
    max_output_tokens: int | None
    """as in the request"""
    model: str
    output: list[ReasoningItem | MessageItem | FunctionCallItem]
    """thoughts if there are any, then a message, calls, or both"""
    parallel_tool_calls: bool
    """as in the request"""
    previous_response_id: None
    store: Literal[False]
    """responses are not stored"""
    temperature: float | None
    """as in the request"""
    text: dict[str, Any]
    """as in the request"""
    tool_choice: str | dict[str, Any]
    """as in the request"""
    tools: list[dict[str, Any]]
    """the functions of the request"""
    top_p: float | None
    """as in the request"""
    truncation: Literal["auto", "disabled"]
    """as in the request"""
    usage: ResponseUsage | None
    """at the end"""
    user: str | None
    """as in the request"""
    metadata: dict[str, Any]
    """as in the request"""
    mbd: NotRequired[Measures]
    """at the end"""


class ResponseEvent(TypedDict):
    """An event of a streamed response; its other members depend on its `type`, as in OpenAI's API."""

    type: str
    """the event's name too"""
    sequence_number: int
    """from 0"""
