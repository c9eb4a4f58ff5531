"""A budget for thoughts is kept to the token, and an answer follows: whole, streamed, resumed, under grammars."""

import json
from pathlib import Path
from typing import Any

import pytest
from call_templates import OPENS_THOUGHTS, TEMPLATES
from chat_templates import tool_folder
from local_server import answers

BUDGET = 7
DRAWN = {"max_tokens": 30, "temperature": 1.0, "seed": 3, "thinking_token_budget": BUDGET}
FLAG = {"type": "json_schema", "json_schema": {"name": "flag", "schema": {"type": "boolean"}}}
NOW = {"type": "function", "function": {"name": "now"}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def opening(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose prompt opens thoughts."""
    return tool_folder(tiny_model_dir, tmp_path_factory.mktemp("opens") / "model", template=OPENS_THOUGHTS)


def delta_text(events: list[dict[str, Any]], name: str) -> str:
    return "".join(e["choices"][0]["delta"].get(name) or "" for e in events if e["choices"])


@pytest.mark.parametrize("buffer_size", [1, 3])
def test_the_answer_follows_a_spent_budget(opening: Path, buffer_size: int) -> None:
    decoding = {"decoding": {"buffer_size": buffer_size}}
    tokens = {"return_token_ids": True, "logprobs": True}
    [free], [whole], events, [later], [none] = answers(
        opening,
        ("chat", DRAWN | decoding | tokens | {"thinking_token_budget": -1}),
        ("chat", DRAWN | decoding | tokens),
        ("chat", DRAWN | decoding | USAGE),
        ("chat", DRAWN | decoding | {"thinking_token_budget": 29}),
        ("chat", DRAWN | decoding | tokens | {"thinking_token_budget": 0}),
        num_pages=256,
    )
    choice, used = whole["choices"][0], whole["usage"]
    assert choice["message"]["reasoning"] and choice["message"]["content"]
    assert choice["token_ids"][:BUDGET] == free["choices"][0]["token_ids"][:BUDGET]
    num_end = used["completion_tokens_details"]["reasoning_tokens"] - BUDGET
    assert num_end >= 1 and used["completion_tokens"] == 30 and choice["finish_reason"] == "length"
    put_in = choice["logprobs"]["content"][BUDGET : BUDGET + num_end]
    assert [place["logprob"] for place in put_in] == [0.0] * num_end
    assert "".join(place["token"] for place in put_in) == "</think>"
    assert delta_text(events, "content") == choice["message"]["content"]
    assert delta_text(events, "reasoning") == choice["message"]["reasoning"]
    assert events[-1]["usage"] == used
    assert later["choices"][0]["message"] == free["choices"][0]["message"]  # max_tokens ends it first
    assert none["choices"][0]["message"]["content"] and "reasoning" not in none["choices"][0]["message"]


def test_grammars_calls_and_stops_hold_behind_a_spent_budget(opening: Path) -> None:
    got = answers(
        opening,
        ("chat", DRAWN | {"response_format": FLAG}),
        ("chat", DRAWN | {"response_format": FLAG} | USAGE),
        ("chat", DRAWN | {"tools": [NOW], "tool_choice": "required", "max_tokens": 90}),
        ("chat", DRAWN | {"stop": ["e", "a", "t"], "max_tokens": 60}),
        num_pages=256,
    )
    [whole], events, [called], [stopped] = got
    message = whole["choices"][0]["message"]
    assert json.loads(message["content"]) in (True, False) and message["reasoning"]
    assert delta_text(events, "content") == message["content"]
    assert called["choices"][0]["finish_reason"] == "tool_calls"
    assert called["choices"][0]["message"]["reasoning"]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens_details"]["reasoning_tokens"] > BUDGET


def test_a_cut_stream_with_a_budget_is_taken_up_again(opening: Path) -> None:
    asked = DRAWN | {"decoding": {"buffer_size": 1}, "stream": True, "resumable": True}
    [events] = answers(opening, ("chat", asked), num_pages=256)
    places = [(e["choices"][0]["resume"], i) for i, e in enumerate(events) if e["choices"][0].get("resume")]
    tokens = [token for e in events for token in e["choices"][0].get("token_ids") or ()]
    assert len(places) > 3
    asks = [("chat", asked | {"resume": place | {"token_ids": tokens[: place["num_tokens"]]}}) for place, _ in places]
    in_mark = {**places[0][0], "num_tokens": BUDGET + 1, "token_ids": tokens[: BUDGET + 1]}
    *rests, cut = answers(opening, *asks, ("chat", asked | {"resume": in_mark}), num_pages=512)
    assert "</th" not in delta_text(cut, "reasoning") + delta_text(cut, "content")
    for (_, number), rest in zip(places, rests, strict=True):
        for name in ("content", "reasoning"):
            assert delta_text(events[: number + 1], name) + delta_text(rest, name) == delta_text(events, name)


def test_where_there_are_no_thoughts_a_note_says_so(tiny_model_dir: Path, tmp_path: Path) -> None:
    plain = tool_folder(tiny_model_dir, tmp_path / "model", template=TEMPLATES["hermes"].replace("think", "thunk"))
    [whole], refused = answers(plain, ("chat", DRAWN), ("chat", DRAWN | {"return_step_map": True}))
    note = "thinking_token_budget has no effect: the chat template knows no thoughts"
    assert note in whole["mbd"]["notes"]
    assert "thinking_token_budget" in str(refused)
