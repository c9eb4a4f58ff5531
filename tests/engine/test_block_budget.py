"""The block budget: it delays blocks and nothing else, and a step sends no slot that cannot hold one."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from small_engines import B, build, engine, gist, request

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.work import StepWork
from mbd_core.engine.engine import Engine
from mbd_core.engine.step.kinds import StepKinds
from mbd_core.engine.step.rows import static_rows
from mbd_core.models.decoder import Decoder

MODES = [
    {"static_shapes": False},
    {"static_shapes": True},
    {"static_shapes": True, "overlap": True},
]


EAGER = DecodingConfig(block_size=B, buffer_size=4, tau_add=0.0, tau_semi=0.0)  # begins a block in every forward


@pytest.fixture(scope="module")
def model() -> Decoder:
    """In float64: rounding, which depends on a batch's shape, changes no token."""
    return build().double()


def budgeted(model: Decoder, block_budget: int | None, **changes: Any) -> Engine:
    return engine(model, **{"block_budget": block_budget, "batch_invariant": False, "buffer_size": 3} | changes)


def requests(number: int = 6, **changes: Any) -> list[Request]:
    methods = ("multi", "t2t", "soft")
    return [request(f"r{i}", 60 + i, methods[i % 3], **changes) for i in range(number)]


def with_decoding(batch: Sequence[Request], **changes: Any) -> list[Request]:
    return [replace(r, decoding=replace(r.decoding, **changes)) for r in batch]


