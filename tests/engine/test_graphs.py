"""The device's part of a decode step: the same memory and the same shapes every time, and the same step as eager."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from small_engines import MASK, VERIFY, B, build, engine, gist, request

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.blocks.work import WORK_NAMES, StepWork
from mbd_core.decoding.canvas import unmasking
from mbd_core.decoding.canvas.plan import OpenLogits
from mbd_core.engine.engine import Engine
from mbd_core.engine.step.batch import Batch
from mbd_core.engine.step.kinds import StepKinds
from mbd_core.engine.step.rows import static_rows


def static_memory(served: Engine) -> dict[str, int]:
    """Addresses of all that a recorded step reads and writes."""
    buffer, runner = served.buffer, served.runner
    parts = vars(buffer) | vars(buffer.settings)
    tensors = {n: t for n, t in parts.items() if isinstance(t, torch.Tensor)}
    tensors |= {"tables": served._state.tables_RP, "last": runner.last_RD, "k": runner.cache.k, "v": runner.cache.v}
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(t.shape) for t in vars(batch).values() if isinstance(t, torch.Tensor))


def requests() -> Iterator[Request]:
    for i, method in enumerate(("multi", "t2t", "single", "multi", "soft", "t2t")):
        yield request(f"r{i}", 40 + i, method, max_tokens=40 - 6 * i, ignore_eos=True)


def test_buffers_are_never_reallocated_and_a_kind_has_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine(build(), static_shapes=True, batch_invariant=False)
    memory = static_memory(served)
    seen: dict[object, set[object]] = {}
    run = served._graphs.run

    def spy(kind, *, num_pages):
        forward = served.runner.forward

        def watched(batch: Batch):
            # the table is cut to the pages in use; on a GPU it has its full width
            seen.setdefault((kind, num_pages), set()).add(shapes(batch))
            return forward(batch)

        monkeypatch.setattr(served.runner, "forward", watched)
        try:
            return run(kind, num_pages=num_pages)
        finally:
            monkeypatch.setattr(served.runner, "forward", forward)

    monkeypatch.setattr(served._graphs, "run", spy)
    served.generate(list(requests()))
    assert static_memory(served) == memory
    assert seen and all(len(found) == 1 for found in seen.values())
    assert len({kind.num_rows for kind, _ in seen}) > 1  # as rows fall empty, smaller programs run


@pytest.mark.parametrize("kind", [{}, {"architecture": "DreamModel", "attention": "full", "shift_logits": True}])
def test_a_program_is_the_eager_step(kind: dict) -> None:
    model = build(**kind)
    methods = ("d2f", "d2f block-causal") if kind else ("multi", "t2t", "soft")
    rng = random.Random(2)
    batch = [request(f"r{i}", i, rng.choice(methods)) for i in range(8)]
    eager = [gist(o) for o in engine(model, static_shapes=False).generate(batch)]
    assert [gist(o) for o in engine(model, static_shapes=True).generate(batch)] == eager


def test_why_there_are_no_graphs_is_said() -> None:
    asked = ((False, None), (True, None), (True, False))
    reasons = [engine(build(), static_shapes=s, graphs=g).graph_report()["not_used"] for s, g in asked]
    assert "no step has a shape that repeats" in reasons[0] and "graphs need a GPU, this is cpu" in reasons[1]
    assert reasons[2] == "graphs=False was asked for"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_program_computes_logits_where_something_can_change(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """As many as the host can promise, in quarters of the buffer, also where a step is launched ahead."""
    portions = set()

    def spy(buffer, *args, num_asked, **kwargs):
        total = buffer.masked_RNB.numel()
        assert int(buffer.asked_RNB.sum()) <= (total if num_asked is None else num_asked)
        portions.add(1.0 if num_asked is None else num_asked / total)
        return static_rows(buffer, *args, num_asked=num_asked, **kwargs)

    monkeypatch.setattr("mbd_core.engine.step.static_step.static_rows", spy)
    batch = [request(f"r{i}", i, ("multi", "t2t", "soft", "single")[i % 4]) for i in range(8)]
    served = engine(build(), static_shapes=True, overlap=overlap, batch_invariant=False)
    served.generate(batch)
    assert 0.25 in portions and len(portions) > 1


def test_tokens_per_step_beside_a_request_without() -> None:
    """A block of four open positions takes two steps and a store."""
    two = DecodingConfig(block_size=4, buffer_size=1, tau_m2t=1.0, tokens_per_step=2)
    r = request("a", 1, "single", prompt=(5, 6, 7, 8), max_tokens=8, decoding=two, ignore_eos=True)
    for static in (False, True):
        output = engine(build(), static_shapes=static).generate([r, request("b", 2, "single")])[0]
        assert output.counts.num_forwards == 2 * (2 + 1)


@pytest.mark.parametrize("static", [False, True])
def test_logits_in_chunks_are_all_logits(monkeypatch: pytest.MonkeyPatch, static: bool) -> None:
    model = build().double()
    batch = [request(f"r{i}", i, ("multi", "t2t", "soft")[i % 3]) for i in range(6)]
    settings = {"static_shapes": static, "batch_invariant": False}
    whole = engine(model, **settings)
    monkeypatch.setattr("mbd_core.engine.build.LOGITS_AT_ONCE", 1)
    chunked = engine(model, **settings)
    assert chunked._state.logits_chunk == B < whole._state.logits_chunk
    assert [gist(o)[0] for o in chunked.generate(batch)] == [gist(o)[0] for o in whole.generate(batch)]


def test_planned_logits_that_are_read_in_parts_are_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of a large batch would take several times the memory of its logits."""
    read, together = unmasking._read, list[int]()

    def spy(parts: Sequence[OpenLogits]) -> torch.Tensor:
        together.append(sum(part.logits_PV.numel() > 0 for part in parts))
        return read(parts)

    monkeypatch.setattr(unmasking, "_read", spy)
    model, decoding = build().double(), DecodingConfig(block_size=B, **VERIFY["verify score"])
    batch = [request(f"r{i}", i, "multi", decoding=decoding, sampling=Sampling(), max_tokens=12) for i in range(4)]
    whole = [gist(o)[0] for o in engine(model, batch_invariant=False).generate(batch)]
    assert max(together) > 1
    together.clear()
    monkeypatch.setattr(unmasking, "READ_AT_ONCE", 1)
    assert [gist(o)[0] for o in engine(model, batch_invariant=False).generate(batch)] == whole
    assert max(together) == 1


