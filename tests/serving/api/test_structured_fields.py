"""The API's fields for structured answers and templates, over one engine."""

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from local_server import ROUTES, answers

from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.tokens.served_model import GrammarCompiler

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


def text_of(objects: list[dict[str, Any]]) -> str:
    text = ""
    for choice in (o["choices"][0] for o in objects if o["choices"]):
        text += choice.get("text") or choice.get("message", choice.get("delta", {})).get("content") or ""
    return text


@pytest.mark.parametrize("route", ROUTES)
def test_response_format_holds_whole_and_streamed(tiny_model_dir: Path, route: str) -> None:
    drawn = {"response_format": FORMAT, "temperature": 1.0, "seed": 4}
    plain, whole, events, any_object = answers(
        tiny_model_dir,
        (route, {"response_format": {"type": "text"}, "max_tokens": 8}),
        (route, drawn),
        (route, drawn | {"stream": True}),
        (route, {"response_format": {"type": "json_object"}}),
    )
    assert plain[0]["choices"][0]["finish_reason"] in ("stop", "length")
    jsonschema.validate(json.loads(text_of(whole)), SCHEMA)
    assert text_of(events) == text_of(whole)
    assert whole[0]["choices"][0]["finish_reason"] == "stop"
    assert isinstance(json.loads(text_of(any_object)), dict)


def test_guided_fields_hold(tiny_model_dir: Path) -> None:
    schema, text, regex, lark, choice = answers(
        tiny_model_dir,
        ("complete", {"guided_json": SCHEMA, "n": 3, "temperature": 1.0}),
        ("chat", {"guided_json": json.dumps(SCHEMA)}),
        ("complete", {"guided_regex": "[0-9]{2}:[0-9]{2}"}),
        ("complete", {"guided_grammar": 'start: "yes" | "no"'}),
        ("chat", {"guided_choice": ['a "b"', "ü\n"]}),
    )
    objects = [c["text"] for c in schema[0]["choices"]] + [text_of(text)]
    for answer in objects:
        jsonschema.validate(json.loads(answer), SCHEMA)
    assert len(objects) == 4
    assert re.fullmatch("[0-9]{2}:[0-9]{2}", text_of(regex))
    assert text_of(lark) in ("yes", "no")
    assert text_of(choice) in ('a "b"', "ü\n")


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"guided_regex": "("}, "guided_regex", "the regular expression cannot be honoured"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "at most 65536"),
        ({"guided_json": {"enum": ["a" * 70_000]}}, "guided_json", "at most 65536 are taken"),
        ({"guided_json": "{"}, "guided_json", "cannot be read"),
        ({"guided_json": {"not": {}}}, "guided_json", "Unimplemented keys"),
        ({"response_format": FORMAT, "max_tokens": 5}, "response_format", "no answer of at most 5 tokens was found"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex", "give one of them"),
        ({"guided_regex": "a", "decoding": {"t2t": {}}}, "guided_regex", "t2t changes tokens"),
        ({"guided_choice": []}, "guided_choice", "at least 1 item"),
        ({"guided_regex": "((((a{100}){100}){100}){100})"}, "guided_regex", "was found that the grammar accepts"),
        ({"template": ["a", {"hole": 2}]}, "template", "put the text before it into prompt"),
        ({"template": [{"hole": 2}], "max_tokens": 60}, "max_tokens", "leave max_tokens out"),
        ({"template": [{"hole": 511}], "max_tokens": None}, "template", "exceed the model's"),
        ({"template": [{"hole": 60_000}], "max_tokens": None}, "template", "its holes are 60000 tokens"),
        ({"template": [{"hole": 2}], "max_tokens": None, "decoding": {"t2t": {}}}, "template", "with t2t"),
        ({"template": [{"hole": 0}]}, "template", ""),
    ],
)
def test_what_cannot_be_honoured_is_a_400_that_names_its_field(
    tiny_model_dir: Path, fields: dict[str, Any], param: str, reason: str
) -> None:
    [error] = answers(tiny_model_dir, ("complete", fields))
    assert isinstance(error, ApiError), error
    assert (error.status, error.param) == (400, param), error.message
    assert reason in error.message


def test_a_stop_string_ends_an_answer_in_the_middle_of_its_form(tiny_model_dir: Path) -> None:
    whole, cut, events, never = answers(
        tiny_model_dir,
        *(
            ("complete", {"guided_regex": r'\{"a":"bb","[c-e]{2}":1\}', "temperature": 1.0, "seed": 3} | more)
            for more in ({}, {"stop": ["zz", '","']}, {"stop": '","', "stream": True}, {"stop": "zz"})
        ),
    )
    text = text_of(whole)
    assert text_of(cut) == text.split('","')[0] == '{"a":"bb'
    assert "".join(e["choices"][0]["text"] for e in events if e["choices"]) == text_of(cut)
    assert cut[0]["choices"][0]["finish_reason"] == "stop"
    assert cut[0]["usage"]["completion_tokens"] < whole[0]["usage"]["completion_tokens"]
    assert text_of(never) == text, "a stop string that does not come changes nothing"


def test_revision_that_the_model_would_use_is_left_out(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "editing"
    folder.mkdir()
    for file in tiny_model_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"t2t": {"tau": 0.1}}))
    answer, filled = answers(
        folder,
        ("chat", {"response_format": FORMAT}),
        ("complete", {"template": [{"hole": 5}, " pens"], "max_tokens": None}),
    )
    jsonschema.validate(json.loads(text_of(answer)), SCHEMA)
    assert text_of(filled).endswith(" pens")


def test_a_template_keeps_its_text_and_tells_its_holes(tiny_model_dir: Path) -> None:
    template = [{"hole": 3}, " apples and  ", {"hole": 1}, "\n"]
    fields = {"template": template, "max_tokens": None, "return_token_ids": True, "return_step_map": True}
    whole, events = answers(tiny_model_dir, ("complete", fields), ("complete", fields | {"stream": True}))
    choice = whole[0]["choices"][0]
    first, second = choice["holes"]
    assert choice["text"] == f"{first} apples and  {second}\n"
    assert choice["finish_reason"] == "stop"
    assert whole[0]["usage"]["completion_tokens"] == 4, "fixed tokens are not generated"
    fixed = [step == 0 for step in choice["rollout"]["step_map"]]
    assert fixed[:3] == [False] * 3 and fixed.count(False) == 4
    assert [e["choices"][0]["holes"] for e in events if e["choices"] and "holes" in e["choices"][0]] == [
        [first, second]
    ]


def test_a_slow_grammar_is_refused_in_time_and_holds_nobody_up(tiny_model_dir: Path) -> None:
    def slow(request: Any) -> None:
        time.sleep(1.0)

    async def scenario() -> None:
        compiler = GrammarCompiler(slow, seconds=0.05)
        request = server_request()
        with pytest.raises(RequestRefused) as caught:
            await compiler(request)
        assert caught.value.field == "grammar"
        compiler.stop()

    asyncio.run(scenario())


def server_request() -> Any:
    from mbd_core.decoding.blocks.config import DecodingConfig
    from mbd_core.decoding.blocks.request import Request
    from mbd_core.decoding.grammar.grammar import Grammar

    grammar = Grammar(syntax="regex", text="a")
    return Request(request_id="a", prompt=(5,), max_tokens=5, decoding=DecodingConfig(block_size=4), grammar=grammar)
