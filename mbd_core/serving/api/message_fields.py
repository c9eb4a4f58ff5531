"""The parts of a request of Anthropic's `/v1/messages`: blocks, messages, tools, thinking, the form of the answer."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from mbd_core.serving.api.chat_fields import MAX_MESSAGES, MAX_TOOLS, FunctionName, check_parameters
from mbd_core.serving.api.errors import FieldError, value_text
from mbd_core.serving.api.parsing import MAX_TEXT_PARTS, Ignored, Strict, items, text_or_list

# Blocks of messages.


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    citations: Annotated[Any, Ignored()] = None
    cache_control: Annotated[Any, Ignored()] = None


class ThinkingBlock(Strict):
    """Thoughts before the rest of a turn, as `reasoning` of a chat's message."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """changes nothing: thoughts are taken as they are sent"""


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: FunctionName
    input: dict[str, Any]
    caller: Annotated[Any, Ignored()] = None
    toolset_name: Annotated[str | None, Ignored()] = None
    cache_control: Annotated[Any, Ignored()] = None


LEFT_OUT_BLOCKS = (
    "redacted_thinking",
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "tool_reference",
)


class OtherBlock(Strict):
    """Encrypted thoughts, or a call of Anthropic's own tools. It is left out, and `mbd.notes` says so."""

    model_config = ConfigDict(extra="allow")
    type: Literal[LEFT_OUT_BLOCKS]  # type: ignore[valid-type]  # of constants


READ_BLOCKS = ("text", "thinking", "tool_use", "tool_result")
UNREAD_BLOCKS = {
    "image": "images are not read here; describe it in a text block",
    "document": "documents are not read here; send its text in a text block",
    "search_result": "search results are not read here; send their text in a text block",
    "container_upload": "files are not read here; send their text in a text block",
    "compaction": "a compaction is read by the server that made it alone; send the messages that it stands for",
}


def _unread(value: Any) -> Any:
    if isinstance(value, str) and value in UNREAD_BLOCKS:
        raise ValueError(UNREAD_BLOCKS[value])
    raise ValueError(f"{value_text(value)} is no type of block that is read here; those are {', '.join(READ_BLOCKS)}")


class UnreadBlock(Strict):
    """A block that is not read: refused by its type."""

    model_config = ConfigDict(extra="allow")
    type: Annotated[str, BeforeValidator(_unread)]


BLOCK_FORMS = {
    "text": "(text block)",
    "thinking": "(thinking)",
    "tool_use": "(use)",
    "tool_result": "(result)",
    **dict.fromkeys(LEFT_OUT_BLOCKS, "(other)"),
}


def _block_form(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(value, dict | Strict) or kind is None:
        return None
    return BLOCK_FORMS.get(kind, "(unread)") if isinstance(kind, str) else "(unread)"


def _result_form(value: Any) -> str | None:
    form = _block_form(value)
    return form if form in (None, "(text block)", "(other)") else "(unread)"


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("(text block)")]
    | Annotated[OtherBlock, Tag("(other)")]
    | Annotated[UnreadBlock, Tag("(unread)")],
    Discriminator(_result_form),
]
ResultContent = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[ResultBlock], items(MAX_TEXT_PARTS), Tag("(list)")],
    Discriminator(text_or_list),
]


