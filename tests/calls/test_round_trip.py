"""Calls to a chat template, to the reader, to the same calls: for every form, by odd arguments.

The templates are ours (`call_templates.py`), and with `-m slow` those of released models in the package trl.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
from call_templates import SHOW_TOOLS, TEMPLATES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mbd_core.calls.form import CallForm, LiteralArguments, TaggedArguments
from mbd_core.calls.forms import FORM_NAMES, FORMS
from mbd_core.calls.reader import CallReader, TextPiece
from mbd_core.calls.recognition import TOOLS, history, recognised
from mbd_core.checkpoint.chat import call_form, chat_text, rendered

Calls = list[tuple[str, dict[str, Any]]]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "unit": {"enum": ["c", "f o", 'q"']},
        "number": {"type": "number"},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "items": {"type": "array", "items": {"type": ["string", "null", "boolean"]}},
        "place": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "deep": {"type": "array", "items": {"type": "object"}}},
        },
    },
}
FUNCTIONS = (("look_up", SCHEMA), ("now", {"type": "object", "properties": {}}))
ODD = [
    'a "word"',
    "it's",
    "</tool_call>",
    "<tool_call>",
    "</parameter>",
    "}]",
    "back\\slash\\n",
    "line\nline",
    "",
    "{",
    "'",
]
ODD += ["[TOOL_CALLS]", "zażółć 漢字 😀", "\t", "null", "5", "True", "a, b=c)", "<arg_value>", '\\"']
TEXTS = st.one_of(
    st.sampled_from(ODD), st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cn"]), max_size=8)
)
KEYS = st.text("abcdefgh_", min_size=1, max_size=5)
NUMBERS = st.one_of(st.integers(-(10**9), 10**9), st.sampled_from([0.5, -1e-7, 1e22, 3.0]))
DEEP = st.recursive(
    st.one_of(TEXTS, NUMBERS, st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "unit": st.sampled_from(SCHEMA["properties"]["unit"]["enum"]),
        "number": NUMBERS,
        "count": st.integers(-(10**12), 10**12),
        "flag": st.booleans(),
        "items": st.lists(st.one_of(TEXTS, st.none(), st.booleans()), max_size=3),
        "place": st.fixed_dictionaries(
            {}, optional={"town": TEXTS, "deep": st.lists(st.dictionaries(KEYS, DEEP, max_size=2), max_size=2)}
        ),
    },
)
CALLS = st.lists(
    st.one_of(ARGUMENTS.map(lambda a: ("look_up", a)), st.just(("now", dict[str, Any]()))), min_size=1, max_size=3
)


@lru_cache
def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel()), bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def renderer(template: str) -> Callable[..., str]:
    """Renders as serving does."""
    return partial(rendered, tokenizer_of(template))


def joined(pieces: Sequence[TextPiece]) -> tuple[str, Calls]:
    content, calls = "", list[list[str]]()
    for piece in pieces:
        content += piece.content
        for delta in piece.calls:
            if delta["index"] == len(calls):
                calls.append([delta["function"]["name"], ""])
            calls[-1][1] += delta["function"]["arguments"]
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def read(form: CallForm, text: str, *, cut: random.Random | None = None) -> tuple[str, Calls]:
    reader, pieces, start = CallReader(form, dict(FUNCTIONS)), [], 0
    while cut is not None and start < len(text):
        end = start + cut.randint(1, 5)
        pieces.append(reader.push(text[start:end], ends=False))
        start = end
    return joined([*pieces, reader.push(text[start:], ends=True)])


def writable(form: CallForm, calls: Calls) -> bool:
    """Whether a form can write these arguments so that they are read again: without quotes, a string has no marks."""
    shown = json.dumps([args for _, args in calls], ensure_ascii=False)
    if isinstance(form.arguments, TaggedArguments):
        mark = form.arguments.value_end
        return all((args.get("text", "") + mark).index(mark) == len(args.get("text", "")) for _, args in calls)
    if isinstance(form.arguments, LiteralArguments) and not form.arguments.escapes:
        return "<|" not in shown
    return True


def shown_answer(template: str, form: CallForm, calls: Calls) -> str:
    """The text in which a template shows an answer's calls: what follows the beginning of the answer."""
    render = renderer(template)
    user = {"role": "user", "content": "?"}
    turn_calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    [turn] = history(form, [{"role": "assistant", "content": "", "tool_calls": turn_calls}])
    whole = render([user, turn], tools=TOOLS, add_generation_prompt=False)
    start = whole.index(form.opening + calls[0][0])
    return whole[start:]


