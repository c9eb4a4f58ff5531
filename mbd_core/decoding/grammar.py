"""What the whole text of an answer must match: a JSON schema, a regular expression or a context-free grammar."""

from dataclasses import dataclass
from typing import Literal, get_args

from mbd_core.decoding.checks import check_choice

Syntax = Literal["json_schema", "regex", "lark"]
NAMES: dict[Syntax, str] = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
MAX_CHARACTERS = 65_536


class GrammarRefused(ValueError):
    """A grammar that cannot be honoured, and why."""


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """The grammar of one answer. Raises `GrammarRefused` for a text that is empty or too long.

    syntax      what `text` is: a JSON schema (as JSON), a regular expression (Rust's syntax), or a grammar in
                llguidance's variant of Lark
    may_be_cut  the answer may also end without an EOS at `max_tokens`, where the grammar accepts the text so far
    """

    syntax: Syntax
    text: str
    may_be_cut: bool = False

    def __post_init__(self) -> None:
        check_choice("grammar.", "syntax", self.syntax, get_args(Syntax))
        if not self.text:
            raise GrammarRefused("the grammar is empty; leave it out if any text will do")
        if len(self.text) > MAX_CHARACTERS:
            raise GrammarRefused(f"the grammar has {len(self.text)} characters; at most {MAX_CHARACTERS} are taken")
