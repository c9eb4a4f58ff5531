"""The fields of a generating request with a form of their own: what its text must match, templates with holes, and
the place of a stream that goes on."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mbd_core.decoding.grammar.grammar import MAX_CHARACTERS, Grammar
from mbd_core.serving.api.errors import FieldError
from mbd_core.serving.api.parsing import Strict, items
from mbd_core.serving.text.committed import Decode

# What the text of an answer must match.

MAX_CHOICES_GUIDED = 1000
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
GUIDED = ("guided_json", "guided_regex", "guided_grammar", "guided_choice")


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    type: Literal["json_object"]


class NamedSchema(Strict):
    name: Annotated[str, Field(max_length=64)]
    """changes nothing"""
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    """a JSON schema; one with keywords that llguidance does not know, or that accepts no text, is refused"""
    description: str | None = None
    """changes nothing"""
    strict: bool | None = None
    """always honoured: an answer that does not fit its schema is not given"""


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class StructuredFields(Strict):
    """OpenAI's `response_format`, and the `guided_*` fields of other servers, of which a request gives one at most."""

    response_format: ResponseFormat | None = None
    """what the answer must match; not beside `guided_*`, `template`, tools that may be called, `t2t`, `soft`,
    `canvas`"""
    guided_json: dict[str, Any] | GrammarText | None = None
    """a JSON schema, as an object or as its text; otherwise as `response_format`, of which a request gives one"""
    guided_regex: GrammarText | None = None
    """a regular expression in Rust's syntax"""
    guided_grammar: GrammarText | None = None
    """a context-free grammar in llguidance's variant of Lark"""
    guided_choice: Annotated[list[Annotated[str, Field(min_length=1)]], items(MAX_CHOICES_GUIDED, least=1)] | None = (
        None
    )
    """the answers that are possible"""

    @property
    def _grammar_fields(self) -> list[str]:
        """The fields that ask for a grammar."""
        formatted = self.response_format is not None and self.response_format.type != "text"
        names = [name for name in GUIDED if getattr(self, name) is not None]
        return ["response_format", *names] if formatted else names

    @model_validator(mode="after")
    def _one_of_them(self) -> "StructuredFields":
        if len(given := self._grammar_fields) > 1:
            why = f"{given[0]} says already what the answer must match"
            raise FieldError(given[1], why, remedy="give one of them")
        return self

    @property
    def grammar_field(self) -> str | None:
        """The field that asks for a grammar."""
        return next(iter(self._grammar_fields), None)

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must match; `GrammarRefused` for what is too long."""
        if isinstance(self.response_format, ObjectFormat):
            return Grammar(syntax="json_schema", text='{"type":"object"}')
        if isinstance(self.response_format, SchemaFormat):
            return Grammar(syntax="json_schema", text=_text(self.response_format.json_schema.json_schema))
        if self.guided_json is not None:
            schema = self.guided_json
            return Grammar(syntax="json_schema", text=schema if isinstance(schema, str) else _text(schema))
        if self.guided_regex is not None:
            return Grammar(syntax="regex", text=self.guided_regex)
        if self.guided_grammar is not None:
            return Grammar(syntax="lark", text=self.guided_grammar)
        if self.guided_choice is not None:
            return Grammar(syntax="lark", text="start: " + " | ".join(map(_text, self.guided_choice)))
        return None


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# A stream that its client takes up again.

MAX_TOKENS, MAX_FORWARDS = 2**18, 2**31
SEEDS = 2**64  # a seed has 64 bits, with sign
Seed = Annotated[int, Field(ge=-SEEDS // 2, lt=SEEDS // 2)]


class Resume(Strict):
    """A `Place` as the stream gave it, and the tokens before it.

    The server keeps nothing of a stream: the tokens come back as those that another engine has committed
    (`Request.committed`), as where a replica is lost. So the rest is what would have followed where blocks are decoded
    one after the other, greedy or with a seed; blocks that a larger buffer had begun to decode are decoded anew.
    """

    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], items(MAX_TOKENS, least=1)]
    """the choice's tokens up to the place"""
    num_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """as many as `token_ids`"""
    forwards: Annotated[int, Field(ge=0, lt=MAX_FORWARDS)]
    """that the choice has taken part in: the noise of drawn tokens goes on from that number"""
    seed: Seed | None = None
    """instead of the request's"""
    id: Annotated[str, Field(pattern=r"^(chat)?cmpl-[0-9a-f]{32}$")]
    """the stream goes on under it"""

    @model_validator(mode="after")
    def _check(self) -> "Resume":
        if len(self.token_ids) != self.num_tokens:
            raise FieldError(
                "resume",
                f"num_tokens is {self.num_tokens}, and token_ids has {len(self.token_ids)}",
                remedy="give the tokens of the stream's chunks up to the one with this place, and none after it",
            )
        return self


# Templates: fixed text and holes behind a prompt, as token positions and back as text.

MAX_PARTS = 256
MAX_HOLE = 65_536


class Hole(Strict):
    hole: Annotated[int, Field(ge=1, le=MAX_HOLE)]


Template = Annotated[list[str | Hole], items(MAX_PARTS, least=1)]


@dataclass(frozen=True)
class TemplateTokens:
    """A template as the engine takes it: `tokens`, `None` in holes; each part with its number of tokens."""

    parts: tuple[tuple[str | Hole, int], ...]
    tokens: tuple[int | None, ...]

    def texts(self, tokens: Sequence[int], decode: Decode) -> tuple[str, list[str]]:
        """The whole text of an answer of these tokens, fixed text exactly as it was given, and the text of each hole
        that they reach."""
        whole, holes, start = "", list[str](), 0
        for part, length in self.parts:
            if start >= len(tokens):
                break
            if isinstance(part, Hole):
                holes.append(decode(list(tokens[start : start + length])))
                whole += holes[-1]
            else:
                whole += part
            start += length
        return whole, holes


def template_tokens(
    parts: Sequence[str | Hole], encode: Callable[[str], Sequence[int]], *, limit: int
) -> TemplateTokens:
    """`encode` gives the tokens of fixed text, without special ones. Raises `FieldError` where the holes alone are
    more than `limit` tokens."""
    in_holes = sum(part.hole for part in parts if isinstance(part, Hole))
    if in_holes > limit:
        why = f"its holes are {in_holes} tokens; the limit is {limit} in all"
        raise FieldError("template", why, code="context_length_exceeded")
    tokens: list[int | None] = []
    lengths: list[int] = []
    for part in parts:
        ids: list[Any] = [None] * part.hole if isinstance(part, Hole) else list(encode(part))
        tokens += ids
        lengths.append(len(ids))
    return TemplateTokens(tuple(zip(parts, lengths, strict=True)), tuple(tokens))
