"""What an engine says of itself equals what its traces and its outputs say, step by step."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from small_engines import VOCAB, B, build

from mbd_core.decoding.blocks.config import T2T, DecodingConfig
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.measures import RecentValues
from mbd_core.models.decoder import Decoder
from mbd_core.trace.recorder import TraceRecorder

METHODS: dict[str, dict[str, Any]] = {
    "single": {"buffer_size": 1, "tau_m2t": 0.4},
    "multi": {"buffer_size": 3, "tau_m2t": 0.4, "tau_add": 0.1},
    "edited": {"buffer_size": 2, "tau_m2t": 0.4, "t2t": T2T(tau=0.2, max_edits=4)},
}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return build()


def requests(*, method: str | None = None, count: int = 8, **changes: Any) -> list[Request]:
    rng = random.Random(4)
    return [
        Request(
            request_id=f"r{i}",
            decoding=DecodingConfig(block_size=B, **METHODS[method or rng.choice(sorted(METHODS))]),
            **{
                "prompt": tuple(rng.choices(range(2, VOCAB), k=rng.randint(1, 25))),
                "max_tokens": rng.randint(1, 30),
                **changes,
            },
        )
        for i in range(count)
    ]


def engine(model: Decoder, **changes: Any) -> tuple[Engine, TraceRecorder]:
    trace = TraceRecorder()
    sizes = {"max_rows": 4, "num_pages": 100, "page_size": 8, "max_prefill_tokens": 12}
    return Engine(model, EngineConfig(**(sizes | changes)), trace=trace), trace


def serve(served: Engine, given: Iterable[Request], *, preempt: float = 0.0) -> list[Output]:
    rng = random.Random(5)
    for request in given:
        served.add(request)
    outputs = []
    while served.has_work:
        if rng.random() < preempt:
            served.preempt()
        outputs += [step.output for step in served.step() if step.output is not None]
    return outputs


@pytest.mark.parametrize("changes", [{}, {"static_shapes": True, "overlap": True}], ids=["packed", "ahead"])
@pytest.mark.parametrize("preempt", [False, True])
def test_queue_prompt_and_decode_are_parts_of_a_request_s_time(
    model: Decoder, changes: dict[str, Any], preempt: bool
) -> None:
    served, _ = engine(model, **changes)
    start, seconds, order = time.perf_counter(), dict[str, float](), list[Output]()
    for request in requests(ignore_eos=True):
        served.add(request)
    for number in itertools.count():
        if not served.has_work:
            break
        if preempt and number == 5:
            served.preempt()
        for step in served.step():
            if step.output is not None:
                order.append(step.output)
                seconds[step.request_id] = time.perf_counter() - start
    for output in order:
        counts = output.counts
        assert min(counts.queue_seconds, counts.prompt_seconds) >= 0 < counts.decode_seconds
        parts = counts.queue_seconds + counts.prompt_seconds + counts.decode_seconds
        assert parts <= seconds[output.request_id], "no second is counted twice"
        if not (counts.num_preemptions or changes):
            assert parts >= 0.5 * seconds[output.request_id], "and most of them are counted"
    assert order[-1].counts.queue_seconds > order[0].counts.queue_seconds, "it waited for a row"
    assert any(output.counts.prompt_seconds > 0 for output in order)
    assert any(output.counts.num_preemptions for output in order) == preempt


@pytest.mark.parametrize("changes", [{}, {"static_shapes": True, "overlap": True}], ids=["packed", "ahead"])
@pytest.mark.parametrize("preempt", [0.0, 0.2])
def test_counts_are_those_of_the_trace(model: Decoder, changes: dict[str, Any], preempt: float) -> None:
    served, trace = engine(model, **changes)
    outputs = serve(served, requests(ignore_eos=True), preempt=preempt)
    counts, rows = served.counts, trace.rows
    assert {o.finish_reason for o in outputs} == {"length"}

    assert counts.committed_tokens == sum(len(o.tokens) for o in outputs)
    assert counts.sequence_forwards == sum(o.counts.num_forwards for o in outputs)
    assert counts.edited_tokens == sum(r.edited for r in rows) > 0
    by_request = sorted(o.counts.tpf for o in outputs)
    assert sorted(counts.tokens_per_forward.take()) == by_request

    in_slots = Counter((r.request_id, r.block) for r in rows if r.state != "DUMMY")
    assert Counter(counts.block_lifetimes.take()) == Counter(in_slots.values())  # every block was stored
    assert sum(o.counts.num_positions for o in outputs) == B * in_slots.total()

    deciding = {r.step for r in rows if r.state == "ACTIVE"}
    steps = {r.step for r in rows}
    assert len(steps - deciding) <= counts.forwards["store"] <= len(steps - deciding) + served.ahead.num_ahead
    assert counts.forwards["decode"] >= len(deciding)
    assert (served.measures().preemptions > 0) == (preempt > 0)
    assert served.measures().preemptions == sum(o.counts.num_preemptions for o in outputs)


def test_single_block_decoding_counts_its_bubble(model: Decoder) -> None:
    served, _ = engine(model)
    (output,) = serve(served, requests(method="single", count=1, max_tokens=20, ignore_eos=True))
    forwards = served.counts.forwards
    assert forwards["store"] == output.counts.num_store_forwards > 0
    assert forwards["decode"] + forwards["store"] == output.counts.num_forwards
    assert forwards["prefill"] == output.counts.num_prefill_forwards


def test_an_engine_says_how_full_it_is(model: Decoder) -> None:
    served, _ = engine(model, max_prefill_tokens=64)
    idle = served.measures()
    assert (idle.running, idle.waiting, idle.kv_usage, idle.active_slots, idle.dummy_slots) == (0, 0, 0.0, 0, 0)

    for request in requests(method="multi", count=6, prompt=(5,) * 8, max_tokens=30, ignore_eos=True):
        served.add(request)
    served.step()
    busy, pool = served.measures(), served.scheduler.pool
    assert (busy.running, busy.waiting) == (4, 2)
    assert busy.kv_usage == pytest.approx((pool.capacity - pool.num_free) / pool.capacity) and busy.kv_usage > 0
    assert (busy.active_slots, busy.dummy_slots) == (4, 12)  # the first block of each, and the rest of its row

    while served.has_work:
        served.step()
    done = served.measures()
    assert (done.running, done.waiting, done.kv_usage, done.active_slots, done.dummy_slots) == (0, 0, 0.0, 0, 0)
    assert done.prefix_queries == 6 * 8
    assert done.prefix_hits > 0
    assert done.replayed_steps == 0
    assert len(done.counts.queue_seconds.take()) == 6
    assert min(done.counts.prefill_seconds.take()) >= 0.0


def test_a_request_that_waits_has_its_queue_time(model: Decoder) -> None:
    served, _ = engine(model, max_rows=1)
    serve(served, requests(method="multi", count=2, prompt=(5,) * 20, max_tokens=20, ignore_eos=True))
    first, second = served.counts.queue_seconds.take()
    assert 0 <= first < second
    assert served.counts.queue_seconds.take() == []


def test_a_request_waits_from_its_check_on(model: Decoder) -> None:
    served, _ = engine(model)
    admitted = served.admission.check(requests(method="multi", count=1)[0])
    checked = replace(admitted, checked_at=admitted.checked_at - 60.0)  # it was held before the engine for a minute
    served.add_admitted(checked)
    while served.has_work:
        served.step()
    (seconds,) = served.counts.queue_seconds.take()
    assert seconds > 60.0


def test_tokens_of_an_earlier_engine_are_not_this_ones(model: Decoder) -> None:
    served, _ = engine(model)
    given = requests(method="multi", count=1, max_tokens=20, ignore_eos=True, committed=(7, 8, 9, 10))
    (output,) = serve(served, given)
    assert served.counts.committed_tokens == 16
    assert served.counts.tokens_per_forward.take() == [16 / output.counts.num_forwards]


def test_an_aborted_request_has_no_sample(model: Decoder) -> None:
    served, _ = engine(model)
    served.add(requests(method="multi", count=1, max_tokens=30, ignore_eos=True)[0])
    served.step()
    served.abort("r0")
    assert served.counts.tokens_per_forward.take() == []
    assert served.counts.queue_seconds.take() == []


def test_samples_keep_the_newest_and_count_the_rest() -> None:
    samples = RecentValues(limit=3)
    samples.extend([1, 2, 3, 4])
    assert samples.num_dropped == 1
    assert samples.take() == [2, 3, 4]
    assert samples.take() == []
