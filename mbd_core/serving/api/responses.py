"""`/v1/responses`, as OpenAI's client sends it: a body becomes a chat, and a chat's answer becomes a `Response`.

Nothing is stored: each request brings its whole conversation.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationError, model_validator

from mbd_core.serving.api.chat_fields import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_TOOLS,
    FunctionName,
    ReasoningEffort,
    Verbosity,
)
from mbd_core.serving.api.errors import ApiError, FieldError
from mbd_core.serving.api.fields import Seed
from mbd_core.serving.api.parsing import MAX_TEXT_PARTS, Only, Strict, items, validation_error
from mbd_core.serving.api.requests import ChatRequest, NumTops, PositiveInt, Speed, Temperature, TopK, TopP
from mbd_core.serving.api.shapes import Completion, FunctionCallItem, MessageItem, OutputText, Response, Usage
from mbd_core.serving.text.logprobs import TokenLogprob

NOT_STORED = "responses are not stored here"
FIELDS = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"}  # of a chat


class InputText(Strict):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[Any, Only([])] = None
    logprobs: list[Any] | None = None
    """those of an answer; changes nothing"""


InputParts = str | Annotated[list[InputText], items(MAX_TEXT_PARTS)]
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


class InputResult(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: InputParts
    id: str | None = None
    """changes nothing"""
    status: Status | None = None
    """changes nothing"""


InputItem = InputMessage | InputCall | InputResult


class ResponseTool(Strict):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    """shown to the model"""
    parameters: dict[str, Any] | None = None
    """a JSON schema with `"type": "object"`"""
    strict: bool | None = None
    """always honoured"""


class ResponseToolChoice(Strict):
    type: Literal["function"]
    name: FunctionName


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    """changes nothing"""
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """with `json_schema`, where it is needed"""
    description: str | None = None
    """changes nothing"""
    strict: bool | None = None
    """always honoured"""

    @model_validator(mode="after")
    def _schema_of_its_type(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise FieldError("text.format.schema", "is given with type json_schema, and with no other type")
        return self


class ResponseText(Strict):
    format: ResponseFormat | None = None
    """what the answer must match, as `response_format` of a chat"""
    verbosity: Verbosity | None = None
    """as `verbosity` of a chat"""


class ResponseReasoning(Strict):
    effort: ReasoningEffort | None = None
    """as `reasoning_effort` of a chat"""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """changes nothing: reasoning is no part of its own in an answer here"""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """changes nothing, as `summary`"""


class ResponseStreamOptions(Strict):
    include_obfuscation: Annotated[Any, Only(False)] = None


class ResponsesRequest(Strict):
    """A conversation that goes on, as OpenAI's Responses have it."""

    model: str
    """the name of a served model or of an adapter; 404 for another"""
    input: str | Annotated[list[InputItem], items(MAX_MESSAGES, least=1)]
    """the user's text, or the conversation's items; items of an answer can be sent back as they are"""
    instructions: str | None = None
    """a system message before `input`"""
    tools: Annotated[list[ResponseTool], items(MAX_TOOLS)] | None = None
    """functions that the model may call"""
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    """as of a chat"""
    parallel_tool_calls: bool | None = None
    """as of a chat"""
    text: ResponseText | None = None
    """the form of the answer"""
    max_output_tokens: PositiveInt | None = None
    """as `max_tokens` of a chat"""
    max_tool_calls: Annotated[Any, Only()] = None
    stream: bool | None = None
    """the answer as server-sent events, each with its `sequence_number`; default `false`"""
    stream_options: ResponseStreamOptions | None = None
    temperature: Temperature | None = None
    """as of a chat"""
    top_p: TopP | None = None
    """as of a chat"""
    top_k: TopK | None = None
    """as of a chat"""
    seed: Seed | None = None
    """as of a chat"""
    decoding: dict[str, Any] | None = None
    """as of a chat"""
    speed: Speed | None = None
    """as of a chat"""
    store: bool | None = None
    """default `false`; `true` is refused, responses are not stored"""
    previous_response_id: str | None = None
    """refused: give the conversation in `input`"""
    conversation: Any = None
    """refused: give the conversation in `input`"""
    user: str | None = None
    """as of a chat"""
    metadata: dict[str, Any] | None = None
    """comes back in the answer"""
    service_tier: Literal["auto", "default"] | None = None
    """changes nothing"""
    safety_identifier: str | None = None
    """changes nothing"""
    prompt_cache_key: str | None = None
    """changes nothing"""
    prompt_cache_retention: str | None = None
    """changes nothing"""
    background: Annotated[Any, Only(False)] = None
    include: Annotated[list[Included], items(16)] | None = None
    """`message.output_text.logprobs`: each token's log-probability, not beside tools that may be called; the others
    name parts that no answer here has, and change nothing"""
    reasoning: ResponseReasoning | None = None
    top_logprobs: NumTops | None = None
    """so many likeliest tokens beside each; only with the log-probabilities"""
    truncation: Literal["auto", "disabled"] | None = None
    """changes nothing: no item is dropped, and an input that the model does not hold is refused under either"""
    prompt: Annotated[Any, Only()] = None

    @model_validator(mode="after")
    def _nothing_stored(self) -> "ResponsesRequest":
        if self.store:
            raise FieldError("store", NOT_STORED, value=True, remedy="give false, or leave it out")
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise FieldError(name, NOT_STORED, remedy="give the whole conversation in input, and leave it out")
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise FieldError("top_logprobs", f"only allowed with {LOGPROBS}", remedy="name that in include")
        if self.chat.wants_logprobs and self.chat.call_rule is not None:  # what a chat refuses is refused here
            why = f"{LOGPROBS} is not given of an answer that may call tools"
            raise FieldError("include", why, remedy="leave it out, or give tool_choice none")
        return self

    @cached_property
    def chat(self) -> ChatRequest:
        """The same request as a chat; raises `ApiError` for what a chat refuses, with the field of this request."""
        form = None if self.text is None else self.text.format
        choice: Any = self.tool_choice
        if isinstance(choice, ResponseToolChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        names = ("model", "parallel_tool_calls", "temperature", "top_p", "top_k", "seed", "decoding", "speed", "user")
        body = {
            **{name: getattr(self, name) for name in (*names, "top_logprobs")},
            "logprobs": LOGPROBS in (self.include or ()),
            "messages": self._messages,
            "tools": [
                {"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools or ()
            ],
            "tool_choice": choice,
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "verbosity": None if self.text is None else self.text.verbosity,
            "response_format": None if form is None else _chat_format(form),
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
        }
        try:
            return ChatRequest.model_validate(body)
        except ValidationError as error:
            raise own_error(validation_error(error)) from None

    @property
    def _messages(self) -> list[dict[str, Any]]:
        """The input as a chat's messages: the calls of a turn belong to the assistant's message before them."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, InputMessage):
                messages.append({"role": item.role, "content": _text(item.content)})
            elif isinstance(item, InputResult):
                messages.append({"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id})
            else:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                calls = messages[-1].setdefault("tool_calls", [])
                if len(calls) == MAX_CALLS:
                    raise FieldError("input", f"a turn has more than {MAX_CALLS} calls, the most that are taken")
                function = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
        return messages

    def response(self, *, id: str, created: int) -> Response:
        """The response as it begins."""
        form = {"type": "text"}
        if self.text is not None and self.text.format is not None:
            form = self.text.format.model_dump(by_alias=True, exclude_none=True)
        choice = self.tool_choice
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
            "tool_choice": choice.model_dump() if isinstance(choice, ResponseToolChoice) else choice or "auto",
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "top_p": self.top_p,
            "truncation": self.truncation or "disabled",
            "usage": None,
            "user": self.user,
            "metadata": self.metadata or {},
        }


def _text(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _chat_format(form: ResponseFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": form.type, "json_schema": {"name": form.name or "answer", "schema": form.json_schema}}


def own_error(error: ApiError) -> ApiError:
    """A chat's refusal with the field that a `ResponsesRequest` has it in."""
    field = (error.param or "").partition(".")[0]
    own = FIELDS.get(field, field)
    if own == field:
        return error
    message = error.message.replace(error.param or "", own, 1)
    return ApiError(error.status, message, param=own, code=error.code, headers=error.headers)


# The parts of a response.


def output_text(text: str, logprobs: Sequence[TokenLogprob] = ()) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message_item(
    id: str, text: str | None, logprobs: Sequence[TokenLogprob] = (), *, status: Status = "completed"
) -> MessageItem:
    """A message of the assistant; without text it has no content yet."""
    content = [] if text is None else [output_text(text, logprobs)]
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


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
    return {
        **response,
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens" if reason == "length" else reason},
        "output": output,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
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
    if message["content"] or not calls:
        output.append(message_item(f"msg_{suffix}", message["content"] or "", entries(choice), status=status))
    for number, call in enumerate(calls):
        function = call["function"]
        output.append(call_item(f"fc_{suffix}_{number}", call["id"], function["name"], function["arguments"]))
    return finished(response, cast(dict[str, Any], completion), output, reason)
