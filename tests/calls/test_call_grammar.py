"""The grammar of each form takes what its template writes, and nothing that does not fit the functions' schemas."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance.hf import from_tokenizer
from transformers import AddedToken, PreTrainedTokenizerFast

from mbd_core.calls.form import CallForm
from mbd_core.calls.forms import FORMS, HERMES, PYTHONIC, XML, form_named
from mbd_core.calls.reader import CallReader
from mbd_core.calls.rule import CallRule
from mbd_core.calls.thoughts import ThoughtForm, Thoughts
from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.tokenizer import grammars_of
from mbd_core.decoding.grammar.guide import Grammars
from mbd_core.decoding.grammar.matchers import compile_grammar
from mbd_core.decoding.grammar.schemas import GrammarRefused

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "flag": {"type": "boolean"},
        "unit": {"enum": ["c", "f"]},
        "where": {"$ref": "#/$defs/place"},
        "note": {"type": ["string", "null"]},
        "any": {},
        "code": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 5},
    },
    "required": ["city"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "in": {"$ref": "#/$defs/place"}},
            "required": ["x"],
        }
    },
}
FUNCTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("weather", WEATHER),
    ("now", {"type": "object", "properties": {}}),
    ("tag", {"type": "object", "additionalProperties": {"type": "string"}}),
)
CALL = (
    "weather",
    {
        "city": "R\"o\\m'e\n</p>\t{x}",
        "days": [1, 2],
        "flag": True,
        "unit": "c",
        "where": {"x": 1.5, "in": {"x": 2}},
        "note": None,
        "any": {"k": [None, False, "é"]},
        "code": "abc",
    },
)
IDS = ["abcdefgh1", "abcdefgh2"]
UNFIT = [
    {"city": "Rome", "unit": "x"},
    {"city": "Rome", "days": [1, 2, 3, 4]},
    {"city": "Rome", "flag": "yes"},
    {"city": "Rome", "code": "A"},
    {"city": "Rome", "where": {"in": {}}},
    {"days": [1]},
    {"city": "Rome", "town": "Oslo"},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(tiny_model_dir)


def accepts(tokenizer: PreTrainedTokenizerFast, rule: CallRule, form: CallForm, text: str) -> bool:
    vocabulary = from_tokenizer(tokenizer)
    matcher = compile_grammar(vocabulary, rule.grammar(form, tokenizer.get_added_vocab()))
    tokens = vocabulary.tokenize_str(text)
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    matcher.consume_tokens(tokens)
    return bool(matcher.is_accepting())


def rule(*, must: bool) -> CallRule:
    return CallRule(functions=FUNCTIONS, must=must, several=True)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_grammar_takes_what_a_form_writes_and_nothing_else(
    tokenizer: PreTrainedTokenizerFast, form: CallForm
) -> None:
    calls = [CALL, ("now", dict[str, Any]())][: 2 if form.several else 1]
    text = form.calls(calls, ids=IDS[: len(calls)])
    assert accepts(tokenizer, rule(must=True), form, text)
    assert accepts(tokenizer, rule(must=False), form, f"Let me.{form.gap}{text}" if form.text_before else text)
    assert accepts(tokenizer, rule(must=False), form, "It rains.")
    assert not accepts(tokenizer, rule(must=True), form, "It rains.")
    assert not accepts(tokenizer, rule(must=True), form, form.calls([("other", {})], ids=IDS[:1]))
    for arguments in UNFIT:
        assert not accepts(tokenizer, rule(must=True), form, form.calls([("weather", arguments)], ids=IDS[:1]))


@pytest.mark.parametrize("form", [HERMES, XML, PYTHONIC], ids=lambda form: form.name)
def test_objects_have_further_properties_where_their_schema_says_so(
    tokenizer: PreTrainedTokenizerFast, form: CallForm
) -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for more in ({}, {"additionalProperties": True}):
        schema = {"type": "object", "properties": {"at": {**inner, **more}}}
        held = CallRule(functions=(("run", schema),), must=True, several=False)
        for arguments, fits in (({"at": {"a": 1}}, True), ({"at": {"a": 1, "b": 2}}, bool(more))):
            assert accepts(tokenizer, held, form, form.calls([("run", arguments)])) is fits


INNER = {"type": "object", "properties": {"a": {"type": "integer"}}}
BASE = {"base": INNER}
REFERENCE = {"$ref": "#/$defs/base"}


@pytest.mark.parametrize("form", [HERMES, XML, PYTHONIC], ids=lambda form: form.name)
@pytest.mark.parametrize(
    "at",
    [
        REFERENCE,
        {"anyOf": [REFERENCE, {"type": "null"}]},
        {"anyOf": [INNER, {"type": "null"}]},
        {"type": "array", "items": REFERENCE},
        {"type": "object", "additionalProperties": INNER},
        {"type": "array", "items": {"anyOf": [INNER, {"type": "null"}]}},
    ],
    ids=["shared", "shared or null", "or null", "list", "map", "list of alternatives"],
)
def test_no_object_has_made_up_properties_wherever_its_schema_stands(
    tokenizer: PreTrainedTokenizerFast, form: CallForm, at: dict[str, Any]
) -> None:
    held = CallRule(
        functions=(("run", {"type": "object", "properties": {"at": at}, "$defs": BASE}),), must=True, several=False
    )
    for value, fits in (({"a": 1}, True), ({"a": 1, "b": 2}, False)):
        shown = {"array": [value], "object": {"k": value}}.get(str(at.get("type")), value)
        text = form.calls([("run", {"at": shown})])
        assert accepts(tokenizer, held, form, text) is fits


@pytest.mark.parametrize(
    "joined",
    [
        {"properties": {"b": {"type": "integer"}}, "allOf": [REFERENCE]},
        {"allOf": [REFERENCE, {"properties": {"b": {"type": "integer"}}}]},
        {"properties": {"b": {"type": "integer"}}, "anyOf": [REFERENCE]},
        {"properties": {"b": {"type": "integer"}}, **REFERENCE},
    ],
    ids=["allOf beside", "allOf of two", "anyOf beside", "reference beside"],
)
def test_the_parts_of_one_object_allow_one_another_s_properties(
    tokenizer: PreTrainedTokenizerFast, joined: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {"at": joined}, "$defs": BASE}
    held = CallRule(functions=(("run", schema),), must=True, several=False)
    both = HERMES.calls([("run", {"at": {"b": 2, "a": 1}})])
    other = HERMES.calls([("run", {"at": {"a": 1, "b": 2}})])
    assert accepts(tokenizer, held, HERMES, both) or accepts(tokenizer, held, HERMES, other)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_an_answer_that_must_call_can_always_end_and_its_call_fits(
    tokenizer: PreTrainedTokenizerFast, tiny_model_dir: Path, form: CallForm
) -> None:
    grammar = rule(must=True).grammar(form, tokenizer.get_added_vocab())
    guide = grammars_of(tokenizer, load_config(tiny_model_dir)).guide(grammar, max_tokens=300)
    text = tokenizer.decode(guide.rest(0)[:-1], clean_up_tokenization_spaces=False)
    piece = CallReader(form, dict(FUNCTIONS)).push(text, ends=True)
    assert piece.calls and not piece.content
    for delta in piece.calls:
        function = delta["function"]
        jsonschema.validate(json.loads(function["arguments"]), dict(FUNCTIONS)[function["name"]])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_budget_that_suffices_for_one_function_suffices_beside_others(
    tokenizer: PreTrainedTokenizerFast, tiny_model_dir: Path, form: CallForm
) -> None:
    long = {"type": "object", "properties": {"text": {"enum": ["a long text of many tokens " * 9]}}}
    long |= {"required": ["text"], "additionalProperties": False}
    shared = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "boolean"}}}
    grammars = grammars_of(tokenizer, load_config(tiny_model_dir))
    alone = CallRule(functions=(("get_time", shared),), must=True, several=True)
    for number in range(3):
        others = [("get_times", long), ("get_weather", long)]
        among = replace(alone, functions=(*others[:number], ("get_time", shared), *others[number:]))
        for thoughts in (None, Thoughts(ThoughtForm("<think>", "</think>"), is_open=True)):
            grammar, both = (held.grammar(form, tokenizer.get_added_vocab()) for held in (alone, among))
            if thoughts is not None:
                grammar, both = (thoughts.before(each, tokenizer.get_added_vocab()) for each in (grammar, both))
            least = len(grammars.guide(grammar, max_tokens=300).rest(0))
            guide = grammars.guide(both, max_tokens=least)
            assert len(guide.rest(0)) <= least
            resumed = grammars.guide(both, max_tokens=least, committed=guide.rest(0)[:-2])
            assert resumed.rest(0) == guide.rest(0)


@pytest.mark.parametrize("name", ["xml", "pythonic"])
def test_a_keyword_that_a_form_cannot_be_held_to_is_refused_by_name(name: str) -> None:
    wide = {"type": "object", "properties": {"a": {"type": "string"}}, "minProperties": 1}
    refused = CallRule(functions=(("run", wide),), must=True, several=True)
    with pytest.raises(GrammarRefused, match=r"the parameters of run cannot be honoured: .* minProperties"):
        refused.grammar(form_named(name), {})


def test_a_mark_that_is_a_token_is_written_as_that(tokenizer: PreTrainedTokenizerFast) -> None:
    form = form_named("gemma")
    text = rule(must=False).grammar(form, {"<|tool_call>": 7, "<tool_call|>": 8, '<|"|>': 9}).text
    assert "TEXT <[7]>" in text and "<[8]>" in text and "<[9]>" in text
    assert "<tool_call|>" not in text


MARKS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "gemma": ["<|tool_call>", "<tool_call|>", '<|"|>'],
    "deepseek": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ],
    "mistral-args": ["[TOOL_CALLS]", "[ARGS]"],
    "lfm": ["<|tool_call_start|>", "<|tool_call_end|>"],
}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", MARKS)
def test_a_form_whose_marks_are_tokens_is_written_in_them_and_read(
    tiny_model_dir: Path, name: str, special: bool
) -> None:
    own = PreTrainedTokenizerFast.from_pretrained(tiny_model_dir)
    own.add_tokens([AddedToken(mark, special=special) for mark in MARKS[name]])
    form, config = form_named(name), load_config(tiny_model_dir)
    grammar = rule(must=True).grammar(form, own.get_added_vocab())
    grammars = Grammars(lambda: from_tokenizer(own), eos_token_id=config.eos_token_ids[0])
    tokens = grammars.guide(grammar, max_tokens=300).rest(0)[:-1]
    assert {own.convert_tokens_to_ids(form.mark)} & {*tokens}
    text = own.decode(tokens, clean_up_tokenization_spaces=False)
    for delta in CallReader(form, dict(FUNCTIONS)).push(text, ends=True).calls:
        function = delta["function"]
        jsonschema.validate(json.loads(function["arguments"]), dict(FUNCTIONS)[function["name"]])
