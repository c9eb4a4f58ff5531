"""OpenAI's request shapes, as far as the endpoint honours them; what it does not honour is refused by name.

A field that would change the result is accepted only with the value that changes nothing. Requests are parsed
strictly: a string is not a number, and an unknown field is an error.
"""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from mbd_core.decoding.blocks.sampling_config import LEAST, Sampling
from mbd_core.serving.api.errors import ApiError, clipped
from mbd_core.serving.api.fields import (
    AssistantCall,
    Strict,
    StructuredFields,
    Template,
    ToolFields,
    check_template,
    items,
    ordered_results,
)
from mbd_core.serving.api.stream_places import SEEDS, ResumableFields, Seed, check_fields

MAX_STOPS, MAX_STOP_LENGTH = 16, 1024
MAX_TOKENS_DEFAULT = 256
MAX_CHOICES = 128
MAX_PROMPTS = 128  # of one body, unless the server says otherwise
MOST_PROMPTS = 4096  # that it may say
MAX_IDS = 2**18  # of one prompt
MAX_MESSAGES, MAX_TEXT_PARTS, MAX_CALLS = 4096, 1024, 128
MAX_QUOTES = 100_000  # of a body, around its keys and texts; those in texts are escaped
MAX_BRACKETS = 50_000  # of a body, those in its texts not counted
MAX_COMMAS = 600_000  # the same; token ids have one each
MAX_ERRORS = 1000  # that are looked at


class Only:
    """Mark of a field that would change the result: it takes the values that change nothing, or null."""

    def __init__(self, *values: Any) -> None:
        self._values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [*self._values, None]}

    def _check(self, value: Any) -> Any:
        if value is None or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in self._values):
            return value
        accepted = " or ".join(json.dumps(v) for v in self._values) or "null"
        raise ValueError(f"{_shown(value)} is not supported; leave it out or give {accepted}")


def _shown(value: Any) -> str:
    """A value of a body for a message; a list, an object or a huge number is not written out, which takes long."""
    if isinstance(value, str):
        return clipped(json.dumps(clipped(value)))
    if isinstance(value, list | dict) or (isinstance(value, int) and value.bit_length() > 64):
        return "this value"
    return json.dumps(value)


TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], items(MAX_IDS)]
PositiveInt = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Speed = Annotated[float, Field(ge=0, le=1)]
TopP = Annotated[float, Field(ge=LEAST, le=1)]
TopK = Annotated[int, Field(ge=0, lt=2**31)]
NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, Only(False)] = None


