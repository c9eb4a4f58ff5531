"""The objects of a `/v1/responses` body: items of its input, tools, the choice among them, the form of its text."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from mbd_core.serving.api.chat_fields import MAX_MESSAGES, MAX_TOOLS, OTHER_TOOLS, FunctionName, Verbosity
from mbd_core.serving.api.errors import FieldError
from mbd_core.serving.api.other_fields import NOT_STORED
from mbd_core.serving.api.parsing import MAX_TEXT_PARTS, Ignored, Strict, by_type, items, text_or_list


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
    """OpenAI's client adds it to an answer; changes nothing"""
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
    raise ValueError("only the server that made a compaction can read it; send the items that it stands for")


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
