"""A block's masks are spread over its steps without loss, and in float32 as released."""

from hypothesis import given
from hypothesis import strategies as st

from mbd_core.decoding.canvas.unmasking import quota, scheduled_quota, steps_of_block


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_steps_are_spread_without_loss(max_tokens: int, size: int, steps: int) -> None:
    starts = range(0, max_tokens, size)
    shares = [steps_of_block(steps, max_tokens, s, min(s + size, max_tokens)) for s in starts]
    assert sum(shares) == steps
    for share, start in zip(shares, starts, strict=True):
        length = min(size, max_tokens - start)
        if 1 <= share <= length:
            counts = [quota(length, share, i) for i in range(share)]
            assert sum(counts) == length and max(counts) - min(counts) <= 1 and min(counts) >= 1


def test_the_schedule_floors_in_float32() -> None:
    left, counts = 48, []
    for step in range(48):
        counts.append(scheduled_quota(left, 48, step, 1e-3))
        left -= counts[-1]
    assert left == 0 and counts[0] == 0 and counts[-1] == 2 and set(counts[1:-1]) == {1}
