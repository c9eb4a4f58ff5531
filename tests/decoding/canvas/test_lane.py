"""How many lanes a canvas has."""

from mbd_core.decoding.blocks.canvas_config import Branches
from mbd_core.decoding.canvas.plan import distinct_lengths


def test_lengths_beyond_the_canvas_are_one() -> None:
    settings = Branches(block_lengths=(4, 8, 16, 32, 64))
    assert distinct_lengths(settings, 12) == [4, 8, 16]
    assert distinct_lengths(settings, 16) == [4, 8, 16]
    assert distinct_lengths(settings, 2) == [4]