class ToolResultBlock(Strict):
    """The result of a call of the turn before."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: ResultContent | None = None
    """text, or text blocks"""
    is_error: bool | None = None
    """the model then sees `Error: ` before the content"""
    toolset_name: Annotated[str | None, Ignored()] = None
    cache_control: Annotated[Any, Ignored()] = None


Block = Annotated[
    Annotated[TextBlock, Tag("(text block)")]
    | Annotated[ThinkingBlock, Tag("(thinking)")]
    | Annotated[ToolUseBlock, Tag("(use)")]
    | Annotated[ToolResultBlock, Tag("(result)")]
    | Annotated[OtherBlock, Tag("(other)")]
    | Annotated[UnreadBlock, Tag("(unread)")],
    Discriminator(_block_form),
]
Blocks = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[Block], items(MAX_TEXT_PARTS), Tag("(list)")],
    Discriminator(text_or_list),
]
SystemText = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[TextBlock], items(MAX_TEXT_PARTS), Tag("(list)")],
    Discriminator(text_or_list),
]
ROLES = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}


class InputTurn(Strict):
    """A message; an answer's `content` is accepted unchanged."""

    role: Literal["user", "assistant", "system"]
    """neighbouring messages of one role are one turn"""
    content: Blocks
    """text, or blocks; texts are joined without anything between them, and a turn's results come before its text"""

    @field_validator("content")
    @classmethod
    def _of_its_role(cls, value: Any, info: Any) -> Any:
        role = info.data.get("role")
        for block in value if isinstance(value, list) else ():
            owner = ROLES.get(block.type)
            if owner is not None and role is not None and role != owner:
                raise ValueError(f"a block of type {block.type} belongs to a message of role {owner}, not {role}")
        return value


MessageTurns = Annotated[list[InputTurn], items(MAX_MESSAGES, least=1)]


# Tools.


class MessageTool(Strict):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    """shown to the model"""
    input_schema: dict[str, Any]
    """a JSON schema with `"type": "object"`; arguments that do not fit it are not given"""
    strict: bool | None = None
    """always honoured"""
    input_examples: Annotated[Any, Ignored()] = None
    eager_input_streaming: Annotated[bool | None, Ignored()] = None
    defer_loading: Annotated[bool | None, Ignored()] = None
    allowed_callers: Annotated[list[str] | None, Ignored()] = None
    cache_control: Annotated[Any, Ignored()] = None

    _of_an_object = field_validator("input_schema")(check_parameters)


OWN_TOOL = (
    "^(bash|text_editor|memory|computer|browser_toolset|computer_toolset|web_search|web_fetch|code_execution|"
    "tool_search_tool_bm25|tool_search_tool_regex|advisor)(_20[0-9]{6})?$|^mcp_toolset(_reference)?$"
)


class AnthropicTool(Strict):
    """A tool that Anthropic's own models or servers know. It is left out, and `mbd.notes` says so."""

    model_config = ConfigDict(extra="allow")
    type: Annotated[str, Field(pattern=OWN_TOOL)]
    name: str | None = None


def _tool_form(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "(own)" if isinstance(kind, str) and re.match(OWN_TOOL, kind) else "(custom)"


AnyMessageTool = Annotated[
    Annotated[MessageTool, Tag("(custom)")] | Annotated[AnthropicTool, Tag("(own)")], Discriminator(_tool_form)
]
MessageTools = Annotated[list[AnyMessageTool], items(MAX_TOOLS)]


class MessageToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    """`auto` (default, with `tools`): the model decides; `any`: calls; `tool`: one call of `name`; `none`: text"""
    name: str | None = None
    """required with type `tool`, refused with other types"""
    disable_parallel_tool_use: bool | None = None
    """whether an answer has one call at most; default `false`"""

    @model_validator(mode="after")
    def _named(self) -> "MessageToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise FieldError("tool_choice.name", "is given with type tool, and with no other type")
        return self


# How the model thinks, and the form of its answer.


class ThinkingFields(Strict):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    """`enabled` and `disabled` set the chat template's variable `enable_thinking`; the others leave it to the model"""
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """as `thinking_token_budget` of a chat, with the same up to three further tokens; required
    with type `enabled`, refused with other types; less than `max_tokens`"""
    display: Literal["summarized", "omitted"] | None = None
    """`omitted`: thinking blocks have no text; `summarized` changes nothing, thoughts come as they are"""


class OutputFormat(Strict):
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """as `reasoning_effort` of a chat"""
    format: OutputFormat | None = None
    """the JSON schema of the answer, as `response_format` of a chat"""
    task_budget: Annotated[Any, Ignored()] = None


class RequestMetadata(Strict):
    user_id: str | None = None
    """as `user` of a chat"""
