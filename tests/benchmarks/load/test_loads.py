"""Loads: when requests are sent, what is recorded of them, how tokens are shared out."""

import asyncio
import itertools
import statistics
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.loads import (
    Arrival,
    Concurrency,
    Poisson,
    RequestRecord,
    load_engine_alone,
    proportional_shares,
    send_load,
)
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.models.shapes import SHAPES, random_model


class Server:
    """Answers each request after the others have had their turn; notes how many are open."""

    def __init__(self) -> None:
        self.open, self.most, self.order = 0, 0, []

    async def send(self, number: int, due: float) -> RequestRecord:
        self.open += 1
        self.order.append(number)
        self.most = max(self.most, self.open)
        await asyncio.sleep(0.001 * (number % 3))
        self.open -= 1
        now = time.perf_counter()
        return RequestRecord(due=due, arrivals=(Arrival(at=now, num_tokens=number),), ended=now)


@pytest.mark.parametrize(("size", "most"), [(1, 1), (4, 4), (50, 20)])
def test_a_closed_loop_keeps_so_many_open(size: int, most: int) -> None:
    server = Server()
    run = asyncio.run(send_load(server.send, Concurrency(size), 20))
    assert server.most == most
    assert sorted(server.order) == list(range(20))
    assert [record.num_tokens for record in run.records] == list(range(20))
    assert run.seconds >= max(record.seconds for record in run.records)


def test_arrivals_do_not_wait_for_answers_and_count_from_when_they_were_due() -> None:
    load, server = Poisson(2000.0, seed=3), Server()
    run = asyncio.run(send_load(server.send, load, 40))
    assert server.most > 1
    dues = [record.due for record in run.records]
    expected = load.times(40)
    assert [due - dues[0] for due in dues] == pytest.approx([at - expected[0] for at in expected])


def test_poisson_arrivals_have_their_rate_and_their_spread() -> None:
    times = Poisson(4.0, seed=0).times(20_000)
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.03)  # exponential: as large as the mean
    assert Poisson(4.0, seed=0).times(9) == times[:9] != Poisson(4.0, seed=1).times(9)
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="rate"):
            Poisson(rate)


def test_a_failing_sender_ends_the_load() -> None:
    async def fail(number: int, due: float) -> RequestRecord:
        raise RuntimeError("no usage")

    for load in (Concurrency(2), Poisson(500.0)):
        with pytest.raises(RuntimeError):
            asyncio.run(send_load(fail, load, 4))


def requests(count: int) -> list[Request]:
    decoding = DecodingConfig(block_size=32, buffer_size=2, tokens_per_step=8)
    return [
        Request(request_id=str(n), prompt=tuple(range(2, 20 + n)), max_tokens=48, decoding=decoding, ignore_eos=True)
        for n in range(count)
    ]


@pytest.mark.parametrize("load", [Concurrency(2), Poisson(300.0)], ids=str)
def test_the_engine_alone_serves_the_load_whole(load: Concurrency | Poisson) -> None:
    model = random_model(SHAPES["tiny-sdar"], device=torch.device("cpu"), dtype=torch.float32)
    engine = Engine(model, EngineConfig(max_rows=4, num_pages=64))
    most, add = 0, engine.add

    def counted(request: Request) -> None:
        nonlocal most
        add(request)
        most = max(most, len(engine.scheduler.waiting) + engine.num_running)

    engine.add = counted  # type: ignore[method-assign]
    run = load_engine_alone(engine, requests(6), load)
    assert [record.num_tokens for record in run.records] == [48] * 6
    assert all(record.error is None and 2 <= len(record.arrivals) <= 3 for record in run.records)  # block by block
    assert all(r.due <= r.arrivals[0].at <= r.arrivals[-1].at <= r.ended for r in run.records)
    assert most <= (2 if isinstance(load, Concurrency) else 6)
    if isinstance(load, Poisson):
        dues, times = [r.due for r in run.records], load.times(6)
        assert [due - dues[0] for due in dues] == pytest.approx([at - times[0] for at in times])
    assert not engine.has_work


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
    assert proportional_shares(10, [1, 1, 6]) == [2, 2, 6]
    assert proportional_shares(3, [5, 5, 5]) == [1, 1, 1]
    assert proportional_shares(2, [9, 0, 1]) == [2, 0, 0]
    assert proportional_shares(4, [0, 0]) == [2, 2]
    assert proportional_shares(5, []) == []


@given(st.integers(0, 500), st.lists(st.integers(0, 60), min_size=1, max_size=40))
def test_no_token_is_lost_and_each_event_has_one_while_there_are_enough(total: int, weights: list[int]) -> None:
    shares = proportional_shares(total, weights)
    assert (sum(shares), len(shares)) == (total, len(weights))
    assert min(shares) >= (1 if total >= len(weights) else 0)
