"""A trace cut into requests: which blocks left, which requests are left out, and the block size."""

from pathlib import Path

import numpy as np
import pytest
from simulated_trace import EOS, SIZE, simulate

from mbd_core.decoding.answers.slots import StepTrace
from mbd_core.trace.measures import measure
from mbd_core.trace.recorder import TraceRecorder, read_trace_table
from mbd_core.trace.replay import replay_side
from mbd_core.trace.traced_run import TracedRun, block_lives, traced_run

PROMPTS = (11, 8, 20, 3, 17)


def run_of(trace: TraceRecorder, name: str = "run") -> TracedRun:
    return traced_run(trace.table(), name=name)


def test_blocks_behind_an_eos_never_left() -> None:
    trace = simulate(4, prompts=(11,), eos_at=20, seed=1)
    (request,) = run_of(trace).requests
    lives = block_lives(request)
    assert {life.block for life in lives if life.has_left} == {1, 2}
    side = replay_side(request, name="x", eos_token_ids=(EOS,))
    assert side.end == 20 - SIZE
    assert side.frames[-1].num_tokens == side.frames[-1].num_committed == 20 - 11


@pytest.mark.parametrize(
    ("states", "ratios", "edited", "left"),
    [
        ([2, 1, 0], [0.0, 0.5, 1.0], [0, 0, 0], [True, False]),  # an EOS was stored, what lay behind it dropped
        ([1, 1, 0], [0.0, 0.0, 1.0], [0, 1, 0], [True, False]),  # the same under T2T: verified, and still changing
        ([1, 2, 0], [0.5, 0.0, 1.0], [0, 0, 0], [False, False]),  # cut off
    ],
)
def test_what_leaves_with_the_last_forward(
    states: list[int], ratios: list[float], edited: list[int], left: list[bool]
) -> None:
    trace, zero = TraceRecorder(), np.zeros((1, 3))
    trace.add(0, ["a"], [0], np.array([states]), np.array([ratios]), zero, np.array([edited]), None, None)
    (request,) = run_of(trace).requests
    assert [life.has_left for life in block_lives(request)] == left


def test_full_attention_requests_are_left_out_and_counted() -> None:
    trace = simulate(2)
    alone = measure(run_of(trace))
    canvas = TraceRecorder()
    for recorder in (trace, canvas):
        recorder.extend(
            [
                StepTrace(
                    request_id="c", step=0, slot=0, block=block, state="CANVAS", mask_ratio=1.0, accepted=1, edited=0
                )
                for block in (0, 1)
            ]
        )
    both = measure(run_of(trace))
    assert (both.num_other, both.num_requests, both.num_accepted) == (1, 1, alone.num_accepted)
    assert all(r.tokens_TNB is not None for r in run_of(trace).requests)
    with pytest.raises(ValueError):
        run_of(canvas)


def test_the_block_size_is_never_guessed(tmp_path: Path) -> None:
    trace = simulate(2, detail=False)
    assert measure(run_of(trace)).token_efficiency is None
    assert measure(traced_run(trace.table(), name="x", block_size=SIZE)).token_efficiency is not None
    trace.block_size = SIZE
    trace.write(tmp_path / "t.parquet")
    assert measure(traced_run(read_trace_table(tmp_path / "t.parquet"), name="x")).block_size == SIZE
    with pytest.raises(ValueError, match="8, not the 16"):
        traced_run(trace.table(), name="x", block_size=16)
