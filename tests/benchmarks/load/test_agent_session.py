"""An agent's session: what its turns send, and the parts of a turn's time."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.load import agent
from benchmarks.load.agent_session import SYSTEM, ChatSession, agent_tools, all_tools, result_text
from mbd_core.checkpoint.saving import save_random
from mbd_core.checkpoint.shape_tokenizer import shape_tokenizer
from mbd_core.models.shapes import SHAPES

MODEL = "tiny-sdar"


def made_up(turns: int) -> ChatSession:
    session = ChatSession("http://127.0.0.1:1", MODEL, agent_tools(1500), answer_tokens=160)
    for number in range(1, turns + 1):
        session.made_up_turn(number, result_text(number, 40))
    return session


def test_tools_have_the_asked_length_and_are_the_same_each_time() -> None:
    tools = agent_tools(20_000)
    assert 20_000 <= len(json.dumps(tools)) < 30_000
    assert tools == agent_tools(20_000) and len({tool["name"] for tool in tools}) == len(tools)
    with pytest.raises(ValueError, match="--tool-characters"):
        agent_tools(10**9)


def test_a_turn_sends_the_turns_before_and_a_result_of_its_own() -> None:
    session = made_up(4)
    bodies = [session.body(session.messages_of(number, text)) for number, text in ((2, "a"), (4, "b"), (4, "c"))]
    second, last, other = (body["messages"] for body in bodies)
    assert second[0] == {"role": "system", "content": SYSTEM}
    assert [turn["role"] for turn in second[1:]] == ["user", "assistant", "tool"]
    assert last[: len(second) - 1] == second[:-1] and last[:-1] == other[:-1] and len(last) == len(second) + 4
    assert [turns[-1]["content"] for turns in (second, last, other)] == ["a", "b", "c"]
    assert last[-1]["tool_call_id"] == last[-2]["tool_calls"][0]["id"]
    assert "decoding" in bodies[0] and "extra_body" not in bodies[0]


def test_the_parts_of_a_turn_are_measured(tmp_path: Path) -> None:
    config = replace(SHAPES[MODEL], max_positions=8192)
    tokenizer = shape_tokenizer(config, lessons=[json.dumps(tool) for tool in all_tools()])
    save_random(config, tmp_path / MODEL, tokenizer=tokenizer, dtype=torch.float32)
    session = made_up(3)

    half = 2 * config.block_size  # characters of half a block of tokens
    lengths = agent.result_lengths(40, {2: 30, 3: 33}, block_size=config.block_size, repeats=2)
    assert lengths == {2: [40 + 12, 40 + 12 + half], 3: [40, 40 + half]}
    bodies = agent.bodies_of(session, lengths)
    rows, forwards = asyncio.run(agent.inside_rows(tmp_path / MODEL, session.route, bodies, num_pages=600))
    assert [row["part"] for row in rows] == list(agent.PARTS)
    assert all(row["2"] > 0 and row["3"] > 0 for row in rows)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert set(forwards) == {2, 3} and all(1 <= number < 20 for number in forwards.values())