@lru_cache
def form_of(template: str) -> CallForm:
    form = recognised(renderer(template))
    assert form is not None
    return form


def check_round_trip(template: str, calls: Calls, seed: int) -> None:
    form = form_of(template)
    calls = calls if form.several else calls[:1]
    if not writable(form, calls):
        return
    text = shown_answer(template, form, calls)
    content, found = read(form, text)
    assert found == calls
    assert read(form, text, cut=random.Random(seed)) == (content, found), "the cut makes no difference"


def test_each_form_has_a_name_and_a_template_of_ours() -> None:
    assert {form.name for form in FORMS} == set(FORM_NAMES) == TEMPLATES.keys()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_form_is_recognised_from_its_template(name: str) -> None:
    assert form_of(TEMPLATES[name]).name == name


def test_white_space_that_a_template_has_around_calls_is_part_of_the_form() -> None:
    end = "<｜tool▁call▁end｜>{% endfor %}"
    spaced = end.replace("{%", "{{ '  ' if not loop.last }}{%") + "    "
    indented = TEMPLATES["deepseek-short"].replace(end, spaced)
    form = form_of(indented)
    assert (form.name, form.between, form.end) == ("deepseek-short", "  ", "    <｜tool▁calls▁end｜>")
    check_round_trip(indented, [("look_up", {"text": "  a"}), ("now", {})], seed=1)


@pytest.mark.parametrize("shows_tools", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_shows_tools_and_calls_in_the_form_of_its_template(name: str, shows_tools: bool) -> None:
    template = TEMPLATES[name] if shows_tools else TEMPLATES[name].replace(SHOW_TOOLS, "")
    tokenizer, (call, arguments) = tokenizer_of(template), ("now", {"text": "a"})
    assert (form := call_form(tokenizer)).name == name
    function = {"name": call, "arguments": arguments}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "abcdefgh1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "abcdefgh1", "content": "12"},
    ]
    tools = [{"type": "function", "function": {"name": call, "description": "The hour", "parameters": {}}}]
    text = chat_text(tokenizer, turns, tools=tools).text
    assert form.calls([(call, arguments)], ids=["abcdefgh1"]) in text and "RESULT 12" in text
    assert text.count("The hour") == 1 and (form.example in text) is not shows_tools


def test_an_unknown_form_is_not_recognised() -> None:
    assert recognised(renderer(TEMPLATES["hermes"].replace("tool_call>", "call>"))) is None
    assert recognised(renderer("{% for m in messages %}{{ m['content'] }}{% endfor %}{{ tools }}")) is None


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(calls=CALLS, seed=st.integers(0, 10**6))
def test_calls_come_back_from_a_template(name: str, calls: Calls, seed: int) -> None:
    check_round_trip(TEMPLATES[name], calls, seed)


PACKAGE = "trl==1.16.0"
RELEASED = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_think": "xml",
    "nemotron_3_nano": "xml",
    "glm4moe": "glm",
    "gemma4_v5": "gemma",
    "diffusion_gemma": "gemma",
    "llama3_1": "llama",
    "llama3_2": "llama",
    "lfm2_v2": "lfm",
    "deepseekv3": "deepseek",
}
"""Templates of released models in the package, and their forms."""


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("trl")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    if subprocess.run(command, timeout=300).returncode:
        pytest.skip(f"no registry has {PACKAGE}")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = {Path(name).stem: name for name in files.namelist() if name.endswith(".jinja")}
        return {name: files.read(names[name]).decode() for name in RELEASED}


@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASED)
def test_calls_come_back_from_a_released_template(name: str, released: dict[str, str]) -> None:
    template = released[name]
    assert form_of(template).name == RELEASED[name]

    @settings(max_examples=20, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(calls=CALLS, seed=st.integers(0, 10**6))
    def check(calls: Calls, seed: int) -> None:
        check_round_trip(template, calls, seed)

    check()
