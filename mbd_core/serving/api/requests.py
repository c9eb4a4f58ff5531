"""Every request of the endpoint, with the fields that it honours; other fields are refused by name.

A field that would change the result is accepted only with the value that changes nothing (`Only`); `other_fields.py`
has the fields that other servers document. The docstring of a field is its description in the OpenAPI document and in
docs/reference/api.md.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from mbd_core.checkpoint.chat import CallRule
from mbd_core.decoding.answers.piece import MAX_TOPS
from mbd_core.decoding.blocks.sampling_config import (
    LEAST,
    MAX_BIAS,
    MAX_BIASES,
    MAX_PENALTY,
    MAX_REPETITION,
    MAX_STOP_IDS,
    PENALTIES,
    Sampling,
)
from mbd_core.serving.api.chat_fields import (
    REASONING,
    ChatMessages,
    TemplateFields,
    ToolFields,
    Verbosity,
    check_calls,
    turns,
)
from mbd_core.serving.api.errors import FieldError, value_text
from mbd_core.serving.api.fields import SEEDS, Hole, RequestSeed, Resume, StructuredFields, Template
from mbd_core.serving.api.other_fields import OtherChatFields, OtherCompletionFields, OtherGenerationFields
from mbd_core.serving.api.parsing import MAX_IDS, MAX_STOPS, MOST_PROMPTS, Ignored, Strict, ignored_notes, items

MAX_STOP_LENGTH = 1024
MAX_TOKENS_DEFAULT = 256
MAX_CHOICES = 128
MAX_DETOKENIZED = 2**17  # tokens of a text that is asked for

TokenId = Annotated[int, Field(ge=0)]
PromptIds = Annotated[list[TokenId], items(MAX_IDS)]
PositiveInt = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
SpeedShare = Annotated[float, Field(ge=0, le=1)]
TopP = Annotated[float, Field(ge=LEAST, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=LEAST, le=MAX_REPETITION)]
Bias = Annotated[dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]], items(MAX_BIASES)]
NumTops = Annotated[int, Field(ge=0, le=MAX_TOPS)]
NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]


class StreamOptions(Strict):
    include_usage: bool | None = None
    """`usage` in the last event; default `false`"""
    continuous_usage_stats: bool | None = None
    """`usage` in each event, with the tokens so far; only with `include_usage`; default `false`"""
    include_obfuscation: Annotated[bool | None, Ignored()] = None


class GenerationRequest(StructuredFields, OtherGenerationFields):
    """What the two generating routes have in common."""

    model: str
    """the name of a served model or of an adapter; 404 for another"""
    max_tokens: PositiveInt | None = None
    """tokens of the answer, its EOS not included; default: what fits, at most the `max_new_tokens` of the model's
    `generation_config.json`, else 256. More than fit is refused
    (`context_length_exceeded`). What stands behind the last one is not decoded, so a smaller number may give another
    text and not a shorter one"""
    stream: bool | None = None
    """the answer as server-sent events; default `false`"""
    stream_options: StreamOptions | None = None
    """only with `stream`"""
    stop: str | Annotated[list[str], items(MAX_STOPS)] | None = None
    """the answer ends before the first of them, of 1 to 1,024 characters each; beside a grammar also in the
    middle of its form. Not beside tools that may be called or `template`"""
    decoding: dict[str, Any] | None = None
    """fields of `DecodingConfig`, default the model's; a field is refused if it is unknown, or if the model or the
    server cannot honour it"""
    speed: SpeedShare | None = None
    """instead of `decoding`: a point of the model's measured front, 0 its most accurate, 1 its fastest; refused for a
    model without a front"""
    temperature: Temperature | None = None
    """of drawing; above 0 at least 1e-06; default 0, greedy. Where the model's `generation_config.json` has
    `do_sample`, its values are the defaults of this and the next three fields"""
    top_p: TopP | None = None
    """draw among the likeliest tokens that together reach this probability; default 1. Like `top_k` and `min_p` it has
    no effect without `temperature`, which `mbd.notes` says then"""
    top_k: TopK | None = None
    """draw among this number of likeliest tokens; default 0, all, as -1"""
    min_p: MinP | None = None
    """draw among the tokens of at least this share of the likeliest one's probability; default 0, all"""
    seed: RequestSeed | None = None
    """of the first choice, default drawn; the i-th has `seed` + i"""
    presence_penalty: Penalty | None = None
    """subtracted from the logit of a token that the answer has; default 0. Like the next two not with `t2t`, `soft` or
    `canvas.branches`"""
    frequency_penalty: Penalty | None = None
    """subtracted for each time that the answer has the token; default 0"""
    repetition_penalty: RepetitionPenalty | None = None
    """of tokens that the prompt or the answer has: a positive logit is divided by it, another multiplied; default
    the value in `generation_config.json`, else 1"""
    logit_bias: Bias | None = None
    """numbers from -100 to 100 that are added to the logits of tokens, by their ids; at most 1,024"""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """none of this number of first positions becomes a token that ends the answer, and no stop string is looked for in
    their text; default 0, at most `max_tokens`. Not beside a grammar or `template`"""
    stop_token_ids: Annotated[list[TokenId], items(MAX_STOP_IDS)] | None = None
    """tokens that end the answer as the EOS does, and are no part of it; not beside a grammar or `template`"""
    ignore_eos: bool | None = None
    """the EOS is a token like others, and does not end the answer; not beside a grammar"""
    n: NumChoices | None = None
    """choices for each prompt, default 1; with all prompts at most what the server takes at once, and what
    `--client-requests` lets a client have"""
    return_token_ids: bool | None = None
    """`token_ids` and `prompt_token_ids` in each choice"""
    return_step_map: bool | None = None
    """`rollout` in each choice; not with `t2t`, `soft` or `canvas`"""
    return_routed_experts: bool | None = None
    """`rollout` says too which experts each forward chose; only with `return_step_map`, of a model that has experts,
    and not with `stream` or `stop`"""
    frames: bool | None = None
    """a `FrameEvent` for each forward; only with `stream`, not on a canvas"""
    resumable: bool | None = None
    """`token_ids` in each piece, and the `ResumePlace` behind each commit; only with `stream`, not with tools that may
    be called or `canvas`"""
    resume: Resume | None = None
    """go on behind such a place: one prompt, `n` 1, everything else as in the stream that was cut"""
    user: str | None = None
    """tells a client from others where keys do not; waiting clients take turns"""
    metadata: dict[str, Any] | None = None
    """changes nothing"""
    store: Annotated[bool | None, Ignored("answers are not stored", silent=(False,))] = None

    @field_validator("logit_bias")
    @classmethod
    def _by_token_id(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        wrong = next((key for key in value or () if re.fullmatch("0|[1-9][0-9]{0,8}", key) is None), None)
        if wrong is not None:
            raise ValueError(f"{value_text(wrong)} is no token id; keys are token ids as text")
        return value

    @model_validator(mode="after")
    def _check(self) -> "GenerationRequest":
        longest = max(map(len, self.stop_strings), default=0)
        if longest > MAX_STOP_LENGTH:
            raise FieldError("stop", f"a string of {longest} characters given, at most {MAX_STOP_LENGTH} are taken")
        if "" in self.stop_strings:
            why = "an empty string would end every answer before it begins"
            raise FieldError("stop", why, remedy="leave it out")
        if self.speed is not None and self.decoding is not None:
            why = "chooses the decoding, which decoding gives already"
            raise FieldError("speed", why, remedy="give one of them")
        for name in ("stream_options", "frames", "resumable", "resume"):
            if getattr(self, name) and not self.stream:
                raise FieldError(name, "only allowed when stream is true", remedy="give stream, or leave it out")
        for name in ("resumable", "resume"):
            if getattr(self, name) and self.grammar_field == "tools":
                raise FieldError(name, "an answer that may call tools is not taken up again", remedy="leave it out")
        if self.return_routed_experts:
            if not self.return_step_map:
                raise FieldError("return_routed_experts", "only allowed when return_step_map is true")
            for name in ("stream", "stop"):
                if getattr(self, name):
                    why = "return_routed_experts records whole answers, at their end"
                    raise FieldError(name, why, remedy="leave it out")
        if self.resume is not None and self.num_prompts * self.num_choices != 1:
            raise FieldError("resume", "takes up one choice", remedy="give its own prompt and n 1")
        if self.temperature is not None and 0 < self.temperature < LEAST:
            why = "is too little to draw with"
            raise FieldError("temperature", why, value=self.temperature, remedy="give 0, which is greedy")
        if self.grammar_field == "tools" and self.stop_strings:
            why = "would cut an answer that tools holds to its form"
            raise FieldError("stop", why, remedy="leave it out")
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
    def notes(self) -> list[str]:
        """The fields that are taken and have no effect."""
        notes = ignored_notes(self)
        if self.temperature is not None:
            return notes
        neutral = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
        names = [name for name, values in neutral.items() if getattr(self, name) not in (None, *values)]
        notes += [f"{name} has no effect at temperature 0, the default here; give temperature" for name in names]
        return notes

    @property
    def num_tops(self) -> int:
        """How many likeliest tokens of each place are asked for."""
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
        """About how many characters of a body of `body` bytes are to be tokenised."""
        raise NotImplementedError

    def samplings(self, seed: int) -> list[Sampling]:
        """How each answer to a prompt is drawn: the i-th with `seed + i`, which wraps around at 64 bits."""
        return [
            Sampling(
                temperature=self.temperature or 0.0,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=max(self.top_k or 0, 0),
                min_p=self.min_p or 0.0,
                logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
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
    def usage_in_stream(self) -> Literal["none", "last", "each"]:
        """Which events of a stream have the usage."""
        if self.stream_options is None or not self.stream_options.include_usage:
            return "none"
        return "each" if self.stream_options.continuous_usage_stats else "last"


class CompletionRequest(GenerationRequest, OtherCompletionFields):
    """A text, or token ids, that go on."""

    prompt: (
        str | Annotated[list[str], items(MOST_PROMPTS)] | PromptIds | Annotated[list[PromptIds], items(MOST_PROMPTS)]
    )
    """one prompt or several, as many as `--body-prompts`; an empty one is refused"""
    echo: bool | None = None
    """the prompt's text before each choice's; with `logprobs` the prompt's own log-probabilities"""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """of an answer, default: as of a chat; 0 only with `echo` and `logprobs`, where it must be given,
    as 0 or 1"""
    logprobs: NumTops | None = None
    """each token's log-probability, and this number of likeliest tokens beside it; with `echo` 0 or 1"""
    best_of: int | None = None
    """must be `n`"""
    template: Template | None = None
    """text, and holes of given lengths in tokens, behind the prompt, from a hole on; not beside `max_tokens`, `stop`,
    a grammar, `t2t`, `soft`, `canvas`"""
    parse_special: bool | None = None
    """control tokens that the texts of `prompt` and `template` spell are control tokens, for clients that write the
    model's chat template themselves; otherwise text"""

    @model_validator(mode="after")
    def _template_alone(self) -> "CompletionRequest":
        if self.template is None:
            return self
        if not isinstance(self.template[0], Hole):
            why = "begins with text; a template begins with a hole"
            raise FieldError("template", why, remedy="put the text before it into prompt")
        if self.grammar_field is not None:
            raise FieldError("template", f"cannot be held to {self.grammar_field} too", remedy="give one of them")
        for name in ("max_tokens", "stop"):
            if getattr(self, name) is not None:
                raise FieldError(name, "a template ends where it ends", remedy=f"leave {name} out")
        return self

    @model_validator(mode="after")
    def _no_selection(self) -> "CompletionRequest":
        if self.best_of not in (None, self.num_choices):
            remedy = f"leave it out or give n's {self.num_choices}"
            raise FieldError("best_of", "is not supported", value=self.best_of, remedy=remedy)
        return self

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt's own tokens are asked for."""
        return bool(self.echo) and self.logprobs is not None

    @model_validator(mode="after")
    def _check_scores(self) -> "CompletionRequest":
        if not self.scores_prompt:
            if self.max_tokens == 0:
                raise FieldError("max_tokens", "is for echo with logprobs", value=0, remedy="give 1 or more")
            return self
        if self.logprobs not in (0, 1):
            raise FieldError("logprobs", "echo takes 0 or 1", value=self.logprobs, remedy="give 1")
        if self.max_tokens not in (0, 1):
            raise FieldError("max_tokens", "echo with logprobs scores the prompt, and takes 0 or 1 tokens behind it")
        sampling = self.samplings(0)[0]
        changes = [name for name in ("logit_bias", *PENALTIES) if getattr(sampling, name) != getattr(Sampling, name)]
        names = ("decoding", "speed", "stop", "template", "stream", "return_step_map", "min_tokens", "stop_token_ids")
        for name in (*names, *changes, self.grammar_field):
            if name is not None and getattr(self, name) not in (None, False, []):
                why = "has no effect on echo with logprobs, which scores the prompt"
                raise FieldError(name, why, remedy="leave it out")
        if self.num_choices > 1:
            raise FieldError("n", "echo with logprobs scores each prompt once", remedy="leave it out")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def num_tops(self) -> int:
        return 0 if self.scores_prompt else self.logprobs or 0

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


class ChatRequest(GenerationRequest, OtherChatFields, ToolFields, TemplateFields):
    """A conversation that goes on."""

    messages: ChatMessages
    """the conversation; what the model's chat template refuses is a 400 with its sentence"""
    max_completion_tokens: PositiveInt | None = None
    """`max_tokens` by its newer name; if both are given they must be equal"""
    logprobs: bool | None = None
    """each token's log-probability"""
    top_logprobs: NumTops | None = None
    """number of likeliest tokens beside each token; only with `logprobs`"""
    verbosity: Annotated[
        Verbosity | None,
        Ignored("ask for the length in a message, or bound it by max_tokens", silent=("medium",)),
    ] = None

    def num_characters(self, body: int) -> int:
        return body  # all of it is messages and tools; to write the tools once more, to count them, takes long

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def turns(self) -> list[dict[str, Any]]:
        return turns(self.messages)

    def template_notes(self, unknown: Callable[[Iterable[str]], list[str]]) -> list[str]:
        notes = super().template_notes(unknown)
        first = next((number for number, message in enumerate(self.messages) if message.reasoned), None)
        if first is not None and unknown(REASONING) == list(REASONING):
            notes.append(f"messages.{first}.reasoning has no effect: the chat template shows none")
        return notes

    @property
    def grammar_field(self) -> str | None:
        return super().grammar_field if self.call_rule is None else "tools"

    @model_validator(mode="after")
    def _check_calls(self) -> "ChatRequest":
        check_calls(self.messages)
        self.check_continued(self.messages)
        other = super().grammar_field
        if self.call_rule is not None and other is not None and self.schema_form is None:
            why = "tools hold the answer to their form, beside which its text may have a JSON schema"
            raise FieldError(other, why, remedy="give one of them, or tool_choice none")
        return self

    @property
    def call_rule(self) -> CallRule | None:
        rule = super().call_rule
        return None if rule is None else replace(rule, form=self.schema_form)

    @property
    def notes(self) -> list[str]:
        notes, rule = super().notes, self.call_rule
        if rule is not None and rule.must and rule.form is not None:
            notes.append(
                f"{super().grammar_field} has no effect: tool_choice asks for a call, and the answer is no text"
            )
        return notes

    @model_validator(mode="after")
    def _tops_with_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "only allowed when logprobs is true", remedy="give logprobs")
        return self

    @model_validator(mode="after")
    def _one_budget(self) -> "ChatRequest":
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise FieldError("max_completion_tokens", "differs from max_tokens", remedy="give one of them")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def num_tops(self) -> int:
        return self.top_logprobs or 0

    @property
    def budget(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def budget_field(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"


# The tokenizer over HTTP, in the shapes of vLLM's server, which evaluation harnesses ask for.


class TokenizeRequest(ToolFields, TemplateFields):
    """A text, or a chat in the model's template, with its tools."""

    model: str | None = None
    """needed where several models are served"""
    prompt: str | None = None
    """a text; give it or `messages`"""
    messages: ChatMessages | None = None
    """a chat in the model's template"""
    add_special_tokens: bool | None = None
    """whether the tokenizer adds its own; default `true` for a prompt, `false` for a chat"""
    parse_special: bool | None = None
    """as in `CompletionRequest`; only with `prompt`"""
    return_token_strs: bool | None = None
    """`token_strs` in the answer"""

    @model_validator(mode="after")
    def _one_text(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "give either prompt or messages")
        if self.tools and self.messages is None:
            raise FieldError("tools", "only a chat has tools", remedy="give messages")
        if self.parse_special and self.messages is not None:
            raise FieldError("parse_special", "what messages spell is text", remedy="leave it out, or give prompt")
        if self.messages is not None:
            self.check_continued(self.messages)
        else:
            neutral = {
                "continue_final_message": False,
                "chat_template_kwargs": {},
                "add_generation_prompt": True,
                "reasoning_effort": "none",
                "reasoning": None,
                "documents": [],
            }
            names = [name for name, value in neutral.items() if getattr(self, name) not in (None, value)]
            if names:
                raise FieldError(names[0], "only a chat has a template", remedy="give messages")
        turns(self.messages or ())
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    """needed where several models are served"""
    tokens: Annotated[list[TokenId], items(MAX_DETOKENIZED)]
    """an id outside the vocabulary is refused"""
