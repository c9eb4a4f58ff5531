"""What a load sends: a task's prompts, and chats with functions as a sweep asks them."""

import json
from pathlib import Path

import pytest

from benchmarks.load.endpoints import Asking, engine_side
from benchmarks.load.loads import Concurrency
from benchmarks.load.serve import prompts_of
from benchmarks.load.stream_client import Target
from mbd_core.batch.tool_chats import ToolChat
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.config import EngineConfig
from mbd_core.serving.tokens.load import load_engine

FUNCTION = {"name": "rain.today", "description": "Rain.", "parameters": {"type": "dict", "properties": {}}}


@pytest.fixture
def data(tmp_path: Path) -> str:
    question = {"id": "irrelevance_0", "question": [[{"role": "user", "content": "Dry?"}]], "function": [FUNCTION]}
    (tmp_path / "BFCL_v4_irrelevance.json").write_text(json.dumps(question) + "\n")
    return str(tmp_path)


def test_questions_with_functions_are_asked_as_chats_with_tools(data: str) -> None:
    [prompt] = prompts_of("bfcl:irrelevance", "chat/completions", data, 0, count=1)
    assert isinstance(prompt, ToolChat)
    body = Target(name="a", url="http://a", model="m").body(prompt, stream=True)
    assert body["messages"] == [{"role": "user", "content": "Dry?"}]
    assert [tool["function"]["name"] for tool in body["tools"]] == ["rain_today"]


def test_the_engine_alone_gets_their_templated_prompts_and_grammars(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [prompt] = prompts_of("bfcl:irrelevance", "chat/completions", data, 0, count=1)
    assert isinstance(prompt, ToolChat)
    asking = Asking(model=None, route="chat/completions", max_tokens=32, extra=[{}], seconds=1)
    with load_engine(model_folder("tiny-mbd"), EngineConfig(max_rows=1, num_pages=200)) as loaded:
        seen = []
        monkeypatch.setattr(
            loaded.engine, "add", lambda request, add=loaded.engine.add: (seen.append(request), add(request))
        )
        [record] = engine_side(loaded, asking)(Concurrency(1), [prompt]).records
        assert list(seen[0].prompt) == prompt.prompt(loaded.tokenizer)
    assert record.error is None and record.num_tokens > 0 and seen[0].grammar is not None


def test_they_are_refused_as_plain_texts_and_without_a_grammar(data: str) -> None:
    with pytest.raises(ValueError, match="chat/completions"):
        prompts_of("bfcl:irrelevance", "completions", data, 0, count=1)
    with pytest.raises(ValueError, match="take bfcl:"):
        prompts_of("bfcl-free:irrelevance", "chat/completions", data, 0, count=1)


def test_other_tasks_are_asked_as_texts() -> None:
    prompts = prompts_of("gsm-mini", "completions", None, 0, count=2)
    assert len({*prompts}) == 2 and all(isinstance(prompt, str) for prompt in prompts)
