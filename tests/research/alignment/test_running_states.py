"""What counts as a state, in a trace and in training."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulated_trace import SIZE, simulate

from mbd_core.multitf.data.example import Example
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.trace.traced_run import TracedRun, traced_run
from research.alignment.states import decoded_examples, inference_states, training_states

STATES = StateConfig(block_size=4, max_group=2, span="response", rounding="ceil")


def traced(buffer_size: int) -> TracedRun:
    return traced_run(simulate(buffer_size, prompts=(11, 8, 20)).table(), name="a test")


def test_a_traces_states_are_its_forwards_that_decode() -> None:
    run = traced(3)
    states = inference_states(run.requests)
    forwards = sum(r.num_forwards for r in run.requests)
    assert len(states) + states.num_idle == forwards and states.num_problems == 3
    assert states.sizes_S.tolist() == [n for r in run.requests for n in r.num_active_T.tolist() if n]
    assert states.sizes_S.max() > 1
    assert np.nanmax(states.ratios_SN) == 1.0 and np.isnan(states.ratios_SN[states.sizes_S == 1, 1:]).all()
    single = inference_states(traced(1).requests)
    assert single.num_idle > 0 and set(single.sizes_S.tolist()) == {1}


def test_a_samples_states_are_its_noise_groups() -> None:
    """Four blocks of response behind one of the prompt: groups of two, at both shifts; the prompt's block is none."""
    example = Example((1,) * 20, 4)
    states = training_states([example], STATES, draws=1, seed=0)
    assert sorted(states.sizes_S.tolist()) == [1, 1, 2, 2, 2]
    whole = training_states([example], replace(STATES, span="content"), draws=1, seed=0)
    assert sorted(whole.sizes_S.tolist()) == [1, 1, 2, 2, 2]  # five blocks: the groups' parts of the response
    assert np.nanmin(states.ratios_SN) >= 0.25 and np.nanmax(states.ratios_SN) == 1.0


def test_a_blocks_ratio_counts_what_can_be_masked() -> None:
    """A boundary block with one response token is masked whole or not at all."""
    states = training_states([Example((1,) * 8, 7)], STATES, draws=50, seed=0)
    assert set(states.ratios_SN[:, 0].tolist()) == {1.0}
    floor = training_states([Example((1,) * 8, 7)], replace(STATES, rounding="floor"), draws=50, seed=0)
    assert set(floor.ratios_SN[:, 0].tolist()) == {0.0}


def test_draws_depend_on_the_seed_alone() -> None:
    examples = [Example((1,) * 24, 5), Example((1,) * 16, 3)]
    first, again, other = (training_states(examples, STATES, draws=4, seed=seed).ratios_SN for seed in (0, 0, 1))
    assert np.array_equal(first, again, equal_nan=True) and not np.array_equal(first, other, equal_nan=True)


@pytest.mark.parametrize("buffer_size", [1, 4])
def test_samples_are_as_long_as_what_was_stored(buffer_size: int, tmp_path: Path) -> None:
    recorder = simulate(buffer_size, prompts=(11, 8), max_tokens=45, eos_at=30)
    run = traced_run(recorder.table(), name="a test")
    run = replace(run, requests=tuple(replace(r, request_id=r.request_id[1:]) for r in run.requests))
    examples = decoded_examples(run, [11, 8])
    assert [(len(e.tokens), e.prompt_length) for e in examples] == [(4 * SIZE, 11), (4 * SIZE, 8)]
