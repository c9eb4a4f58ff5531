"""Structured fields of a generating request: grammars, templates with holes, and the place where a stream resumes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mbd_core.decoding.blocks.sampling_config import DrawSeed
from mbd_core.decoding.grammar.grammar import MAX_CHARACTERS, Grammar, lark_text
from mbd_core.serving.api.errors import FieldError
from mbd_core.serving.api.parsing import Ignored, Only, Strict, items
from mbd_core.serving.text.committed import DecodeTokens

# The grammar that an answer must match.

MAX_CHOICES_GUIDED = 1000
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    type: Literal["json_object"]


class NamedSchema(Strict):
    name: Annotated[str, Field(max_length=64)]
    """changes nothing"""
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    """a JSON schema; a schema with keywords unknown to llguidance, or that accepts no text, is refused"""
    description: str | None = None
    """changes nothing"""
    strict: bool | None = None
    """always honoured: an answer fits its schema"""


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]
Schema = dict[str, Any] | GrammarText
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], items(MAX_CHOICES_GUIDED, least=1)]
MatchedForm = tuple[Literal["schema", "regex", "grammar", "choice"], Any]
ANY_OBJECT = {"type": "object"}


class StructuredOutputs(Strict):
    """vLLM's newer name for the `guided_*` fields; it gives one form."""

    json_schema: Annotated[Schema | None, Field(alias="json")] = None
    """as `guided_json`"""
    regex: GrammarText | None = None
    """as `guided_regex`"""
    choice: Choices | None = None
    """as `guided_choice`"""
    grammar: GrammarText | None = None
    """as `guided_grammar`"""
    json_object: bool | None = None
    """any JSON object"""
    structural_tag: Annotated[Any, Only(instead="give tools, whose calls stand in a form of their own")] = None
    disable_any_whitespace: Annotated[bool | None, Ignored()] = None
    disable_fallback: Annotated[bool | None, Ignored()] = None
    disable_additional_properties: Annotated[
        Any, Only(False, instead='write "additionalProperties": false into the schema')
    ] = None
    whitespace_pattern: Annotated[Any, Only(instead="JSON is spaced as json.dumps does; leave it out")] = None

    @property
    def forms(self) -> dict[str, MatchedForm]:
        """The given forms that the answer must match, by their members."""
        given: dict[str, MatchedForm | None] = {
            "json": None if self.json_schema is None else ("schema", self.json_schema),
            "regex": None if self.regex is None else ("regex", self.regex),
            "choice": None if self.choice is None else ("choice", self.choice),
            "grammar": None if self.grammar is None else ("grammar", self.grammar),
            "json_object": ("schema", ANY_OBJECT) if self.json_object else None,
        }
        return {name: form for name, form in given.items() if form is not None}

    @model_validator(mode="after")
    def _one_form(self) -> "StructuredOutputs":
        if len(self.forms) > 1:
            why = f"has {' and '.join(self.forms)}"
            raise FieldError("structured_outputs", why, remedy="give one of them")
        return self


