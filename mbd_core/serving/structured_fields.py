"""The fields of a request that say what the text of its answer must match."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mbd_core.decoding.grammar import MAX_CHARACTERS, Grammar
from mbd_core.serving.strict_model import Strict, items

MAX_CHOICES_GUIDED = 1000
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
GUIDED = ("guided_json", "guided_regex", "guided_grammar", "guided_choice")


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    type: Literal["json_object"]


class NamedSchema(Strict):
    """`strict` is always honoured: an answer that does not fit its schema is not given."""

    name: Annotated[str, Field(max_length=64)]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class StructuredFields(Strict):
    """OpenAI's `response_format`, and the `guided_*` fields of other servers, of which a request gives one at most.

    guided_json     a JSON schema, as an object or as its text
    guided_regex    a regular expression (Rust's syntax)
    guided_grammar  a context-free grammar in llguidance's variant of Lark
    guided_choice   the answers that are possible
    """

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | GrammarText | None = None
    guided_regex: GrammarText | None = None
    guided_grammar: GrammarText | None = None
    guided_choice: Annotated[list[Annotated[str, Field(min_length=1)]], items(MAX_CHOICES_GUIDED, least=1)] | None = (
        None
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> "StructuredFields":
        given = [name for name in GUIDED if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type != "text":
            given.insert(0, "response_format")
        if len(given) > 1:
            raise ValueError(f"{given[1]}: {given[0]} says already what the answer must match; give one of them")
        return self

    @property
    def grammar_field(self) -> str | None:
        """The field that asks for a grammar."""
        if self.response_format is not None and self.response_format.type != "text":
            return "response_format"
        return next((name for name in GUIDED if getattr(self, name) is not None), None)

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
