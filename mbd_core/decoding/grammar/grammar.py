"""A grammar for the whole text of an answer: a JSON schema, a regular expression or a context-free grammar."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

from mbd_core.decoding.grammar.schemas import GrammarRefused, plain_schema
from mbd_core.fields import configuration

Syntax = Literal["json_schema", "regex", "lark"]
NAMES: dict[Syntax, str] = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
MAX_CHARACTERS = 65_536
MAX_SCHEMAS = 131_072  # characters of all schemas, after `plain_schema`


FORM = ""  # in place of a tool's name
TOOLS_RULE = "named"  # the rule of a text whose alternatives are the tools
TOOLS_LINE = re.compile(rf"^{TOOLS_RULE}: (.+)$", re.MULTILINE)
RULE = re.compile(r"^(?P<name>[fr]\d+)(?:\[\w+\])?: .*\n?", re.MULTILINE)  # of a tool, or of its arguments
EBNF_RULE = re.compile(r"^\s*[\w.-]+\s*::=", re.MULTILINE)


@configuration()
class Grammar:
    """The grammar of one answer. Raises `GrammarRefused` for a text that is empty or too long, and for a JSON schema
    that is not JSON.

    syntax      the kind of `text`: a JSON schema (as JSON), a regular expression (Rust's syntax), or a grammar in
                llguidance's variant of Lark
    may_be_cut  the answer may also end without an EOS at `max_tokens`, if the grammar accepts the text so far
    schemas     pairs of a tool's name and a JSON schema, of its parameters or of a part of them. `text` refers to a
                pair as `%json @NUMBER`. The schema of a text that may stand instead of calls has the name `FORM`
    marks       texts that end a string without quotes

    A schema is kept as `plain_schema` makes it.
    """

    syntax: Syntax
    """The kind of the text."""
    text: str
    may_be_cut: bool = False
    schemas: tuple[tuple[str, str], ...] = ()
    marks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.text:
            raise GrammarRefused("the grammar is empty; leave it out if any text will do")
        if self.syntax == "json_schema":
            object.__setattr__(self, "text", _plain_text(self.text, self.subject()))
        schemas = tuple((name, _plain_text(schema, self.subject(name))) for name, schema in self.schemas)
        object.__setattr__(self, "schemas", schemas)
        if len(self.text) > MAX_CHARACTERS:
            raise GrammarRefused(
                f"{self.subject()} has {len(self.text)} characters; at most {MAX_CHARACTERS} are taken"
            )
        lengths = Counter[str]()
        for name, schema in self.schemas:
            lengths[name] += len(schema)
        if (whole := lengths.total()) > MAX_SCHEMAS:
            largest = max(lengths.keys() - {FORM}, key=lambda name: lengths[name])
            raise GrammarRefused(
                f"the parameters of {self.num_tools} tools have {whole} characters without their descriptions, "
                f"{lengths[largest]} of them in {largest}; at most {MAX_SCHEMAS} are taken, so give fewer or "
                f"simpler tools"
            )

    @property
    def num_tools(self) -> int:
        return len({name for name, _ in self.schemas} - {FORM})

    @property
    def wholes_of_one_tool(self) -> Iterator[str]:
        """For each of several tools: the text with its schemas for answers whose calls are all of this tool."""
        if self.num_tools < 2 or (line := TOOLS_LINE.search(self.text)) is None:
            return
        rules = {match["name"]: match[0] for match in RULE.finditer(self.text)}
        for tool in line[1].split(" | "):
            text = TOOLS_LINE.sub(f"{TOOLS_RULE}: {tool}", self.text)
            for name in rules.keys() - _needed(rules, tool):
                text = text.replace(rules[name], "")
            yield self._with_schemas(text)

    @property
    def whole(self) -> str:
        """The text with its schemas."""
        return self._with_schemas(self.text) if self.schemas else self.text

    def _with_schemas(self, text: str) -> str:
        return SCHEMA_PLACE.sub(lambda match: f"%json {self.schemas[int(match[1])][1]}", text)

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """The JSON schemas, each with its name in a sentence."""
        own = ((self.subject(), self.text),) if self.syntax == "json_schema" else ()
        return own + tuple((self.subject(name), schema) for name, schema in self.schemas)

    def subject(self, tool: str | None = None) -> str:
        """The name of the grammar, or of a tool's parameters, in a sentence."""
        if tool == FORM:
            return "the JSON schema of the text"
        if tool is not None:
            return f"the parameters of {tool}"
        if self.num_tools:
            return "the tools"
        return f"the {NAMES['json_schema' if self.schemas else self.syntax]}"


def _needed(rules: Mapping[str, str], name: str) -> set[str]:
    """The rules that the named rule refers to, and itself."""
    needed, found = set[str](), [name]
    while found:
        needed.add(rule := found.pop())
        found += rules.keys() & set(re.findall(r"\w+", rules[rule].partition(": ")[2])) - needed
    return needed


SCHEMA_PLACE = re.compile(r"%json @(\d+)")


def lark_text(grammar: str) -> str:
    """A grammar in llguidance's variant of Lark: the text itself, or llguidance's conversion of EBNF (`root ::= ...`).

    Raises `GrammarRefused` for an EBNF that cannot be read.
    """
    if EBNF_RULE.search(grammar) is None:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # the converter's own kind of error for some mistakes
        raise GrammarRefused(f"the EBNF cannot be read: {str(error)[:200]}") from None


def _plain_text(schema: str, subject: str) -> str:
    try:
        return json.dumps(plain_schema(json.loads(schema)), ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(f"{subject} cannot be read: {error}") from None