class StructuredFields(Strict):
    """OpenAI's `response_format`, and the equivalent fields of vLLM and SGLang; a request gives at most one."""

    response_format: ResponseFormat | None = None
    """the form of the answer; beside tools that may be called, the answer is calls, or text in this form; not beside
    `guided_*`, `template`, `t2t`, `soft`, `canvas`"""
    structured_outputs: StructuredOutputs | None = None
    """the form of the answer; a request gives this or `response_format`"""
    guided_json: Schema | None = None
    """a JSON schema, as an object or as its text; a request gives this or `response_format`"""
    guided_regex: GrammarText | None = None
    """a regular expression in Rust's syntax"""
    guided_grammar: GrammarText | None = None
    """a context-free grammar in llguidance's variant of Lark, or in EBNF (`root ::= ...`)"""
    guided_choice: Choices | None = None
    """the possible answers"""
    json_schema: Schema | None = None
    """as `guided_json`"""
    regex: GrammarText | None = None
    """as `guided_regex`"""
    ebnf: GrammarText | None = None
    """as `guided_grammar`"""

    @property
    def _forms(self) -> dict[str, MatchedForm]:
        """The given forms that the answer must match, by their fields."""
        forms: dict[str, MatchedForm] = {}
        if isinstance(self.response_format, ObjectFormat):
            forms["response_format"] = ("schema", ANY_OBJECT)
        elif isinstance(self.response_format, SchemaFormat):
            forms["response_format"] = ("schema", self.response_format.json_schema.json_schema)
        if self.structured_outputs is not None and self.structured_outputs.forms:
            forms["structured_outputs"] = next(iter(self.structured_outputs.forms.values()))
        for name, kind in FORM_FIELDS.items():
            if getattr(self, name) is not None:
                forms[name] = (kind, getattr(self, name))
        return forms

    @model_validator(mode="after")
    def _one_of_them(self) -> "StructuredFields":
        if len(given := list(self._forms)) > 1:
            why = f"{given[0]} says already what the answer must match"
            raise FieldError(given[1], why, remedy="give one of them")
        return self

    @property
    def schema_form(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must match, if the form is a JSON schema that is an object."""
        schema = next((value for kind, value in self._forms.values() if kind == "schema"), None)
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                return None
        return schema if isinstance(schema, dict) else None

    @property
    def grammar_field(self) -> str | None:
        """The field that asks for a grammar."""
        return next(iter(self._forms), None)

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that the answer must match. Raises `GrammarRefused` if it is too long or malformed."""
        if not self._forms:
            return None
        [(kind, value)] = self._forms.values()
        if kind == "schema":
            return Grammar(syntax="json_schema", text=value if isinstance(value, str) else _text(value))
        if kind == "regex":
            return Grammar(syntax="regex", text=value)
        if kind == "grammar":
            return Grammar(syntax="lark", text=lark_text(value))
        return Grammar(syntax="lark", text="start: " + " | ".join(map(_text, value)))


FORM_FIELDS: dict[str, Literal["schema", "regex", "grammar", "choice"]] = {
    "guided_json": "schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "json_schema": "schema",
    "regex": "regex",
    "ebnf": "grammar",
}


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# The resumption of a stream by its client.

MAX_TOKENS, MAX_FORWARDS = 2**18, 2**31
SEEDS = 2**64  # a seed has 64 bits, with sign


class Resume(Strict):
    """A `ResumePlace` from a stream, and the choice's tokens before it.

    The server stores no streams. The tokens count as committed by another engine (`Request.committed`), as after the
    loss of a replica. With SingleBD, greedy or seeded, the rest equals the rest of the cut stream. Blocks that a
    larger buffer had begun to decode are decoded anew.
    """

    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], items(MAX_TOKENS, least=1)]
    """the choice's tokens up to the place"""
    num_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """the number of `token_ids`"""
    forwards: Annotated[int, Field(ge=0, lt=MAX_FORWARDS)]
    """forwards in which the choice has taken part: the noise of sampled tokens continues from this number"""
    seed: DrawSeed | None = None
    """replaces the request's seed"""
    id: Annotated[str, Field(pattern=r"^(chat)?cmpl-[0-9a-f]{32}$")]
    """the stream's id, which the answer keeps"""

    @model_validator(mode="after")
    def _check(self) -> "Resume":
        if len(self.token_ids) != self.num_tokens:
            raise FieldError(
                "resume",
                f"num_tokens is {self.num_tokens}, and token_ids has {len(self.token_ids)}",
                remedy="give the tokens of the stream's chunks up to the one with this place, and none after it",
            )
        return self


# Templates: fixed text and holes after a prompt, as token positions and as text.

MAX_PARTS = 256
MAX_HOLE = 65_536


class Hole(Strict):
    hole: Annotated[int, Field(ge=1, le=MAX_HOLE)]


Template = Annotated[list[str | Hole], items(MAX_PARTS, least=1)]


@dataclass(frozen=True)
class TemplateTokens:
    """A tokenised template: `parts` with their numbers of tokens, and `tokens`, which are `None` in holes."""

    parts: tuple[tuple[str | Hole, int], ...]
    tokens: tuple[int | None, ...]

    def texts(self, tokens: Sequence[int], decode: DecodeTokens) -> tuple[str, list[str]]:
        """An answer's whole text, and the text of each hole that its tokens reach. Fixed text is exactly as given."""
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
    """The parts as tokens; `encode` tokenises fixed text without special tokens. Raises `FieldError` if the holes
    alone exceed `limit` tokens."""
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
