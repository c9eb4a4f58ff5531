"""A request's latencies: block-aware, from the time it was due, and their means agree."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.loads import Arrival, RequestRecord, shared_out

ARRIVALS = (Arrival(at=11.0, num_tokens=3), Arrival(at=11.5, num_tokens=1), Arrival(at=13.0, num_tokens=2))
RECORD = RequestRecord(due=10.0, arrivals=ARRIVALS, ended=13.25)


def test_latencies_count_from_the_time_it_was_due() -> None:
    assert RECORD.first_token_seconds == 1.0
    assert RECORD.seconds == 3.25
    assert RECORD.num_tokens == 6


def test_tokens_of_one_arrival_share_their_time() -> None:
    assert RECORD.gaps == [0.5, 1.5]
    assert RECORD.inter_token_seconds == [0.0, 0.0, 0.5, 1.5, 0.0]
    assert RECORD.token_seconds == pytest.approx(2.0 / 5)
    assert statistics.fmean(RECORD.inter_token_seconds) == pytest.approx(RECORD.token_seconds)


def test_what_a_request_does_not_have_is_none() -> None:
    nothing = RequestRecord(due=0.0, arrivals=(), ended=1.0, error="HTTP 500")
    assert (nothing.first_token_seconds, nothing.token_seconds, nothing.num_tokens) == (None, None, 0)
    assert (nothing.gaps, nothing.inter_token_seconds) == ([], [])
    one = RequestRecord(due=0.0, arrivals=(Arrival(at=1.0, num_tokens=1),), ended=1.0)
    assert (one.token_seconds, one.inter_token_seconds) == (None, [])


def test_tokens_are_shared_out_in_proportion() -> None:
    assert shared_out(10, [1, 1, 6]) == [2, 2, 6]
    assert shared_out(3, [5, 5, 5]) == [1, 1, 1]
    assert shared_out(2, [9, 0, 1]) == [2, 0, 0]
    assert shared_out(4, [0, 0]) == [2, 2]
    assert shared_out(5, []) == []


@given(st.integers(0, 500), st.lists(st.integers(0, 60), min_size=1, max_size=40))
def test_no_token_is_lost_and_each_event_has_one_while_there_are_enough(total: int, weights: list[int]) -> None:
    shares = shared_out(total, weights)
    assert (sum(shares), len(shares)) == (total, len(weights))
    assert min(shares) >= (1 if total >= len(weights) else 0)
