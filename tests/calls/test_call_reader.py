"""An answer's text becomes content and calls, however it is cut into pieces."""

import itertools
import json
import random
from typing import Any

import pytest

from mbd_core.calls.forms import HERMES, LLAMA, PYTHONIC
from mbd_core.calls.reader import CallReader, TextPiece

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "R}m\\n</tool_call>", "n": [1, {}]}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CALLS = [("weather", {"city": "R}m\n</tool_call>", "n": [1, {}]}), ("now", {})]


def joined(said: list[TextPiece]) -> tuple[str, list[tuple[str, Any]]]:
    """Content, and the calls that the deltas make together, as a client joins them."""
    calls: list[dict[str, Any]] = []
    for delta in itertools.chain.from_iterable(s.calls for s in said):
        if delta["index"] == len(calls):
            assert delta["type"] == "function" and delta["id"].startswith("call_") and delta["function"]["name"]
            calls.append({"id": delta["id"], "name": delta["function"]["name"], "arguments": ""})
        else:
            assert "id" not in delta and set(delta["function"]) == {"arguments"}
        calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    assert len({call["id"] for call in calls}) == len(calls)
    return "".join(s.content for s in said), [(c["name"], json.loads(c["arguments"])) for c in calls]


@pytest.mark.parametrize(
    ("text", "content", "number"),
    [
        ("It is \n\n <tool_ call> late<tool", "It is \n\n <tool_ call> late<tool", 0),
        ("ends with a line\n", "ends with a line\n", 0),
        (f"{WEATHER}\n{NOW}", "", 2),
        (f"Let me see.\n\n{WEATHER}\n{NOW}", "Let me see.\n", 2),
        (f"Let <tool_c\n<tool_ me see. {WEATHER}", "Let <tool_c\n<tool_ me see. ", 1),
        ("", "", 0),
    ],
)
def test_any_cut_gives_the_same_content_and_calls(text: str, content: str, number: int) -> None:
    rng = random.Random(len(text))
    cuts = [[], range(1, len(text)), *(sorted(rng.sample(range(len(text)), k=len(text) // 4)) for _ in range(20))]
    for cut in cuts:
        edges = [0, *cut, len(text)]
        reader = CallReader(HERMES, {})
        said = [reader.push(text[a:b], ends=False) for a, b in itertools.pairwise(edges)]
        said.append(reader.push("", ends=True))
        assert joined(said) == (content, CALLS[:number])
        assert reader.num_calls == number


@pytest.mark.parametrize(
    ("form", "text", "content", "names"),
    [
        (PYTHONIC, "[1, 2]", "[1, 2]", []),
        (PYTHONIC, '["now()", 1]', '["now()", 1]', []),
        (PYTHONIC, "[now", "[now", []),
        (PYTHONIC, "[]", "[]", []),
        (PYTHONIC, "[nowhere(), now()]", "[nowhere(), now()]", []),
        (PYTHONIC, "[now(), later()]", "", ["now", "later"]),
        (LLAMA, '{"name": "Ada", "parameters": 1}', '{"name": "Ada", "parameters": 1}', []),
        (LLAMA, '{"name": "now", "parameters": {}}', "", ["now"]),
    ],
)
def test_a_text_that_begins_like_a_call_is_text(form: Any, text: str, content: str, names: list[str]) -> None:
    for size in range(1, len(text) + 1):
        reader = CallReader(form, {"now": {}, "later": {}}, text_has_form=True)
        said = [reader.push(text[i : i + size], ends=False) for i in range(0, len(text), size)]
        said.append(reader.push("", ends=True))
        assert joined(said) == (content, [(name, {}) for name in names])


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        (r'"\U0001F600 \xe9"', "😀 é"),
        (r'"\U00110000"', r"\U00110000"),
        (r'"\UFFFFFFFF"', r"\UFFFFFFFF"),
        (r'"\U0000D83D"', "\ud83d"),
        (r'"\ud83d\ude00"', "😀"),
    ],
)
def test_an_escape_that_names_no_character_does_no_harm(literal: str, value: str) -> None:
    reader = CallReader(PYTHONIC, {"now": {"properties": {"a": {"type": "string"}}}})
    said = [reader.push(f"[now(a={literal})]", ends=False), reader.push("", ends=True)]
    "".join(call["function"]["arguments"] for piece in said for call in piece.calls).encode()
    assert joined(said) == ("", [("now", {"a": value})])


def test_a_text_of_a_schema_is_given_as_it_comes() -> None:
    reader = CallReader(PYTHONIC, {"now": {}}, text_has_form=True)
    assert [reader.push(part, ends=False).content for part in ("[", "1", ",2")] == ["", "[1", ",2"]


def test_text_and_arguments_are_given_as_they_come() -> None:
    reader = CallReader(HERMES, {})
    assert reader.push("Let me see.", ends=False).content == "Let me see."
    head = reader.push('\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ro', ends=False)
    assert head.content == ""
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in head.calls] == [("weather", '{"city": "Ro')]
    more = reader.push('me"}', ends=False)
    assert [c["function"] for c in more.calls] == [{"arguments": 'me"}'}], "the last brace is the arguments' own"
