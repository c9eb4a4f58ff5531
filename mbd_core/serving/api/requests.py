"""Every request of the endpoint, with its fields; unknown fields are refused by name.

`other_fields.py` has the fields of other servers that are not implemented here. The docstring of a field is its
description in the OpenAPI document and in docs/reference/api.md.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from mbd_core.calls.rule import CallRule
from mbd_core.decoding.answers.piece import MAX_TOPS
from mbd_core.decoding.blocks.sampling_config import (
    LEAST,
    MAX_BIASES,
    MAX_STOP_IDS,
    PENALTIES,
    Bias,
    DrawSeed,
    MinP,
    Penalty,
    RepetitionPenalty,
    Sampling,
    TopP,
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
from mbd_core.serving.api.fields import SEEDS, Hole, Resume, StructuredFields, Template
from mbd_core.serving.api.other_fields import OtherChatFields, OtherCompletionFields, OtherGenerationFields
from mbd_core.serving.api.parsing import MAX_IDS, MAX_STOPS, MOST_PROMPTS, Ignored, Strict, ignored_notes, items

MAX_STOP_LENGTH = 1024
MAX_TOKENS_DEFAULT = 256
MAX_CHOICES = 128
MAX_DETOKENIZED = 2**17  # tokens of one `/detokenize` request

TokenId = Annotated[int, Field(ge=0)]
PromptIds = Annotated[list[TokenId], items(MAX_IDS)]
PositiveInt = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
SpeedShare = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
BiasByToken = Annotated[dict[str, Bias], items(MAX_BIASES)]
NumTops = Annotated[int, Field(ge=0, le=MAX_TOPS)]
NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]


class StreamOptions(Strict):
    include_usage: bool | None = None
    """`usage` in the last event; default `false`"""
    continuous_usage_stats: bool | None = None
    """`usage` in each event, with the tokens so far; only with `include_usage`; default `false`"""
    include_obfuscation: Annotated[bool | None, Ignored()] = None


class GenerationRequest(StructuredFields, OtherGenerationFields):
    """The fields that chats and completions share."""

    model: str
    """the name of a served model or of an adapter; 404 for another"""
    max_tokens: PositiveInt | None = None
    """tokens of the answer without its EOS; default: the `max_new_tokens` of the model's `generation_config.json`, or
    256 without it, but at most the tokens that fit. A number that does not fit is refused (`context_length_exceeded`).
    Positions after the last token are not decoded, so a smaller number may give a different text, not only a shorter
    one"""
    stream: bool | None = None
    """the answer as server-sent events; default `false`"""
    stream_options: StreamOptions | None = None
    """only with `stream`"""
    stop: str | Annotated[list[str], items(MAX_STOPS)] | None = None
    """texts of 1 to 1,024 characters; the answer ends before the first of them, even if a grammar is then incomplete.
    Not beside tools that may be called or `template`"""
    decoding: dict[str, Any] | None = None
    """fields of `DecodingConfig`; default: the model's. A field is refused if it is unknown, or if the model or the
    server does not support it"""
    speed: SpeedShare | None = None
    """instead of `decoding`: a point of the model's measured front, 0 its most accurate, 1 its fastest; refused for a
    model without a front"""
    temperature: Temperature | None = None
    """sampling temperature, 0 or at least 1e-06; default 0, greedy. If the model's `generation_config.json` has
    `do_sample`, its values are the defaults of this and the next three fields"""
    top_p: TopP | None = None
    """sample among the likeliest tokens that together reach this probability; default 1. Like `top_k` and `min_p` it
    has no effect without `temperature`, and `mbd.notes` then says so"""
    top_k: TopK | None = None
    """sample among this number of likeliest tokens; 0 (default) and -1: all"""
    min_p: MinP | None = None
    """sample among tokens with at least this fraction of the likeliest token's probability; default 0, all"""
    seed: DrawSeed | None = None
    """seed of the first choice; default random. Choice i (from 0) has `seed` + i"""
    presence_penalty: Penalty | None = None
    """subtracted from the logit of each token that is in the answer; default 0. This field and the next two are
    refused with `t2t`, `soft` or `canvas.branches`"""
    frequency_penalty: Penalty | None = None
    """subtracted once per occurrence of the token in the answer; default 0"""
    repetition_penalty: RepetitionPenalty | None = None
    """for tokens in the prompt or the answer: divides a positive logit and multiplies a negative logit; default: the
    value in `generation_config.json`, else 1"""
    logit_bias: BiasByToken | None = None
    """token ids with numbers from -100 to 100 that are added to their logits; at most 1,024"""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """the first `min_tokens` positions get no token that ends the answer, and their text is not searched for stop
    strings; default 0, at most `max_tokens`. Not beside a grammar or `template`"""
    stop_token_ids: Annotated[list[TokenId], items(MAX_STOP_IDS)] | None = None
    """tokens that end the answer like the EOS and are not part of it; not beside a grammar or `template`"""
    ignore_eos: bool | None = None
    """treat the EOS as an ordinary token that does not end the answer; not beside a grammar"""
    n: NumChoices | None = None
    """choices for each prompt; default 1. The choices of all prompts together are limited by the server's capacity and
    by `--client-requests`"""
    return_token_ids: bool | None = None
    """`token_ids` and `prompt_token_ids` in each choice"""
    return_step_map: bool | None = None
    """`rollout` in each choice; with masked decoding alone: not with `t2t`, `soft`, `edit`, `verify`, `canvas`,
    `causal` or `renoise`"""
    return_routed_experts: bool | None = None
    """adds to `rollout` the experts that each forward chose; only with `return_step_map` and a model with experts, and
    not with `stream` or `stop`"""
    frames: bool | None = None
    """a `FrameEvent` for each forward; only with `stream`; not with `canvas`, `causal` or `renoise`"""
    resumable: bool | None = None
    """adds `token_ids` to each piece, and a `ResumePlace` after each commit; only with `stream`, not with tools that
    may be called or `canvas`"""
    resume: Resume | None = None
    """continue after a `ResumePlace`: one prompt, `n` 1, all other fields as in the cut stream"""
    user: str | None = None
    """identifies a client on a server without keys; waiting clients take turns"""
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
        """Number of answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_prompts(self) -> int:
        """Number of prompts; each gets `num_choices` answers."""
        return 1

    @property
    def prompt_field(self) -> str:
        """The field of the prompts, which an error about a prompt names."""
        raise NotImplementedError

    @property
    def notes(self) -> list[str]:
        """A note for each accepted field without effect."""
        notes = ignored_notes(self)
        if self.temperature is not None:
            return notes
        neutral = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
        names = [name for name, values in neutral.items() if getattr(self, name) not in (None, *values)]
        notes += [f"{name} has no effect at temperature 0, the default here; give temperature" for name in names]
        return notes

    @property
    def num_tops(self) -> int:
        """The requested number of likeliest tokens per position."""
        raise NotImplementedError

    @property
    def draws(self) -> bool:
        """Whether tokens are sampled, so that the seed matters."""
        return bool(self.temperature)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the request asks for log-probabilities."""
        raise NotImplementedError

    def num_characters(self, body: int) -> int:
        """The approximate number of characters to tokenise in a body of `body` bytes."""
        raise NotImplementedError

    def samplings(self, seed: int) -> list[Sampling]:
        """The sampling of each answer to a prompt: answer i has the seed `seed + i`, which wraps around at 64 bits."""
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
        """The requested number of tokens; `None`: the server decides."""
        return self.max_tokens

    @property
    def budget_field(self) -> str:
        """The field of `budget`, which an error about it names."""
        return "max_tokens"

    @property
    def usage_in_stream(self) -> Literal["none", "last", "each"]:
        """The events of a stream that have the usage."""
        if self.stream_options is None or not self.stream_options.include_usage:
            return "none"
        return "each" if self.stream_options.continuous_usage_stats else "last"