def tokens_and_counts(outputs: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All of `gist` but the log-probabilities, whose last bits depend on a batch's shape."""
    return [(tokens, *rest) for tokens, _, *rest in map(gist, outputs)]


@pytest.mark.parametrize(
    ("max_rows", "mode"),
    [
        pytest.param(1, MODES[0], marks=pytest.mark.slow),
        (1, MODES[1]),
        pytest.param(1, MODES[2], marks=pytest.mark.slow),
        (6, MODES[0]),
        pytest.param(6, MODES[1], marks=pytest.mark.slow),
        (6, MODES[2]),
    ],
)
def test_a_budget_of_one_block_each_is_single_block_diffusion(
    model: Decoder, max_rows: int, mode: dict[str, bool]
) -> None:
    batch = requests()
    single = budgeted(model, None, max_rows=max_rows).generate(with_decoding(batch, buffer_size=1))
    served = budgeted(model, 1, max_rows=max_rows, **mode)
    assert tokens_and_counts(served.generate(batch)) == tokens_and_counts(single)
    assert tokens_and_counts(budgeted(model, None).generate(batch)) != tokens_and_counts(single)


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_is_not_adaptive_keeps_its_buffer(model: Decoder, mode: dict[str, bool]) -> None:
    batch = with_decoding(requests(), adaptive=False)
    alone = tokens_and_counts(budgeted(model, None).generate(batch))
    beside = requests(4)
    others = [replace(r, request_id=f"other {r.request_id}") for r in beside]
    assert tokens_and_counts(budgeted(model, 1, max_rows=10, **mode).generate([*batch, *others])[:6]) == alone


def test_a_budget_of_all_slots_changes_nothing(model: Decoder) -> None:
    batch = requests()
    wanted = [gist(o) for o in budgeted(model, None, static_shapes=True).generate(batch)]
    assert [gist(o) for o in budgeted(model, 3 * 6, static_shapes=True).generate(batch)] == wanted


def test_blocks_begin_when_others_end(model: Decoder) -> None:
    """Six sequences have one block each; those that are left have more."""
    served, most = budgeted(model, 6), {}
    for i in range(6):
        r = request(f"r{i}", i, "multi", prompt=(5, 6, 7), max_tokens=12 + 12 * i, ignore_eos=True)
        served.add(replace(r, decoding=replace(EAGER, buffer_size=3)))
    served.step()  # all of them decode from here on
    while served.has_work:
        running = served.num_running
        served.step()
        resident = int((served.last_report.states_RN > 0).sum(-1).max())
        most[running] = max(most.get(running, 0), resident)
    assert most == {6: 1, 5: 1, 4: 1, 3: 2, 2: 3, 1: 3}


def serve_under_load(served: Engine, batch: Sequence[Request], *, rng: random.Random | None = None) -> dict[str, Any]:
    """Outputs of `batch` by id as long as requests wait, so that every step has all rows running."""
    outputs: dict[str, Any] = {}
    for r in batch:
        served.add(r)
    while len(outputs) < len(batch) - served.config.max_rows - 1:
        if rng is not None and rng.random() < 0.2:
            served.preempt()
        for step in served.step():
            if step.output is not None:
                outputs[step.request_id] = tokens_and_counts([step.output])[0]
        assert int(served.buffer.resident_RN.sum(-1).max()) <= 2
    return outputs


def test_equal_load_gives_equal_tokens(model: Decoder) -> None:
    """Dynamic, static, launched ahead and preempted: three rows and a budget of six leave two blocks of three."""
    batch, size = requests(14, max_tokens=30), {"max_rows": 3, "num_pages": 400}
    wanted = serve_under_load(budgeted(model, 6, **size), batch)
    preempted = (budgeted(model, 6, **size, **mode) for mode in MODES)
    runs = [serve_under_load(budgeted(model, 6, **size, **mode), batch) for mode in MODES[1:]]
    runs += [serve_under_load(served, batch, rng=random.Random(5)) for served in preempted]
    for run in runs:
        common = wanted.keys() & run.keys()
        assert len(common) >= 8 and {n: run[n] for n in common} == {n: wanted[n] for n in common}
    two = budgeted(model, None, **size).generate(with_decoding(batch, buffer_size=2))
    assert {n: wanted[n] for n in wanted} == {
        r.request_id: o for r, o in zip(batch, tokens_and_counts(two), strict=True) if r.request_id in wanted
    }


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_no_block_stands_behind_the_slots_of_a_step(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """What the host promises without having read the last step, while requests come, go and are preempted."""
    slots, rng = set(), random.Random(4)

    def spy(buffer, *args, num_slots, num_asked, **kwargs):
        assert not bool(buffer.resident_RN[:, num_slots:].any())
        total = len(buffer.state_RN) * num_slots * B
        assert int(buffer.asked_RNB.sum()) <= (total if num_asked is None else num_asked) <= total
        slots.add(num_slots)
        rows = static_rows(buffer, *args, num_slots=num_slots, num_asked=num_asked, **kwargs)
        assert len(rows.groups[0].tokens_T) == total
        return rows

    monkeypatch.setattr("mbd_core.engine.step.static_step.static_rows", spy)
    served = budgeted(model, 5, static_shapes=True, overlap=overlap, buffer_size=4, num_pages=60)
    served.add(request("alone", 1, "multi", decoding=EAGER, prompt=(5,), max_tokens=40, ignore_eos=True))
    for _ in range(3):
        served.step()
    served.preempt()  # with three blocks and nothing to store again
    while served.has_work:
        served.step()
    for i in range(60):
        method = rng.choice(("multi", "t2t", "soft", "single"))
        decoding = replace(
            request("", 0, method).decoding,
            buffer_size=rng.randint(1, 4),
            tau_add=rng.choice((0.0, 0.1)),
            tau_semi=rng.choice((0.0, 0.9)),  # with 0.0 twice a block begins in every forward
            adaptive=rng.random() < 0.9,
        )
        served.add(request(f"r{i}", i, method, decoding=decoding))
        for _ in range(rng.randint(0, 6) if i % 20 else 30):
            served.step()
        if rng.random() < 0.2:
            served.preempt()
        if rng.random() < 0.1:
            served.abort(f"r{rng.randint(0, i)}")
        served.check_integrity()
    while served.has_work:
        served.step()
    assert slots == {1, 2, 4}


def test_a_saturated_step_sends_one_slot_of_each_row(model: Decoder) -> None:
    served = budgeted(model, 4, static_shapes=True, buffer_size=4, max_rows=4)
    for r in requests(4, max_tokens=40, ignore_eos=True, prompt=(5, 6, 7)):
        served.add(r)
    for _ in range(6):
        served.step()
    assert served.num_running == 4
    assert served.runner.last_batch is not None and len(served.runner.last_batch.input_ids_T) == 4 * B


def test_narrow_kinds_are_captured_where_the_budget_makes_them() -> None:
    config = {"max_rows": 16, "num_slots": 4, "block_size": 32, "batch_invariant": False}
    kinds = StepKinds(**config, blocks_each=lambda n: max(1, min(4, 8 // n)))
    captured = kinds.to_capture(DecodingConfig(block_size=32, buffer_size=4))
    assert len(captured) == len(set(captured))
    shapes = {(k.num_rows, k.num_slots) for k in captured}
    # 1 and 2 rows keep four blocks; 3 rows two and 4 rows two; 5 to 16 rows one
    assert shapes == {(1, 4), (2, 4), (4, 2), (4, 4), (8, 1), (8, 4), (16, 1), (16, 4)}
    narrow = kinds.kind(num_rows=16, num_slots=1, num_asked=100, work=StepWork(draws=True))
    assert (narrow.num_slots, narrow.num_asked) == (1, 128)
    wide = replace(narrow, num_slots=4)
    assert wide.covers(narrow) and not narrow.covers(wide)
    assert min(k.num_slots for k in captured if k.covers(narrow)) == 1
    unlimited = kinds.to_capture(DecodingConfig(block_size=32, buffer_size=4, adaptive=False))
    assert {k.num_slots for k in unlimited} == {4}
    plain = StepKinds(**config).kind(num_rows=16, num_slots=1, num_asked=100, work=StepWork())
    assert plain.num_slots == 4  # without a budget every step has all slots


def test_what_contradicts_a_budget_is_refused(model: Decoder) -> None:
    with pytest.raises(ValueError, match="block_budget=0"):
        budgeted(model, 0)
    with pytest.raises(ValueError, match=r"block_budget=4 .*batch_invariant=True"):
        budgeted(model, 4, batch_invariant=True)
    with pytest.raises(ValueError, match='adaptive="no"'):
        DecodingConfig(block_size=B, adaptive="no")  # type: ignore[arg-type]
