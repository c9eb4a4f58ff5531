"""What a canvas asks of a forward."""

from mbd_core.decoding.canvas.plan import CanvasPlan


def test_plans_are_values() -> None:
    assert CanvasPlan([], []).num_positions == 0
