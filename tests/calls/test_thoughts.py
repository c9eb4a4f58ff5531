"""Thoughts are split from answers, however the text is cut; grammars and stop strings begin behind them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from call_templates import TEMPLATES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance.hf import from_tokenizer
from transformers import AddedToken, PreTrainedTokenizerFast

from mbd_core.calls.answer_reader import AnswerReader
from mbd_core.calls.forms import FORMS, HERMES
from mbd_core.calls.reader import CallReader
from mbd_core.calls.rule import CallRule
from mbd_core.calls.thoughts import THOUGHT_FORMS, Thoughts, thought_form, thoughts_behind, thoughts_continued
from mbd_core.checkpoint.config import load_config
from mbd_core.decoding.grammar.grammar import Grammar
from mbd_core.decoding.grammar.guide import Grammars
from mbd_core.decoding.grammar.schemas import GrammarRefused
from mbd_core.serving.text.committed import CommittedText, StopStrings

THINK = THOUGHT_FORMS[0]
NOW = (("now", {"type": "object", "properties": {}}),)
WORDS = ["a", " ", "\n", "<", "think>", "</think>", "<think>", "It is <b>", "é😀", "</", "<tool_call>"]


def read(thoughts: Thoughts | None, text: str, *, form: Any = HERMES, cut: random.Random | None = None) -> Any:
    reader = AnswerReader(None if thoughts is None else thoughts.reader(), CallReader(form, dict(NOW)))
    pieces, start = [], 0
    while cut is not None and start < len(text):
        end = start + cut.randint(1, 4)
        pieces.append(reader.push(text[start:end], ends=False))
        start = end
    pieces.append(reader.push(text[start:], ends=True))
    names = [d["function"]["name"] for piece in pieces for d in piece.calls if "id" in d]
    return "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces), names


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    text=st.lists(st.sampled_from([*WORDS, HERMES.calls([("now", {})])]), max_size=10).map("".join),
    is_open=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_any_cut_gives_the_same_thoughts_text_and_calls(text: str, is_open: bool, seed: int) -> None:
    thoughts = Thoughts(THINK, is_open)
    assert read(thoughts, text, cut=random.Random(seed)) == read(thoughts, text)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("marks", THOUGHT_FORMS, ids=lambda marks: marks.begin)
def test_thoughts_text_and_calls_of_each_form_are_told_apart(form: Any, marks: Any) -> None:
    calls = form.calls([("now", {})], ids=["abcdefgh1"])
    said = f"Let me.{form.gap}" if form.text_before else ""
    for is_open in (False, True):
        text = ("" if is_open else marks.begin) + f"\n2 and 2\n{marks.end}\n\n{said}{calls}"
        expected = ("2 and 2", "Let me." if said else "", ["now"])
        for seed in range(3):
            assert read(Thoughts(marks, is_open), text, form=form, cut=random.Random(seed)) == expected


def test_a_step_without_tokens_adds_no_tokens_of_thoughts() -> None:
    reader = AnswerReader(Thoughts(THINK, is_open=True).reader(), None)
    for text, num_tokens in (("", 0), ("a", 1), ("", 0), ("", 1), ("", 0)):  # a token whose text is held back counts
        reader.push(text, ends=False, num_tokens=num_tokens)
    reader.push("", ends=True, num_tokens=0)
    assert reader.num_reasoning_tokens == 2


def test_the_prompt_says_whether_thoughts_are_open() -> None:
    assert thoughts_behind("<|assistant|><think>\n", THINK) == Thoughts(THINK, is_open=True)
    assert thoughts_behind("<|assistant|>", THINK) == Thoughts(THINK, is_open=False)
    assert thoughts_behind("<think>\n\n</think>\n\n", THINK) is None
    assert thoughts_behind("<|assistant|>", None) is None
    assert thought_form("{{ content.split('</think>')[-1] }}") == THINK
    assert thought_form(TEMPLATES["hermes"]) is None


def test_a_continued_message_says_whether_thoughts_are_open() -> None:
    said = thoughts_continued("<think>\nLet me" + " see" * 40, THINK)
    assert said == Thoughts(THINK, is_open=True, has_text=True)
    assert read(said, " then.</think>\n\nyes") == (" then.", "yes", [])
    assert thoughts_continued("\n<think>\n", THINK) == Thoughts(THINK, is_open=True)
    assert thoughts_continued("<think>\nLet me.</think>\n\nIt", THINK) is None
    assert thoughts_continued("It is", THINK) is None
    assert thoughts_continued("It is <think>", THINK) is None, "text comes before it"


@pytest.mark.parametrize("is_token", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("grammar", "fits", "unfit"),
    [
        (Grammar(syntax="json_schema", text='{"type": "boolean"}'), "true", "yes"),
        (Grammar(syntax="regex", text="a/[0-9]"), "a/1", "b/1"),
        (Grammar(syntax="regex", text="a\\\\/b\\/c"), "a\\/b/c", "a/b/c"),
        (Grammar(syntax="lark", text='start: "x" y\ny: "}" | "{"'), "x}", "y}"),
        (CallRule(functions=NOW, must=True, several=True).grammar(HERMES, {}), HERMES.calls([("now", {})]), "now"),
    ],
    ids=["json", "regex", "backslash", "lark", "calls"],
)
def test_a_grammar_begins_behind_thoughts_and_an_answer_can_end(
    tiny_model_dir: Path, grammar: Grammar, fits: str, unfit: str, is_open: bool, is_token: bool
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model_dir)
    if is_token:
        tokenizer.add_tokens([AddedToken(mark, special=False) for mark in (THINK.begin, THINK.end)])
    thoughts = Thoughts(THINK, is_open)
    grammars = Grammars(lambda: from_tokenizer(tokenizer), eos_token_id=load_config(tiny_model_dir).eos_token_ids[0])
    own = thoughts.before(grammar, tokenizer.get_added_vocab())
    begin = "" if is_open else THINK.begin

    def accepts(text: str) -> bool:
        matcher, _ = grammars._matcher(own)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return matcher.validate_tokens(tokens) == len(tokens) and bool(
            matcher.consume_tokens(tokens) and matcher.is_accepting()
        )

    assert accepts(f"{begin}\n2 < 3\n{THINK.end}\n\n{fits}")
    assert accepts(fits) == (not is_open)
    assert not accepts(f"{begin}\n2 < 3\n{THINK.end}\n\n{unfit}")
    assert grammars.guide(own, max_tokens=150).rest(0)


@pytest.mark.parametrize("is_token", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_budget_that_may_cut_a_text_may_cut_the_thoughts_before_it(
    tiny_model_dir: Path, is_open: bool, is_token: bool
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model_dir)
    if is_token:
        tokenizer.add_tokens([AddedToken(mark, special=False) for mark in (THINK.begin, THINK.end)])
    grammars = Grammars(lambda: from_tokenizer(tokenizer), eos_token_id=load_config(tiny_model_dir).eos_token_ids[0])
    for must in (False, True):
        rule = CallRule(functions=NOW, must=must, several=True).grammar(HERMES, tokenizer.get_added_vocab())
        grammar = Thoughts(THINK, is_open).before(rule, tokenizer.get_added_vocab())
        matcher, _ = grammars._matcher(grammar)
        begun = tokenizer.encode(("" if is_open else THINK.begin) + "\n2 < 3", add_special_tokens=False)
        assert matcher.consume_tokens(begun) and matcher.is_accepting() != must
        if not must:
            assert grammars.guide(grammar, max_tokens=len(begun) + 1, committed=begun).rest(len(begun))


def test_a_json_schema_behind_thoughts_is_refused_in_its_own_words(tiny_model_dir: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model_dir)
    grammars = Grammars(lambda: from_tokenizer(tokenizer), eos_token_id=load_config(tiny_model_dir).eos_token_ids[0])
    schema = Grammar(syntax="json_schema", text='{"type": "string", "minLength": 50}')
    with pytest.raises(GrammarRefused, match=r"that the grammar accepts; .*simplify it"):
        grammars.guide(Thoughts(THINK, is_open=True).before(schema, {}), max_tokens=5)
    unknown = Grammar(syntax="json_schema", text='{"type": "string", "unevaluatedItems": false}')
    with pytest.raises(GrammarRefused, match=r"^the JSON schema of the text cannot be honoured"):
        grammars.guide(Thoughts(THINK, is_open=True).before(unknown, {}), max_tokens=50)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_stop_string_is_not_looked_for_in_thoughts(is_open: bool) -> None:
    texts = [*("" if is_open else "<think>"), *"a stop b</think>c s", "top", " d"]
    text = CommittedText(
        lambda tokens: "".join(texts[t] for t in tokens), StopStrings(["stop"]), thoughts=Thoughts(THINK, is_open)
    )
    said = ""
    for token in range(len(texts)):
        said += text.push(token)
        if text.stopped:
            break
    assert text.stop == "stop"
    assert said == ("" if is_open else "<think>") + "a stop b</think>c "


def test_a_stop_string_at_the_beginning_of_an_answer_without_thoughts_ends_it() -> None:
    texts = ["<", "b", ">", "x"]
    text = CommittedText(
        lambda tokens: "".join(texts[t] for t in tokens), StopStrings(["<b"]), thoughts=Thoughts(THINK, False)
    )
    assert [text.push(0), text.push(1)] == ["", ""] and text.stop == "<b"
    assert json.dumps(text.finish()) == '""'
