"""Twenty updates give the losses that lie beside this file, bit for bit: a refactoring changes none."""

import json
from typing import Any

import pytest
from golden_curves import FILE, RUNS, STEPS, Arithmetic, curve

GOLDEN: dict[str, Any] = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", RUNS)
def test_twenty_updates_are_the_golden_ones(name: str) -> None:
    """Bitwise where torch's build and the CPU compute as where the curves were made; elsewhere the test is skipped."""
    made, here = Arithmetic(**GOLDEN["arithmetic"]), Arithmetic.here()
    if made != here:
        pytest.skip(
            f"the golden curves are of torch {made.torch} on a CPU with {made.cpu}; torch {here.torch} on this CPU, "
            f"{here.cpu}, rounds otherwise; {GOLDEN['made_with']} on a commit that is right makes curves for it"
        )
    found, golden = curve(name), GOLDEN["curves"][name]
    assert len(golden) == STEPS
    first = next((step for step, (one, other) in enumerate(zip(found, golden, strict=True)) if one != other), None)
    assert first is None, f"update {first} has loss and norm {found[first]}, not {golden[first]}"


def test_a_golden_curve_is_of_a_training_that_learns() -> None:
    assert GOLDEN["curves"].keys() == RUNS.keys()
    for points in GOLDEN["curves"].values():
        losses = [float.fromhex(loss) for loss, _ in points]
        assert sum(losses[-4:]) < sum(losses[:4])
