"""Steps launched before the one before was read: nothing is lost, counted twice or left behind."""

import itertools

import pytest
from small_engines import build, engine, gist, request

from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine


def long_requests() -> list[Request]:
    methods = ("multi", "t2t", "single", "soft")
    return [request(f"r{i}", i, methods[i % 4], max_tokens=20 + 3 * i, ignore_eos=True) for i in range(8)]


def test_steps_ahead_with_few_pages_lose_no_token() -> None:
    """Who gives its pages up does so between steps, never while one is under way."""
    model = build()
    alone = [gist(engine(model).generate([r])[0]) for r in long_requests()]
    served = engine(model, static_shapes=True, overlap=True, num_pages=16, max_rows=4)
    outputs = served.generate(long_requests())
    assert [gist(o) for o in outputs] == alone
    assert served.ahead.num_ahead > 0 and sum(o.counts.num_preemptions for o in outputs) > 0


def test_steps_are_launched_ahead_while_others_wait_for_a_row() -> None:
    served, ahead = engine(build(), static_shapes=True, overlap=True, max_rows=2), 0
    for r in long_requests():
        served.add(r)
    while served.has_work:
        before = served.ahead.num_ahead
        served.step()
        ahead += bool(served.scheduler.waiting) * (served.ahead.num_ahead - before)
    assert ahead > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_decode_seconds_are_the_clocks_and_none_is_counted_twice(overlap: bool) -> None:
    ticks = itertools.count(1)
    config = EngineConfig(max_rows=6, num_pages=200, page_size=8, static_shapes=overlap, overlap=overlap)
    served = Engine(build(), config, clock=lambda: float(next(ticks)))
    served.add(request("a", 1, "multi", prompt=(5, 6, 7), max_tokens=30, ignore_eos=True))
    outputs, begun = [], next(ticks)
    while served.has_work:
        if served._num_steps == 4:
            served.preempt()
        outputs += [o.output for o in served.step() if o.output]
    counts = outputs[0].counts
    assert counts.num_forwards <= counts.decode_seconds <= next(ticks) - begun


def test_generate_keeps_what_nobody_has_been_told() -> None:
    """A request that ended while another call collected its last step still has its output given out."""
    r = request("a", 3, "multi", max_tokens=6, ignore_eos=True)
    for steps in range(1, 50):
        served = engine(build(), static_shapes=True, overlap=True)
        served.add(r)
        assert not any(o.output for _ in range(steps) for o in served.step())
        served.preempt()
        if not served.num_known:
            break
    with pytest.raises(ValueError, match="still being served"):
        served.generate([request("b", 4, "multi")])
    assert [o.request_id for o in served.step() if o.output] == ["a"]
    assert served.generate([request("b", 4, "multi")])[0].request_id == "b"


def test_generate_after_an_abort_with_a_step_under_way() -> None:
    served = engine(build(), static_shapes=True, overlap=True)
    served.add(request("a", 3, "multi", max_tokens=20, ignore_eos=True))
    while served.ahead.step is None:
        served.step()
    assert served.abort("a") is not None and not served.num_known
    alone = gist(engine(build()).generate([request("b", 4, "multi")])[0])
    assert gist(served.generate([request("b", 4, "multi")])[0]) == alone


@pytest.mark.parametrize("name", ["overlap", "graphs"])
@pytest.mark.parametrize("static", [None, False])
def test_what_only_static_steps_can_is_refused_without_them(name: str, static: bool | None) -> None:
    with pytest.raises(ValueError, match=f"{name}=True cannot be honoured"):
        engine(build(), static_shapes=static, **{name: True})
