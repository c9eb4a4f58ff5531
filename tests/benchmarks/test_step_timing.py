"""One decode step, timed: every slot is in use, what is measured adds up, and no token changes. No timings."""

import pytest
import torch

from benchmarks.step_timing import StepCase, filled_engine, measure_step
from mbd_core.models.shapes import SHAPES, random_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("static", [False, True])
def test_a_filled_engine_decodes_with_all_slots_in_use(static: bool) -> None:
    case = StepCase(rows=3, buffer_size=2, prefix=64, steps=3, static=static, trace=True)
    model = random_model(SHAPES["sdar-null"], device=CPU, dtype=torch.float32)
    engine = filled_engine(model, case)
    times = measure_step(engine, case)
    assert times.num_tokens == 3 * 2 * 32, "every slot of every row is in the forward"
    assert 0 < times.num_logits <= times.num_tokens
    for value in (times.step, times.forward, times.layout, times.recorder):
        assert value is not None and value > 0
    assert engine.num_running == 3
    engine.check_integrity()
    committed = [s.committed for s in engine.scheduler.running.values()]
    assert all(64 <= c < 64 + case.num_tokens(32) for c in committed)


def test_measuring_changes_no_token() -> None:
    """A forward that is run again stores the same keys: the measured engine goes on as an unmeasured one."""
    case = StepCase(rows=2, buffer_size=2, prefix=32, steps=4)
    model = random_model(SHAPES["sdar-null"], device=CPU, dtype=torch.float32, std=0.5)
    tokens = []
    for measured in (True, False):
        torch.manual_seed(0)
        engine = filled_engine(model, case)
        if measured:
            measure_step(engine, case)
        while engine.num_running == 2 and min(s.committed for s in engine.scheduler.running.values()) < 32 * 3:
            engine.step()
        tokens.append([s.tokens[: 32 * 3] for s in engine.scheduler.running.values()])
    assert tokens[0] == tokens[1]
