"""Long contexts are measured: rows are whole, counts are exact, and the simulated replicas keep what they should."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.context.affinity import ConversationTraffic, Fleet, Simulation, affinity_rows
from benchmarks.context.commands import affinity, context, turns
from benchmarks.context.storing import CHUNK, counted_rows, gap_row, host_rows, storing_cost, storing_floor
from benchmarks.context.turns import round_trip_rows
from benchmarks.roofline import Machine, step_cost
from mbd_core.models.flops import head_flops
from mbd_core.models.shapes import SHAPES, random_model

SMALL = ConversationTraffic(conversations=12, turns=4, turn_tokens=256, system_tokens=128, think=2.0, rate=2.0)
FLEET = Fleet(events=((3.0, "kill"), (5.0, "add")), cache_tokens=1 << 16)


def test_a_prompt_is_stored_and_every_column_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "rows.json"
    argv = f"--model tiny-sdar --parts storing,decoding,counted --length 256 --compare 256 --threads 1 --json {target}"
    assert context(argv.split()) == 0
    rows = json.loads(target.read_text())
    (row,) = rows["storing"]
    assert (row["length"], row["forwards"], row["block_forwards"]) == (256, 1, 256 // SHAPES["tiny-sdar"].block_size)
    ratios = ("over_bare", "over_floor", "over_block", "over_plain")
    assert all(row[name] > 0 for name in ratios) and row["first_seconds"] > 0
    (step,) = rows["decoding"]
    assert step["length"] == 256 and all(step[name] > 0 for name in ("over_floor", "over_tiles", "step_over_forward"))
    assert row["peak_mb"] > row["kv_mb"] > 0
    assert "one block / storing" in capsys.readouterr().out and len(rows["counted"]) == 9


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ("--parts storing,nothing", "nothing must be of"),
        ("--model sdar", "sdar must be one of"),
        ("--length 2050", "multiple of 32"),
        ("--length 32768", "leave room"),
    ],
)
def test_what_cannot_be_measured_is_refused(argv: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert context(argv.split()) == 2 and why in capsys.readouterr().err


def test_the_hosts_work_does_not_grow_with_the_context() -> None:
    rows = host_rows((2048, 131072), steps=40)
    assert [row["pages"] for row in rows] == [64, 4096]
    assert rows[1]["growth"] < 1.5 and rows[1]["turn_hashes"] == rows[0]["turn_hashes"] == 8


def test_a_prompt_beside_streams_is_stored_in_short_steps_or_at_once() -> None:
    model = random_model(
        replace(SHAPES["tiny-sdar"], max_positions=2048), device=torch.device("cpu"), dtype=torch.float32
    )
    paced, free = (gap_row(model, 512, streams=1, limit=limit) for limit in (1e-9, 1e9))
    assert (paced["forwards"], free["forwards"]) == (512 // model.config.block_size, 1)
    assert paced["p99_gap"] < free["p99_gap"]


def test_the_floor_of_storing_is_that_of_a_step_without_logits() -> None:
    config, size = SHAPES["sdar-50m"], 32
    of_step = step_cost(config, rows=1, buffer_size=4, prefix=256, dtype_bytes=4, logit_tokens=0)
    cost = storing_cost(config, 256, 256 + 4 * size, dtype_bytes=4)
    assert (cost.flops, cost.bytes) == (pytest.approx(of_step.flops), of_step.bytes)
    machine = Machine(bandwidth=1e30, flops=1e12)
    whole = storing_floor(config, 4096, machine, chunk=CHUNK, dtype_bytes=4)
    assert storing_floor(config, 4096, machine, chunk=size, dtype_bytes=4) == pytest.approx(whole)
    (row,) = counted_rows(["sdar-50m"], [4096], machine)
    assert row["floor"] == pytest.approx(row["tflop"]) and row["forwards"] == 2
    assert head_flops(config) > 0


def test_turns_find_their_prefix_where_they_are_sent() -> None:
    steady = {
        router: Simulation(SMALL, replace(FLEET, events=()), router).run() for router in ("prefix", "two choices")
    }
    assert steady["prefix"]["possible"] == 1.0, "nothing is lost while no replica is"
    assert steady["prefix"]["hit_rate"] > steady["two choices"]["hit_rate"] + 0.1
    assert steady["prefix"]["requests"] == SMALL.conversations * SMALL.turns


def test_killed_replicas_cost_hits_and_no_turn() -> None:
    rows = affinity_rows(SMALL, FLEET)
    assert [row["requests"] for row in rows] == [48] * 4
    steady, killed = rows[0], rows[2]
    assert killed["hit_rate"] < steady["hit_rate"] and killed["possible"] < 1.0
    assert killed["hit_rate"] > rows[3]["hit_rate"]
    assert Simulation(SMALL, FLEET, "prefix").run() == rows[2], "a seed gives the same run"


def test_the_command_prints_both_routers(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--conversations", "4", "--turns", "2", "--turn-tokens", "128", "--kills", "2", "--adds", "3"]
    assert affinity(argv) == 0
    assert capsys.readouterr().out.count("two choices") == 2


def test_answers_come_back_by_their_tokens_in_every_familys_template() -> None:
    """But for thoughts, which a template drops by its own rule."""
    rows = {row["template"]: row for row in round_trip_rows()}
    assert len(rows) >= 20
    changed = {name for name, row in rows.items() if row["ids"] < 1.0}
    assert changed == {name for name in rows if "dropped" in name}
    assert all(rows[name]["not_shown"] == "with a thought" for name in changed)
    assert all(row["decoder"] <= row["tokenizer"] <= row["ids"] for row in rows.values())
    assert rows["Vicuna"]["tokenizer"] < 0.1 and rows["LLaDA"]["decoder"] < rows["LLaDA"]["tokenizer"] == 1.0


def test_a_turn_stores_what_is_new_and_decodes_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    argv = ["--turns", "4", "--turn-tokens", "1024", "--threads", "1", "--json", str(target)]
    assert turns(argv) == 0 and "cold / warm" in capsys.readouterr().out
    rows = json.loads(target.read_text())["turns"]
    assert [row["prompt"] - row["cached"] for row in rows] == [1024 - 64] * 4
    assert [row["cached"] for row in rows] == [1024 * k for k in range(4)]
    assert [row["forwards"] for row in rows] == [1] * 4 and [row["cold_forwards"] for row in rows] == [1, 1, 2, 2]
    assert all(row["same_tokens"] for row in rows)
