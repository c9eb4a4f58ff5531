"""Rows whose input is a chat with functions: a grammar holds calls, and answers are read by the model's own form."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from call_templates import OPENS_THOUGHTS
from chat_templates import ALTERNATE, OTHER_FORM, QWEN, REFUSAL, tool_folder
from sweep_rows import planned_samples

from mbd_core.batch.decoding import DecodeStage, sample_requests
from mbd_core.batch.decoding_model import DecodingModel
from mbd_core.batch.tool_chats import ToolChat
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.serving.tokens.load import load_engine

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "take", "description": "Takes.", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "take", "arguments": {"n": 3}}\n</tool_call>'


def decoded(folder: Path, chats: list[ToolChat]) -> list[dict[str, Any]]:
    table = planned_samples(["m"], prompts=["?"] * len(chats))
    rows = [
        {**row, "input": chat.as_json(), "max_tokens": 80} for row, chat in zip(table.to_pylist(), chats, strict=True)
    ]

    def load(_name: str) -> DecodingModel:
        loaded = load_engine(folder, EngineConfig(max_rows=4, buffer_size=4, num_pages=256))
        return DecodingModel(loaded.engine, loaded.tokenizer)

    stage = DecodeStage(load)
    try:
        return stage(pa.Table.from_pylist(rows, schema=table.schema)).to_pylist()
    finally:
        stage.close()


def chat(text: str, *, grammar: bool = True) -> ToolChat:
    return ToolChat(messages=[{"role": "user", "content": text}], tools=[TOOL], grammar=grammar)


@pytest.mark.parametrize("template", [QWEN, OPENS_THOUGHTS], ids=["plain", "opens thoughts"])
def test_answers_are_read_by_the_model_s_form(tiny_model_dir: Path, tmp_path: Path, template: str) -> None:
    folder = tool_folder(tiny_model_dir, tmp_path / "model", template=template)
    rows = decoded(folder, [chat("Take three."), chat("Take three.", grammar=False)])
    for row in rows:
        answer = json.loads(row["text"])
        assert row["error"] is None and set(answer) == {"content", "calls"}
    held = json.loads(rows[0]["text"])
    assert all(set(json.loads(call["arguments"])) == {"n"} for call in held["calls"])
    tokenizer = load_engine(folder, EngineConfig(max_rows=1, num_pages=64)).tokenizer
    prompt = chat("?").prompt(tokenizer)
    thought = "Three.</think>" if template == OPENS_THOUGHTS else ""
    read = json.loads(chat("?").answer(tokenizer, prompt, tokenizer.encode(thought + "Yes.\n" + CALL)))
    assert read["content"].strip() == "Yes." and json.loads(read["calls"][0]["arguments"]) == {"n": 3}
    grammar = chat("?").answer_grammar(tokenizer, prompt)
    assert grammar is not None and ("thoughts" in grammar.text) == (template == OPENS_THOUGHTS)


def test_an_answer_that_could_not_be_read_is_not_decoded(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tool_folder(tiny_model_dir, tmp_path / "model", template=OTHER_FORM)
    for row in decoded(folder, [chat("Take three."), chat("Take three.", grammar=False)]):
        assert "in a form of its own" in row["error"] and row["text"] is None


def test_a_chat_that_the_template_refuses_does_not_end_the_others(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tool_folder(tiny_model_dir, tmp_path / "model", template=ALTERNATE + QWEN)
    twice = ToolChat(messages=[{"role": "user", "content": text} for text in ("Well?", "Take.")], tools=[TOOL])
    refused, answered = decoded(folder, [twice, chat("Take three.")])
    assert REFUSAL in refused["error"] and refused["text"] is None
    assert answered["error"] is None and set(json.loads(answered["text"])) == {"content", "calls"}


def test_requests_to_be_timed_have_the_grammar_too(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tool_folder(tiny_model_dir, tmp_path / "model", template=QWEN)
    rows = planned_samples(["m"], prompts=["?", "?"]).to_pylist()
    for row, grammar in zip(rows, (True, False), strict=True):
        row["input"] = chat("Take three.", grammar=grammar).as_json()
    loaded = load_engine(folder, EngineConfig(max_rows=1, num_pages=64))
    held, free = sample_requests(DecodingModel(loaded.engine, loaded.tokenizer), rows)
    assert isinstance(held, Request) and held.grammar is not None
    assert isinstance(free, Request) and free.grammar is None
