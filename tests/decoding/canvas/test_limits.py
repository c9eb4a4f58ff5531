"""What a canvas can be asked for, and the number of tokens where a request names none."""

import pytest
from fake_canvas_model import make
from hypothesis import given
from hypothesis import strategies as st

from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.canvas.canvas_decoder import canvas_max_tokens, check_canvas


def honoured(canvas: Canvas, max_tokens: int) -> bool:
    try:
        check_canvas(canvas, prompt_length=3, max_tokens=max_tokens, eos_token_ids=(1,))
    except ValueError:
        return False
    return True


@st.composite
def canvases(draw: st.DrawFn) -> Canvas:
    return Canvas(
        accept=draw(st.sampled_from(["quota", "schedule", "origin", "threshold"])),
        block_length=draw(st.sampled_from([None, 1, 3, 8])),
        steps=draw(st.none() | st.integers(1, 40)),
    )


@given(canvases(), st.integers(1, 40), st.integers(1, 60))
def test_the_default_is_the_nearest_number_that_can_be_honoured(canvas: Canvas, preferred: int, most: int) -> None:
    possible = [number for number in range(1, most + 1) if honoured(canvas, number)]
    chosen = canvas_max_tokens(canvas, preferred=preferred, most=most)
    assert 1 <= chosen <= most
    if possible:
        assert chosen == min(possible, key=lambda number: abs(number - preferred))


def test_steps_decide_the_default_where_they_exceed_or_cannot_fill_it() -> None:
    many = Canvas(accept="quota", steps=512)
    assert canvas_max_tokens(many, preferred=256, most=1000) == 512
    few = Canvas(accept="quota", steps=4, block_length=32)
    assert canvas_max_tokens(few, preferred=256, most=1000) == 128
    assert not honoured(many, 256) and not honoured(few, 256)


@pytest.mark.parametrize(
    ("canvas", "max_tokens", "named"),
    [
        (Canvas(accept="quota", steps=13), 12, "canvas.steps=13 exceeds max_tokens=12"),
        (Canvas(steps=13, block_length=None), 12, "canvas.steps=13 exceeds max_tokens=12"),
        (Canvas(accept="quota", steps=2, block_length=4), 12, "canvas.steps=2 leaves block"),
        (Canvas(), 0, "max_tokens=0"),
    ],
)
def test_what_a_request_cannot_have_is_refused(canvas: Canvas, max_tokens: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make(canvas, max_tokens=max_tokens)