def test_the_kinds_worth_a_graph_are_few_and_one_of_them_serves_any_request() -> None:
    kinds = StepKinds(max_rows=16, num_slots=4, block_size=32, batch_invariant=False)
    captured = kinds.to_capture(DecodingConfig(block_size=32, buffer_size=4))
    assert len(captured) == len(set(captured)) == 5 * (4 + 2)
    for flags in itertools.product((False, True), repeat=len(WORK_NAMES)):
        for num_rows, num_asked in itertools.product((1, 3, 16), (1, 100, 128 * 16)):
            kind = kinds.kind(
                num_rows=num_rows, num_slots=4, num_asked=min(num_asked, 128 * num_rows), work=StepWork(*flags)
            )
            assert any(k.covers(kind) for k in captured)
            assert kind.covers(kind)
    least = kinds.kind(num_rows=1, num_slots=1, num_asked=1, work=StepWork())
    assert not least.covers(replace(least, num_asked=None)) and not least.covers(
        replace(least, work=StepWork(draws=True))
    )
    assert not least.covers(replace(least, num_rows=2))


def test_the_first_rows_are_a_buffer_over_the_same_memory() -> None:
    served = engine(build())
    whole, head = served.buffer, served.buffer.head(2)
    whole.join(1, request("a", 1, "multi", prompt=tuple(range(2, 2 + B + 1))))
    assert head.state_RN.tolist() == whole.state_RN[:2].tolist()
    head.activate()
    head.masked_RNB[1, 0] = False
    assert not whole.masked_RNB[1, 0].any() and whole.tokens_RNB[0, 0, 0] == MASK
