"""OpenAI's request shapes, as far as the endpoint honours them; what it does not honour is refused by name.

A field that would change the result is accepted only with the value that changes nothing. Requests are parsed
strictly: a string is not a number, and an unknown field is an error.
"""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from mbd_core.decoding.sampling import LEAST, Sampling
from mbd_core.serving.openai_errors import ApiError, clipped

MAX_STOPS, MAX_STOP_LENGTH = 16, 1024
MAX_TOKENS_DEFAULT = 256
MAX_CHOICES = 128
SEEDS = 2**64  # a seed has 64 bits, with sign


def _only(*values: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value is None or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values):
            return value
        accepted = " or ".join(json.dumps(v) for v in values) or "null"
        raise ValueError(f"{clipped(json.dumps(value))} is not supported; leave it out or give {accepted}")

    return check


# Fields that would change the result: only their neutral value (or null) is taken.
NotSupported = Annotated[Any, AfterValidator(_only()), WithJsonSchema({"type": "null"})]
OnlyFalse = Annotated[Any, AfterValidator(_only(False)), WithJsonSchema({"enum": [False, None]})]
OnlyZero = Annotated[Any, AfterValidator(_only(0)), WithJsonSchema({"enum": [0, None]})]
OnlyPlainText = Annotated[
    Any, AfterValidator(_only({"type": "text"})), WithJsonSchema({"enum": [{"type": "text"}, None]})
]

TokenId = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
TopP = Annotated[float, Field(ge=LEAST, le=1)]
TopK = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=-SEEDS // 2, lt=SEEDS // 2)]
NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: OnlyFalse = None


class GenerationRequest(Strict):
    """What the two generating routes have in common.

    decoding          `DecodingConfig` fields of this request, parts as objects
    top_k             beside OpenAI's own: draw among the likeliest `top_k` tokens (0: all)
    return_token_ids  the ids of the prompt's and the answer's tokens in the reply
    return_step_map   the forward in which each token was accepted, and its log-probability (`Rollout`)
    """

    model: str
    max_tokens: PositiveInt | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    decoding: dict[str, Any] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    n: NumChoices | None = None
    return_token_ids: bool | None = None
    return_step_map: bool | None = None
    # Nothing depends on these.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    # Taken with their neutral value only.
    presence_penalty: OnlyZero = None
    frequency_penalty: OnlyZero = None
    logit_bias: NotSupported = None

    @model_validator(mode="after")
    def _check(self) -> "GenerationRequest":
        if len(self.stop_strings) > MAX_STOPS:
            raise ValueError(f"stop: {len(self.stop_strings)} strings given, at most {MAX_STOPS} are taken")
        longest = max(map(len, self.stop_strings), default=0)
        if longest > MAX_STOP_LENGTH:
            raise ValueError(f"stop: a string of {longest} characters given, at most {MAX_STOP_LENGTH} are taken")
        if "" in self.stop_strings:
            raise ValueError("stop: an empty string would end every answer before it begins; leave it out")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        if self.temperature is not None and 0 < self.temperature < LEAST:
            raise ValueError(f"temperature: {self.temperature} is too little to draw with; give 0, which is greedy")
        for name, neutral in (("top_p", 1), ("top_k", 0)):
            value = getattr(self, name)
            if self.temperature is None and value not in (None, neutral):
                raise ValueError(f"{name}: {value} has no effect at temperature 0, the default here; give temperature")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn, and a seed matters."""
        return bool(self.temperature)

    @property
    def wants_logprobs(self) -> bool:
        """Whether each token's log-probability is asked for."""
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
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: OnlyZero = None
    suffix: NotSupported = None
    echo: OnlyFalse = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _no_selection(self) -> "CompletionRequest":
        if self.best_of not in (None, self.num_choices):
            raise ValueError(
                f"best_of: {clipped(str(self.best_of))} is not supported; leave it out or give n's {self.num_choices}"
            )
        return self

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts; a flat list of token ids is one prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[t for t in self.prompt if isinstance(t, int)]]
        return self.prompt  # type: ignore[return-value]  # validated: all strings or all lists


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One turn. `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    response_format: OnlyPlainText = None
    logprobs: bool | None = None
    top_logprobs: OnlyZero = None
    tools: NotSupported = None
    tool_choice: NotSupported = None
    parallel_tool_calls: NotSupported = None
    functions: NotSupported = None
    function_call: NotSupported = None
    reasoning_effort: NotSupported = None
    verbosity: NotSupported = None
    modalities: NotSupported = None
    audio: NotSupported = None
    prediction: NotSupported = None
    web_search_options: NotSupported = None
    service_tier: NotSupported = None

    @property
    def turns(self) -> list[dict[str, str]]:
        """The messages as a chat template takes them."""
        roles = {"developer": "system"}
        return [{"role": roles.get(m.role, m.role), "content": m.text} for m in self.messages]

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


R = TypeVar("R", bound=GenerationRequest)


def parse(kind: type[R], body: bytes) -> R:
    """The request in a JSON body; raises `ApiError` (400) naming the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None


# Where a field may have several forms, pydantic reports an error for each form; the client gets these instead.
FORMS = {
    "prompt": "must be a string, a list of strings, a list of token ids (0 or more), or a list of such lists",
    "content": "must be a string or a list of text parts",
    "stop": "must be a string or a list of strings",
}


def _refusal(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {message}", code="invalid_json")
    path = [clipped(str(p)) for p in first["loc"]]
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
