"""Turns as people bring them: texts in turn, pairs, names in capitals, parts of other kinds, repeated names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mbd_core.json_text import parse_json
from mbd_core.multitf.data.conversation_rows import Columns
from mbd_core.row_files.rows import read_file

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}


def turns(row: Mapping[str, Any], **named: Any) -> list[tuple[str, str]]:
    chat = Columns(**named).found(row).conversation("row", row, [])
    return [(message["role"], message["content"]) for message in chat.messages]


FOUR = [("user", "Hi"), ("assistant", "Yo"), ("user", "a"), ("assistant", "[b")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"conversations": ["Hi", "Yo", "a", "[b"]}, FOUR),
        ({"conversation": [{"input": "Hi", "output": "Yo"}, {"input": "a", "output": "[b"}]}, FOUR),
        ({"conversation": [{"system": "s", "human": "Hi", "assistant": "Yo"}]}, [("system", "s"), *FOUR[:2]]),
        ({"messages": [{"role": "User", "content": "Hi"}, {"role": "ASSISTANT", "content": "Yo"}]}, FOUR[:2]),
        ({"messages": [{"role": "user", "content": [{"text": "Hi"}]}, ANSWER]}, FOUR[:2]),
        ({"instruction": "", "input": "Hi", "output": "Yo"}, FOUR[:2]),
    ],
)
def test_turns_of_other_forms_are_read(row: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert turns(row) == expected
    notes: list[tuple[str, str]] = []
    Columns.of(row).conversation("row", row, notes)
    assert [name for name, _ in notes if name in ("conversation", "conversations")] == list(row)[:1] * (
        "messages" not in row and "input" not in row
    )


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"messages": [USER, None, ANSWER]}, "message 2 is null"),
        ({"messages": [{"role": "user", "parts": ["Hi"]}, ANSWER]}, "message 1 needs a content, and has 'parts'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, "of the type 'image_url'"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "'tool_use'.*'tool_calls'"),
        ({"messages": [{"role": "prompter", "content": "Hi"}, ANSWER]}, "--roles prompter=user"),
        (
            {"conversation": [{"input": "Hi", "output": "Yo", "mood": "m"}]},
            "'mood'.*--ignore-columns conversation.mood",
        ),
        ({"messages": [USER, ANSWER], "kto_tag": False}, "'kto_tag' is not read .*which answers are wanted"),
        ({"messages": [USER, ANSWER], "rejected_response": "No"}, "'rejected_response'.*not wanted"),
        (
            {"messages": [USER, ANSWER], "tools": [{"name": "w", "parameters": {"city": {"type": "str"}}}]},
            "no JSON schema, since 'city'.*under 'properties'",
        ),
        ({"messages": '[{"role": "user", "content": "a", "content": "b"}]'}, "'content' twice in one object"),
    ],
)
def test_what_is_not_read_is_refused_by_its_name(row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        turns(row)


def test_a_line_with_a_name_twice_is_bad_where_the_values_differ(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "Hi", "response": "Yo", "response": "Yo"}\n{"prompt": "Hi", "prompt": "Ho"}\n')
    bad: list[tuple[str, str]] = []
    rows = list(read_file(str(file), unique=True, bad=lambda name, why: bad.append((name, why))))
    assert [row.values for row in rows] == [{"prompt": "Hi", "response": "Yo"}]
    assert bad == [("rows.jsonl line 2", "has 'prompt' twice in one object, with values that differ")]
    assert parse_json(json.dumps({"a": 1})[:-1] + ', "a": 2}', "it") == {"a": 2}
