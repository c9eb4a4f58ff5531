"""A schema has one verdict, as the form of an answer and as the parameters of a tool; a refusal names the tool."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import tool_folder
from local_server import answers

from mbd_core.calls.forms import HERMES
from mbd_core.calls.rule import CallRule
from mbd_core.decoding.grammar.grammar import MAX_SCHEMAS, Grammar
from mbd_core.decoding.grammar.schemas import GrammarRefused, plain_schema
from mbd_core.serving.api.errors import ApiError


@pytest.fixture(scope="module")
def plain(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template says nothing of tools."""
    return tool_folder(tiny_model_dir, tmp_path_factory.mktemp("plain") / "model")


def needing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def verdicts(folder: Path, schema: dict[str, Any]) -> list[Any]:
    """What a schema gets as a form, and as parameters of a tool that must and that may be called."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tools = {"tools": [tool("now", {"type": "object", "maxProperties": 0}), tool("run", schema)], "max_tokens": 80}
    run = {"type": "function", "function": {"name": "run"}}
    return answers(
        folder,
        ("chat", {"response_format": form, "max_tokens": 80}),
        ("chat", tools | {"tool_choice": run}),
        ("chat", tools | {"tool_choice": "auto"}),
        num_pages=512,
    )


TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 2, "uniqueItems": False}, {}),
    ({"oneOf": [{"const": "cm"}, {"const": "inch"}]}, {}),
    ({"oneOf": [{"enum": ["all"]}, {"type": "string", "pattern": "^[1-9][0-9]?$"}]}, {}),
    ({"oneOf": [{"const": "auto"}, {"type": "integer", "minimum": 0, "maximum": 9}]}, {}),
    ({"type": "string", "format": "regex", "maxLength": 3, "default": "a", "x-order": 1}, {}),
    ({"$ref": "#/$defs/side"}, {"$defs": {"side": {"enum": ["left"], "title": "A side"}}}),
    ({"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 2}, {}),
    ({"type": "object", "propertyNames": {"type": "string", "title": "A name"}, "maxProperties": 0}, {}),
]


@pytest.mark.parametrize(("part", "more"), TAKEN)
def test_what_is_taken_as_a_form_is_taken_of_a_tool(plain: Path, part: dict[str, Any], more: dict[str, Any]) -> None:
    form, must, may = verdicts(plain, needing(a=part) | more)
    for objects in (form, must, may):
        assert not isinstance(objects, ApiError), objects.message
    value = json.loads(form[0]["choices"][0]["message"]["content"])
    [call] = must[0]["choices"][0]["message"]["tool_calls"]
    assert set(value) == {"a"} == set(json.loads(call["function"]["arguments"]))
    if "exclusiveMinimum" in part:
        assert value["a"] > 0 and json.loads(call["function"]["arguments"])["a"] > 0


REFUSED = [
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "give minimum instead, with a number just above 0"),
    ({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, "give minimum"),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
    ({"anyOf": [{"type": "string"}, {"type": "object", "properties": {"b": {"not": {}}}}]}, ".anyOf.1.properties.b: "),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, 'Unimplemented keys: ["propertyNames"]'),
    ({"$ref": "https://example.org/a.json"}, "put its schema into $defs"),
    ({"type": "string", "pattern": "^(?!a)"}, "write the pattern without it"),
    ({"type": "STRING"}, "in small letters"),
    ({"oneOf": [{"type": "object"}, {"type": "object", "minProperties": 1}]}, "give anyOf"),
    ({"oneOf": [{"const": "12"}, {"type": "string", "pattern": "^[1-9][0-9]?$"}]}, "give anyOf"),
    ({"oneOf": [{"const": 1.0}, {"type": "integer"}]}, "give anyOf"),
]


@pytest.mark.parametrize(("part", "reason"), REFUSED)
def test_what_is_refused_as_a_form_is_refused_of_a_tool_by_its_name(
    plain: Path, part: dict[str, Any], reason: str
) -> None:
    form, must, may = verdicts(plain, needing(a=part))
    for error in (form, must, may):
        assert isinstance(error, ApiError) and error.status == 400 and reason in error.message, error
        assert "at properties.a" in error.message and "the grammar" not in error.message
    assert form.message.startswith("response_format: the JSON schema cannot be honoured")
    assert must.message == may.message and must.message.startswith("tools: the parameters of run cannot be honoured")


def test_one_tool_of_many_is_named(plain: Path) -> None:
    tools = [tool(f"t{i}", needing(a={"type": "string"})) for i in range(12)]
    wrong = tool("tags", needing(a={"type": "array", "items": {"type": "string"}, "uniqueItems": True}))
    long = [{"role": "user", "content": "word " * 5000}]
    for error in answers(
        plain,
        ("chat", {"tools": [*tools, wrong]}),
        ("chat", {"tools": [*tools, wrong], "messages": long}),
        num_pages=512,
    ):
        assert isinstance(error, ApiError) and error.param == "tools"
        assert error.message.startswith("tools: the parameters of tags cannot be honoured at properties.a: ")


def test_what_says_nothing_to_a_grammar_is_left_out() -> None:
    said = {
        "title": "A",
        "description": "b" * 1000,
        "examples": [1],
        "$comment": "c",
        "default": 1,
        "deprecated": True,
    }
    schema = needing(title={"type": "string", **said}, default={"anyOf": [{"type": "null", **said}]}) | said
    assert plain_schema(schema) == needing(title={"type": "string"}, default={"anyOf": [{"type": "null"}]})
    kept = {"const": {"title": 1, "x-a": 2}, "enum": [{"default": 1}]}
    assert plain_schema(kept) == kept, "values are no schemas"
    referred = {"x-parts": {"a": {"type": "string"}}, "properties": {"a": {"$ref": "#/x-parts/a"}}}
    assert plain_schema(referred) == referred
    assert plain_schema({"minimum": 1, "exclusiveMinimum": False}) == {"minimum": 1}
    assert plain_schema({"maximum": 1, "exclusiveMaximum": True}) == {"exclusiveMaximum": 1}


def many_tools(number: int, *, length: int) -> list[dict[str, Any]]:
    """Tools with 30 described properties each."""
    described = {"type": "string", "description": "d" * length}
    return [
        tool(f"tool_{i}", {"type": "object", "properties": {f"property_{j}": described for j in range(30)}})
        for i in range(number)
    ]


def test_the_tools_of_an_agent_are_taken_and_too_many_are_refused_in_its_words(plain: Path) -> None:
    tools = many_tools(40, length=50)
    assert 90_000 < len(json.dumps(tools)) < 150_000
    functions = [(t["function"]["name"], t["function"]["parameters"]) for t in tools]
    rule = CallRule(functions=tuple(functions), must=False, several=True)
    assert len(rule.grammar(HERMES, {}).whole) < 60_000
    described, [*_, short] = answers(
        plain, ("chat", {"tools": tools}), ("chat", {"tools": many_tools(1, length=1)}), num_pages=512
    )
    assert isinstance(described, ApiError) and described.code == "context_length_exceeded"
    assert "the 40 tools have" in described.message and "shorter descriptions" in described.message
    assert short["object"] == "chat.completion"
    wide = tuple((f"f{i}", needing(**{f"name_{i}_{j}": {"type": "string"} for j in range(300)})) for i in range(40))
    with pytest.raises(GrammarRefused, match=f"at most {MAX_SCHEMAS}"):
        CallRule(functions=wide, must=False, several=True).grammar(HERMES, {})


def test_forty_tools_are_compiled(plain: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from mbd_core.checkpoint.config import load_config
    from mbd_core.checkpoint.tokenizer import grammars_of

    tokenizer = PreTrainedTokenizerFast.from_pretrained(plain)
    tools = many_tools(40, length=50)
    functions = tuple((t["function"]["name"], t["function"]["parameters"]) for t in tools)
    for must in (False, True):
        grammar: Grammar = CallRule(functions=functions, must=must, several=True).grammar(HERMES, {})
        guide = grammars_of(tokenizer, load_config(plain)).guide(grammar, max_tokens=200)
        assert guide.rest(0)