class GenerationRequest(StructuredFields, ResumableFields):
    """What the two generating routes have in common.

    decoding          `DecodingConfig` fields of this request, parts as objects
    speed             instead of `decoding`: a point of the model's measured front, 0 its most accurate, 1 its fastest
    top_k             beside OpenAI's own: draw among the likeliest `top_k` tokens (0: all)
    return_token_ids  the ids of the prompt's and the answer's tokens in the reply
    return_step_map   the forward in which each token was accepted, and its log-probability (`Rollout`)
    frames            in a stream, an event for each forward that shows the Block Buffer (`FrameEvent`)
    """

    model: str
    max_tokens: PositiveInt | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], items(MAX_STOPS)] | None = None
    decoding: dict[str, Any] | None = None
    speed: Speed | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    n: NumChoices | None = None
    return_token_ids: bool | None = None
    return_step_map: bool | None = None
    frames: bool | None = None
    # Nothing depends on these.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # Taken with the values that change nothing; the last ones are other servers' own.
    presence_penalty: Annotated[Any, Only(0)] = None
    frequency_penalty: Annotated[Any, Only(0)] = None
    logit_bias: Annotated[Any, Only({})] = None
    min_p: Annotated[Any, Only(0)] = None
    min_tokens: Annotated[Any, Only(0)] = None
    repetition_penalty: Annotated[Any, Only(1)] = None
    length_penalty: Annotated[Any, Only(1)] = None
    ignore_eos: Annotated[Any, Only(False)] = None
    use_beam_search: Annotated[Any, Only(False)] = None
    stop_token_ids: Annotated[Any, Only([])] = None
    include_stop_str_in_output: Annotated[Any, Only(False)] = None
    skip_special_tokens: Annotated[Any, Only(True)] = None

    @model_validator(mode="after")
    def _check(self) -> "GenerationRequest":
        longest = max(map(len, self.stop_strings), default=0)
        if longest > MAX_STOP_LENGTH:
            raise ValueError(f"stop: a string of {longest} characters given, at most {MAX_STOP_LENGTH} are taken")
        if "" in self.stop_strings:
            raise ValueError("stop: an empty string would end every answer before it begins; leave it out")
        if self.speed is not None and self.decoding is not None:
            raise ValueError("speed: chooses the decoding, which decoding gives already; give one of them")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        if self.frames and not self.stream:
            raise ValueError("frames: only allowed when stream is true; a whole answer has nothing provisional")
        calls = self.grammar_field == "tools"
        check_fields(self, stream=bool(self.stream), num_choices=self.num_prompts * self.num_choices, calls=calls)
        if self.temperature is not None and 0 < self.temperature < LEAST:
            raise ValueError(f"temperature: {self.temperature} is too little to draw with; give 0, which is greedy")
        for name, neutral in (("top_p", 1), ("top_k", 0)):
            value = getattr(self, name)
            if self.temperature is None and value not in (None, neutral):
                raise ValueError(f"{name}: {value} has no effect at temperature 0, the default here; give temperature")
        if self.grammar_field is not None and self.stop_strings:
            raise ValueError(f"stop: would cut an answer that {self.grammar_field} holds to its form; leave it out")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_prompts(self) -> int:
        """Prompts, each of which gets `num_choices` answers."""
        return 1

    @property
    def prompt_field(self) -> str:
        """The field that the prompts are in, and that an error about them names."""
        raise NotImplementedError

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn, and a seed matters."""
        return bool(self.temperature)

    @property
    def wants_logprobs(self) -> bool:
        """Whether each token's log-probability is asked for."""
        raise NotImplementedError

    def num_characters(self, body: int) -> int:
        """About how many characters are to be tokenised of a body of so many bytes."""
        raise NotImplementedError

    def samplings(self, seed: int) -> list[Sampling]:
        """How each answer to a prompt is drawn: the i-th with `seed + i`, which wraps around at 64 bits."""
        return [
            Sampling(
                temperature=self.temperature or 0.0,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=self.top_k or 0,
                seed=(seed + i + SEEDS // 2) % SEEDS - SEEDS // 2,
            )
            for i in range(self.num_choices)
        ]

    @property
    def budget(self) -> int | None:
        """The tokens asked for; `None` leaves the number to the server."""
        return self.max_tokens

    @property
    def budget_field(self) -> str:
        """The field that holds `budget`, and that an error about it names."""
        return "max_tokens"

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationRequest):
    """A text, or token ids, that go on.

    parse_special  control tokens that a text of `prompt` or `template` spells are control tokens: for clients that
                   write the model's chat template themselves; otherwise they are text
    """

    prompt: str | Annotated[list[str], items(MOST_PROMPTS)] | TokenIds | Annotated[list[TokenIds], items(MOST_PROMPTS)]
    echo: bool | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[Any, Only(0, 1)] = None
    suffix: Annotated[Any, Only("")] = None
    best_of: int | None = None
    template: Template | None = None
    parse_special: bool | None = None

    @model_validator(mode="after")
    def _template_alone(self) -> "CompletionRequest":
        if self.template is None:
            return self
        check_template(self.template)
        if self.grammar_field is not None:
            raise ValueError(f"template: cannot be held to {self.grammar_field} too; give one of them")
        for name in ("max_tokens", "stop"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: a template ends where it ends; leave {name} out")
        return self

    @model_validator(mode="after")
    def _no_selection(self) -> "CompletionRequest":
        if self.best_of not in (None, self.num_choices):
            raise ValueError(
                f"best_of: {clipped(str(self.best_of))} is not supported; leave it out or give n's {self.num_choices}"
            )
        return self

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt's own tokens are asked for."""
        return bool(self.echo) and self.logprobs is not None

    @model_validator(mode="after")
    def _check_scores(self) -> "CompletionRequest":
        if not self.scores_prompt:
            if self.max_tokens == 0:
                raise ValueError("max_tokens: 0 is for echo with logprobs; give 1 or more")
            if self.logprobs:
                raise ValueError("logprobs: 1 is for echo with logprobs; give 0, or leave it out")
            return self
        if self.max_tokens not in (0, 1):
            raise ValueError("max_tokens: echo with logprobs scores the prompt, and takes 0 or 1 tokens behind it")
        for name in ("decoding", "speed", "stop", "template", "stream", "return_step_map", self.grammar_field):
            if name is not None and getattr(self, name) not in (None, False, []):
                raise ValueError(f"{name}: has no effect on echo with logprobs, which scores the prompt; leave it out")
        if self.num_choices > 1:
            raise ValueError("n: echo with logprobs scores each prompt once; leave it out")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    def num_characters(self, body: int) -> int:
        fixed = [part for part in self.template or () if isinstance(part, str)]
        return sum(len(text) for text in (*self.prompts, *fixed) if isinstance(text, str))

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def prompt_field(self) -> str:
        return "prompt"

    def echoes(self, decode: Callable[[list[int]], str]) -> list[str]:
        """The text before each choice's own: its prompt, where the client asked for that."""
        if not self.echo:
            return []
        texts = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in self.prompts]
        return [text for text in texts for _ in range(self.num_choices)]

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts; a flat list of token ids is one prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]  # validated: all strings or all lists


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One turn. `developer` is OpenAI's newer word for `system`; `tool` is what a called function returned.

    An answer of this server, or of OpenAI's client, can be sent back as it is: its fields without content are taken.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[AssistantCall], items(MAX_CALLS)] | None = None
    content: Annotated[str | Annotated[list[TextPart], items(MAX_TEXT_PARTS)] | None, Field(validate_default=True)] = (
        None
    )
    tool_call_id: Annotated[str | None, Field(validate_default=True)] = None
    name: str | None = None  # changes nothing: chat templates have no place for it
    parsed: dict[str, Any] | None = None  # what OpenAI's client reads in the content; changes nothing
    provider_specific_fields: dict[str, Any] | None = None  # what LiteLLM puts aside of an answer; changes nothing
    refusal: Annotated[Any, Only()] = None
    annotations: Annotated[Any, Only([])] = None
    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only()] = None
    reasoning_content: Annotated[Any, Only("")] = None

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
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _of_results_alone(cls, value: Any, info: ValidationInfo) -> Any:
        if (value is not None) != (info.data.get("role") == "tool"):
            raise ValueError(
                "a message of role tool has the id of the call whose result it is, and no other message has"
            )
        return value

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())

    @property
    def turn(self) -> dict[str, Any]:
        """The turn as a chat template takes it."""
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            turn["tool_calls"] = [call.turn for call in self.tool_calls]
        return turn if self.tool_call_id is None else turn | {"tool_call_id": self.tool_call_id}


