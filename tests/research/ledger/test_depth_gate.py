"""The gate: what it counts of an answer's forwards and blocks, and what it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mbd_core.decoding.answers.counts import Counts
from research.ledger import gate as ledger_gate
from research.ledger.gate import gate_numbers, num_blocks

PLAIN = Counts(
    num_prompt_tokens=134,
    num_tokens=136,
    num_forwards=54,
    num_store_forwards=9,
    num_prefill_forwards=1,
    decode_seconds=0.0,
)


def test_blocks_are_counted_from_the_first_with_an_answer_s_token_to_eos() -> None:
    assert num_blocks(PLAIN, 16) == 9
    assert num_blocks(replace(PLAIN, num_tokens=138), 16) == 10, "EOS begins a block"
    assert num_blocks(replace(PLAIN, num_prompt_tokens=128, num_tokens=15), 16) == 1


def test_the_numbers_leave_out_the_forwards_that_store() -> None:
    found = gate_numbers(
        [True, True, True, False], [PLAIN] * 3 + [replace(PLAIN, num_forwards=18)], buffer_size=1, block_size=16
    )
    assert found.depth == pytest.approx((3 * 45 + 9) / 36)
    assert (found.accuracy.value, found.at_floor, found.n) == (75.0, 0.25, 4)
    assert found.failures == [
        "25.0 % of the answers are at the floor, not fewer than 20 %",
    ]


@pytest.mark.parametrize(
    ("right", "changes", "failure"),
    [
        (8, {}, None),
        (6, {}, "accuracy 60.0 %"),
        (10, {}, "accuracy 100.0 %"),
        (8, {"num_forwards": 44}, "3.89 decoding forwards a block"),
    ],
)
def test_each_of_its_numbers_can_fail_it(right: int, changes: dict[str, Any], failure: str | None) -> None:
    flags = [True] * right + [False] * (10 - right)
    found = gate_numbers(flags, [replace(PLAIN, **changes)] * 10, buffer_size=1, block_size=16)
    assert bool(found.failures) == (failure is not None)
    assert failure is None or failure in found.failures[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1"])
def test_the_shipped_base_leaves_room(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command of research/ledger/README.md, for SingleBD alone."""
    assert ledger_gate.main(["--model", "ledger-bd", "--problems", "500", "--seed", seed]) == 0
    assert "the gate is met" in capsys.readouterr().out


def test_a_random_model_is_measured_and_fails(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger_gate.main(["--model", str(tiny_model_dir), "--problems", "1", "--buffers", "2"]) == 1
    single, multi, _, verdict = capsys.readouterr().out.splitlines()[2:]
    assert single.startswith("| 1 | 1 | 0.0 [0.0, 79.3] |") and multi.startswith("| 2 | 1 | 0.0 ")
    assert "the gate is not met: accuracy 0.0 %" in verdict


def test_a_threshold_out_of_range_is_bad_input(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger_gate.main(["--model", str(tiny_model_dir), "--tau-m2t", "1.5"]) == 2
    assert "--tau-m2t 1.5 must lie between 0 and 1" in capsys.readouterr().err
