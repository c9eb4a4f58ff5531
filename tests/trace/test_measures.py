"""Every number of a trace is what a literal count of its rows gives."""

import numpy as np
import pytest
from simulated_trace import SIZE, simulate

from mbd_core.decoding.answers.slots import StepTrace
from mbd_core.decoding.blocks.config import T2T
from mbd_core.trace.measures import measure, ratios_by_rank
from mbd_core.trace.recorder import TraceRecorder
from mbd_core.trace.traced_run import TracedRun, traced_run

PROMPTS = (11, 8, 20, 3, 17)


def run_of(trace: TraceRecorder, name: str = "run") -> TracedRun:
    return traced_run(trace.table(), name=name)


@pytest.mark.parametrize("buffer_size", [1, 2, 4])
@pytest.mark.parametrize("t2t", [None, T2T(tau=0.7, max_edits=4)])
def test_measures_are_a_literal_count_of_the_rows(buffer_size: int, t2t: T2T | None) -> None:
    trace = simulate(buffer_size, prompts=PROMPTS, t2t=t2t)
    rows = trace.rows
    forwards: dict[tuple[str, int], list[StepTrace]] = {}
    for row in rows:
        forwards.setdefault((row.request_id, row.step), []).append(row)
    active = [[r for r in of if r.state == "ACTIVE"] for of in forwards.values()]
    got = measure(run_of(trace))

    assert got.num_requests == len(PROMPTS) and got.num_slots == buffer_size and got.block_size == SIZE
    assert got.num_forwards == len(forwards)
    assert got.num_accepted == sum(r.accepted for r in rows) == 45 * len(PROMPTS)
    assert got.num_edited == sum(r.edited for r in rows)
    assert (got.num_edited > 0) == (t2t is not None)
    assert got.num_store_only == sum(not of for of in active)
    shares = [sum(len(of) == n for of in active) / len(active) for n in range(buffer_size + 1)]
    assert got.active_blocks.histogram == pytest.approx(shares)
    assert got.token_efficiency == pytest.approx(got.num_accepted / (len(forwards) * buffer_size * SIZE))
    resident = sum(r.state != "DUMMY" for r in rows)
    assert got.resident_efficiency == pytest.approx(got.num_accepted / (resident * SIZE))
    for rank, spread in enumerate(got.mask_ratios):
        ratios = [of[rank].mask_ratio for of in active if len(of) > rank]
        assert (spread.n, spread.mean) == (len(ratios), pytest.approx(np.mean(ratios)))
    gaps = [of[1].mask_ratio - of[0].mask_ratio for of in active if len(of) > 1]
    assert bool(gaps) == bool(got.mask_ratio_gaps) == (buffer_size > 1)
    if gaps:
        assert got.mask_ratio_gaps[0].mean == pytest.approx(np.mean(gaps))
    stays = {
        key: sum((r.request_id, r.block) == key and r.state != "DUMMY" for r in rows)
        for key in {(r.request_id, r.block) for r in rows if r.state != "DUMMY"}
    }
    assert got.lifetimes is not None and got.num_unfinished == 0
    assert (got.lifetimes.n, got.lifetimes.mean) == (len(stays), pytest.approx(np.mean(list(stays.values()))))


def test_single_block_diffusion_stores_each_block_in_a_bubble() -> None:
    single, multi = (measure(run_of(simulate(n, prompts=PROMPTS))) for n in (1, 4))
    assert single.waiting is not None and single.waiting.histogram == (0.0, 1.0)
    assert single.num_store_only == single.waiting.n
    assert multi.store_only_share < single.store_only_share / 2
    assert multi.tpf > single.tpf


def test_ranks_go_by_active_slots_not_by_slots() -> None:
    trace = TraceRecorder()
    states, ratios = np.array([[2, 1, 1]], dtype=np.int8), np.array([[0.0, 0.25, 0.75]])
    trace.add(0, ["a"], [0], states, ratios, np.ones((1, 3)), np.zeros((1, 3)), None, None)
    assert [r.tolist() for r in ratios_by_rank(run_of(trace))] == [[0.25], [0.75]]