class CompletionRequest(GenerationRequest, OtherCompletionFields):
    """A text, or token ids, to continue."""

    prompt: (
        str | Annotated[list[str], items(MOST_PROMPTS)] | PromptIds | Annotated[list[PromptIds], items(MOST_PROMPTS)]
    )
    """one prompt, or up to `--body-prompts` prompts; an empty prompt is refused"""
    echo: bool | None = None
    """the prompt's text before each choice's text; with `logprobs` the prompt's own log-probabilities"""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """tokens of an answer; default as for a chat. With `echo` and `logprobs` it is required, as 0 or 1; otherwise at
    least 1"""
    logprobs: NumTops | None = None
    """each token's log-probability, and this number of likeliest tokens beside it; with `echo` 0 or 1"""
    best_of: int | None = None
    """must be `n`"""
    template: Template | None = None
    """the form of the answer after the prompt: holes of given lengths in tokens, and fixed texts; it begins with a
    hole. Not beside `max_tokens`, `stop`, a grammar, `t2t`, `soft`, `canvas`"""
    parse_special: bool | None = None
    """read the names of control tokens in `prompt` and `template` as control tokens, for clients that write the
    model's chat template themselves; default: as plain text"""

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
        """Whether the request asks for the log-probabilities of the prompt's own tokens."""
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
            raise FieldError("max_tokens", "echo with logprobs scores the prompt, and takes 0 or 1 tokens after it")
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
        """The text before each choice's own text: its prompt, if `echo` is set."""
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
    """A conversation to continue."""

    messages: ChatMessages
    """the conversation; a refusal by the model's chat template is a 400 with the template's message"""
    max_completion_tokens: PositiveInt | None = None
    """`max_tokens` by its newer name; if both are given they must be equal"""
    logprobs: bool | None = None
    """each token's log-probability"""
    top_logprobs: NumTops | None = None
    """number of likeliest tokens beside each token; only with `logprobs`"""
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    """the answer may think for this number of tokens, then the mark that ends thoughts is put in, with log-probability
    0. If these tokens end within a character, up to three further tokens complete it. Default and -1: only
    `max_tokens` limits thoughts; so too if `max_tokens` leaves no room after them. Not beside `return_step_map`. No
    effect on a canvas and under a template without thoughts, and `mbd.notes` then says so"""
    verbosity: Annotated[
        Verbosity | None,
        Ignored("ask for the length in a message, or bound it by max_tokens", silent=("medium",)),
    ] = None

    @model_validator(mode="after")
    def _check_thought_budget(self) -> "ChatRequest":
        if self.thought_budget is not None and self.return_step_map:
            why = "inserts a token that no forward decided, and no step map shows it"
            raise FieldError(self.thought_budget_field, why, remedy="leave one of them out")
        return self

    @property
    def thought_budget(self) -> int | None:
        """Most tokens of the answer's thoughts; `None` without such a limit."""
        return None if self.thinking_token_budget in (None, -1) else self.thinking_token_budget

    @property
    def thought_budget_field(self) -> str:
        """The field of `thought_budget`, which a note about it names."""
        return "thinking_token_budget"

    def num_characters(self, body: int) -> int:
        return body  # nearly all of it is messages and tools; serialising the tools to count them takes long

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
        return None if rule is None else replace(rule, text_schema=self.schema_form)

    @property
    def notes(self) -> list[str]:
        notes, rule = super().notes, self.call_rule
        if rule is not None and rule.must and rule.text_schema is not None:
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


# The tokenizer over HTTP, in the shapes of vLLM's server, which evaluation harnesses use.


class TokenizeRequest(ToolFields, TemplateFields):
    """A text, or a chat in the model's template, with its tools."""

    model: str | None = None
    """needed where several models are served"""
    prompt: str | None = None
    """a text; give it or `messages`"""
    messages: ChatMessages | None = None
    """a chat in the model's template"""
    add_special_tokens: bool | None = None
    """whether the tokenizer adds its special tokens; default `true` for a prompt, `false` for a chat"""
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