Messages = Annotated[list[ChatMessage], items(MAX_MESSAGES, least=1)]


def turns(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as a chat template takes them, results in the order of their calls. Raises `ValueError` naming a
    message whose calls have no result, or that is no call's result."""
    return [messages[i].turn for i in _order(messages)]


def _order(messages: Sequence[ChatMessage]) -> list[int]:
    calls = [[call.id for call in message.tool_calls or ()] for message in messages]
    return ordered_results(calls, [message.tool_call_id for message in messages])


class ChatRequest(GenerationRequest, ToolFields):
    messages: Messages
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Any, Only(0)] = None
    functions: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only("none", "auto")] = None
    reasoning_effort: Annotated[Any, Only("none")] = None
    verbosity: Annotated[Any, Only("medium")] = None
    modalities: Annotated[Any, Only(["text"])] = None
    audio: Annotated[Any, Only()] = None
    prediction: Annotated[Any, Only()] = None
    web_search_options: Annotated[Any, Only()] = None

    def num_characters(self, body: int) -> int:
        return body  # all of it is messages and tools; to write the tools once more, to count them, takes long

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def turns(self) -> list[dict[str, Any]]:
        return turns(self.messages)

    @property
    def grammar_field(self) -> str | None:
        return super().grammar_field if self.call_rule is None else "tools"

    @model_validator(mode="after")
    def _check_calls(self) -> "ChatRequest":
        _order(self.messages)
        other = super().grammar_field
        if self.call_rule is not None and other is not None:
            raise ValueError(f"{other}: tools hold the answer to their form; give one of them, or tool_choice none")
        return self

    @model_validator(mode="after")
    def _one_budget(self) -> "ChatRequest":
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise ValueError("max_completion_tokens: differs from max_tokens; give one of them")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def budget(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def budget_field(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"


R = TypeVar("R", bound=Strict)


def parse(kind: type[R], body: bytes) -> R:
    """The request in a JSON body; raises `ApiError` (400) naming the first field that is wrong."""
    _check_size(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None


def _check_size(body: bytes) -> None:
    """Count, at the speed of memory, what the time to build a body grows with."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check_most(MAX_QUOTES, "quotes", plain.count(b'"'))
    outside = b"".join(plain.split(b'"')[::2])
    _check_most(MAX_BRACKETS, "brackets", outside.count(b"[") + outside.count(b"{"))
    _check_most(MAX_COMMAS, "commas", outside.count(b","))


def _check_most(most: int, marks: str, found: int) -> None:
    if found > most:
        message = f"the body has more than {most} {marks}, the most that are read here; send less at once"
        raise ApiError(400, message, code="invalid_json")


# Where a field may have several forms, pydantic reports an error for each form; the client gets these instead.
FORMS = {
    "prompt": f"must be a string, a list of strings, a list of at most {MAX_IDS} token ids (0 or more), or a list of "
    f"such lists; at most {MOST_PROMPTS} prompts",
    "content": f"must be a string or a list of at most {MAX_TEXT_PARTS} text parts",
    "stop": f"must be a string or a list of at most {MAX_STOPS} strings",
    "template": 'must be a list of strings and holes, {"hole": N}',
    "guided_json": "must be a JSON schema, as an object or as its text",
    "tool_choice": 'must be "none", "auto", "required" or {"type": "function", "function": {"name": NAME}}',
}


def _refusal(error: ValidationError) -> ApiError:
    if error.error_count() > MAX_ERRORS:  # to list them takes long
        return ApiError(400, f"more than {MAX_ERRORS} mistakes, unknown fields among them", code="unknown_field")
    first = error.errors(include_url=False, include_context=False)[0]
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {message}", code="invalid_json")
    path = [clipped(str(p)) for p in first["loc"]]
    if path[:1] == ["response_format"]:
        path[1:2] = []  # which of its forms it is
    several = next((i for i, p in enumerate(path) if p in FORMS and i + 1 < len(path)), None)
    if kind == "extra_forbidden":
        message, code = "unknown field", "unknown_field"
    elif kind == "missing":
        message, code = "this field is required", "missing_field"
    else:
        code = "invalid_value"
        if several is not None:
            path = path[: several + 1]
            message = FORMS[path[-1]]
        elif not path and ": " in message:  # a rule over several fields names its field itself
            head, _, message = message.partition(": ")
            path = [head]
    param = ".".join(path) or None
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)
