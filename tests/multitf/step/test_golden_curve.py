"""Twenty updates give the losses that lie beside this file, bit for bit: a refactoring changes none."""

import json
from typing import Any

import pytest
from golden_curves import FILE, RUNS, STEPS, Arithmetic, curve

GOLDEN: dict[str, Any] = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", RUNS)
def test_twenty_updates_are_the_golden_ones(name: str) -> None:
    """Bitwise where torch's build and the CPU compute as where the curves were made; elsewhere within a thousandth.
    Torch's operations without vector instructions (ATEN_CPU_CAPABILITY=default) round by 2e-6 otherwise."""
    found, golden = curve(name), GOLDEN["curves"][name]
    assert len(golden) == STEPS
    is_bitwise = Arithmetic(**GOLDEN["arithmetic"]) == Arithmetic.here()
    for step, (ours, theirs) in enumerate(zip(found, golden, strict=True)):
        wanted = theirs if is_bitwise else pytest.approx([float.fromhex(number) for number in theirs], rel=1e-3)
        assert (ours if is_bitwise else [float.fromhex(number) for number in ours]) == wanted, f"update {step}"


def test_a_golden_curve_is_of_a_training_that_learns() -> None:
    assert GOLDEN["curves"].keys() == RUNS.keys()
    for points in GOLDEN["curves"].values():
        losses = [float.fromhex(loss) for loss, _ in points]
        assert sum(losses[-4:]) < sum(losses[:4])
