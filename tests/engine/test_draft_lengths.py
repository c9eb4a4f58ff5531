"""The number of drafted blocks by measures (`Verify.slots`): whatever is chosen, an exact answer is that of block size
1; the choice follows the measured seconds and the confirmed drafts."""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from drawn_counts import MANY_ROWS, chi_square
from small_engines import B, build, engine, run_with_preemption
from test_verified_decoding import at_block_size_1, random_requests
from torch import Tensor

from mbd_core.decoding.answers.slots import DraftVerdict, FrameSlot, PlannedSlot, SlotState
from mbd_core.decoding.blocks.config import DecodingConfig, decoding_config
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.decoding.causal.verified import DraftRound
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.schedule.draft_lengths import (
    LEAST_STEPS,
    ConfirmedRates,
    DraftLengths,
    expected_tokens,
)
from mbd_core.engine.schedule.forward_seconds import StepLoad
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.engine.step.batch import Batch
from mbd_core.engine.step.runner import ModelRunner
from mbd_core.models.decoder import Decoder, init_weights

MEASURED = Verify(exact=True, store="causal", slots="measured")
Choice = Callable[[Sequence[DraftRound]], int]
Cost = Callable[[int], float]


def decoding(slots: int) -> DecodingConfig:
    return DecodingConfig(block_size=B, buffer_size=slots, verify=MEASURED)


def force(monkeypatch: pytest.MonkeyPatch, choice: Choice) -> Counter[int]:
    """The engines' choices are these from now on; returns their counts."""
    chosen: Counter[int] = Counter()

    def choose(self: DraftLengths, rounds: Sequence[DraftRound], rates: ConfirmedRates, *, num_running: int) -> int:
        number = choice(rounds)
        chosen[number] += 1
        return number

    monkeypatch.setattr(DraftLengths, "choose", choose)
    return chosen


def small_model(std: float = 0.12) -> Decoder:
    model = build()
    init_weights(model, seed=11, std=std)
    return model


@pytest.mark.parametrize("number", [24, pytest.param(1000, marks=pytest.mark.slow)])
def test_whatever_is_chosen_a_greedy_answer_is_that_of_block_size_1(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Random numbers of blocks, anew in each round: no token differs, alone, in batches and after preemptions."""
    model, rng = small_model(), random.Random(2)
    chosen = force(monkeypatch, lambda rounds: rng.randint(1, len(rounds)))
    requests = random_requests(number, decoding(4))
    alone = DecodingConfig(block_size=1)
    wanted = engine(at_block_size_1(model)).generate([dataclasses.replace(r, decoding=alone) for r in requests])
    found = engine(model, batch_invariant=False, buffer_size=4).generate(requests)
    assert [(o.tokens, o.finish_reason) for o in found] == [(o.tokens, o.finish_reason) for o in wanted]
    assert {1, 2, 3, 4} <= set(chosen)
    again = run_with_preemption(engine(model, buffer_size=4), requests[:12], rng)
    assert [o.tokens for o in again] == [o.tokens for o in wanted[:12]]


@pytest.mark.slow
def test_a_drawn_answer_keeps_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice depends on the draws before it: one block behind a token, three blocks behind another one."""
    model = build()
    init_weights(model, seed=4, std=0.25)
    served = engine(model, batch_invariant=False, **MANY_ROWS, buffer_size=3)
    chosen = force(monkeypatch, lambda rounds: 1 if rounds[0].masks[0] == 1 else len(rounds))
    counts = []
    for each, decoding_ in (
        (served, decoding(3)),
        (engine(at_block_size_1(model), batch_invariant=False, **MANY_ROWS), DecodingConfig(block_size=1)),
    ):
        requests = [
            Request(
                request_id=f"r{i}",
                prompt=(5, 9, 14, 33, 7),
                max_tokens=4,
                decoding=decoding_,
                sampling=Sampling(temperature=1.0, top_k=2, seed=i),
                ignore_eos=True,
            )
            for i in range(1000)
        ]
        counts.append(Counter(o.tokens[1:] for o in each.generate(requests)))
    assert min(chosen[1], chosen[2]) > 100
    assert 4 < len(counts[0] | counts[1]) <= 16
    assert chi_square(*counts) < 37.7, counts  # the 0.999 quantile for 15 degrees of freedom


class Clock:
    """Seconds of an engine's forwards."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def watch(self, runner: ModelRunner, cost: Cost) -> None:
        """The forwards of `runner` take the seconds that `cost` says by their positions."""
        forward = runner.forward

        def timed(batch: Batch) -> Tensor:
            self.now += cost(len(batch.input_ids_T))
            return forward(batch)

        runner.forward = timed  # type: ignore[method-assign]


def serve(
    model: Decoder, cost: Callable[[int], float], fields: dict[str, Any], rows: int
) -> tuple[list[Output], Clock]:
    """Answers of 60 tokens, `rows` at once, and the clock of their forwards."""
    clock = Clock()
    served = Engine(model, EngineConfig(max_rows=rows, num_pages=400, page_size=8, buffer_size=4), clock=clock)
    clock.watch(served.runner, cost)
    requests = [
        Request(
            request_id=f"r{i}",
            prompt=(5, 6, 7 + i),
            max_tokens=60,
            decoding=DecodingConfig(block_size=B, **fields),
            ignore_eos=True,
        )
        for i in range(2 * rows)
    ]
    return served.generate(requests), clock


@pytest.mark.parametrize("rows", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_choice_follows_what_positions_cost_and_how_drafts_agree(rows: int) -> None:
    """Where positions cost nothing, a draft that agrees has all blocks; where they cost all, no draft has two."""
    agrees, differs = small_model(), small_model(std=0.5)
    with torch.no_grad():
        agrees.lm_head.weight.zero_()  # every token is the same
    exact = Verify(exact=True, store="causal")

    def seconds(model: Decoder, cost: Callable[[int], float], **fields: Any) -> tuple[float, list[Any]]:
        outputs, clock = serve(model, cost, fields, rows)
        return clock.now, [o.tokens for o in outputs]

    for model, cost in (
        (agrees, lambda _: 1.0),
        (agrees, lambda size: 0.1 * size),
        (differs, lambda _: 1.0),
        (differs, lambda size: 1.0 + 0.5 * size),
    ):
        wanted = [seconds(model, cost, buffer_size=slots, verify=exact) for slots in (1, 2)]
        found = seconds(model, cost, buffer_size=4, verify=MEASURED)
        assert found[1] == wanted[0][1] == wanted[1][1]
        assert found[0] < 1.06 * min(wanted)[0]
    free, single = (seconds(agrees, cost, buffer_size=4, verify=MEASURED)[0] for cost in (lambda _: 1.0, lambda s: s))
    assert free < 0.6 * seconds(agrees, lambda _: 1.0, buffer_size=1, verify=exact)[0]
    assert single <= seconds(agrees, lambda s: s, buffer_size=2, verify=exact)[0]


def test_a_reply_counts_what_its_frames_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged and confirmed tokens of frames, of replies and of the engine are one number, whatever is chosen."""
    rng = random.Random(3)
    force(monkeypatch, lambda rounds: rng.randint(1, len(rounds)))
    served, judged, confirmed, outputs = engine(small_model(), buffer_size=3), Counter[str](), Counter[str](), []
    for r in random_requests(12, decoding(3)):
        served.add(dataclasses.replace(r, frames=True))
    while served.has_work:
        for step in served.step():
            for slot in () if step.frame is None else step.frame.slots:
                assert slot.verdict is not None
                judged[step.request_id] += slot.verdict.judged
                confirmed[step.request_id] += len(slot.verdict.confirmed)
            outputs += [] if step.output is None else [step.output]
    for output in outputs:
        assert output.counts.num_drafted_tokens == judged[output.request_id]
        assert output.counts.num_confirmed_tokens == confirmed[output.request_id]
    assert served.counts.drafted_tokens == judged.total() > served.counts.confirmed_tokens == confirmed.total() > 0


# The measures alone.


def judged(*slots: tuple[int, int]) -> list[PlannedSlot]:
    """The blocks of a judgement, each with its judged and confirmed tokens: 7, 8, ..."""
    return [
        PlannedSlot(
            start=0,
            frame=FrameSlot(
                state=SlotState.ACTIVE.name,
                tokens=tuple(range(7, 15)),
                accepted=(),
                edited=(),
                verdict=DraftVerdict(
                    drafted=(), judged=number, confirmed=tuple(range(kept)), refused=(kept,) if kept < number else ()
                ),
            ),
            seen=SlotState.ACTIVE,
            confidences=(),
            mask_ratio=0.0,
        )
        for number, kept in slots
    ]


def test_rates_are_measured_by_slot_and_an_answer_begins_as_all_answers() -> None:
    everyone = ConfirmedRates(1000)
    assert everyone.of(2) == [0.8, 0.8]
    for _ in range(100):
        everyone.observe(judged((8, 8), (8, 2)), ends=())
    first, second, third = everyone.of(3)
    assert first > 0.98 and 0.66 < second < 0.68 and third == second
    own = ConfirmedRates(32, everyone)
    assert own.of(2) == [first, second]
    for _ in range(20):
        own.observe(judged((8, 0)), ends=())
    assert own.of(2)[0] < 0.4 and own.of(2)[1] == second


def test_tokens_behind_an_ending_token_count_for_nothing() -> None:
    rates = [ConfirmedRates(1000) for _ in range(2)]
    rates[0].observe(judged((8, 8), (8, 8)), ends=(9,))
    rates[1].observe(judged((8, 2)), ends=())
    assert rates[0].of(1) == rates[1].of(1)
    assert rates[0].of(2)[1] == rates[0].of(2)[0]


def test_the_most_tokens_a_second_are_chosen() -> None:
    assert expected_tokens((2, 2), (0.5, 0.5)) == 1 + 0.5 + 0.25 + 0.125
    lengths = DraftLengths()
    nearly_full, empty = (
        [
            DraftRound(masks=masks, num_drafted=16 * n, num_judged=32 * n)
            for n, masks in enumerate(((first,), (first, 16)), start=1)
        ]
        for first in (1, 16)
    )
    for _ in range(LEAST_STEPS):
        assert lengths.choose(nearly_full, lengths.rates_of_answer(), num_running=1) == 1
        lengths.seconds.observe(StepLoad(1, 16), 1.0)
    for positions in (32, 64):
        lengths.seconds.observe(StepLoad(1, positions), positions / 16)
    for first, number in ((nearly_full, 2), (empty, 1)):
        assert lengths.choose(first, lengths.rates_of_answer(), num_running=1) == number


@pytest.mark.parametrize("running", [1, 4])
@pytest.mark.parametrize(
    ("cost", "agree", "number"),
    [
        (lambda positions: 1.0, (8, 8, 8), 3),  # positions are free
        (lambda positions: float(positions), (8, 8, 8), 1),  # positions are all
        (lambda positions: 100.0 + positions, (8, 8, 8), 3),
        (lambda positions: 10.0 + positions, (8, 1, 8), 1),
        (lambda positions: 40.0 + positions, (8, 8, 0), 2),
    ],
)
def test_the_choice_is_clear_where_costs_and_drafts_are(
    cost: Callable[[int], float], agree: tuple[int, ...], number: int, running: int
) -> None:
    """By given seconds, whatever number is drafted until then; `agree` are the confirmed tokens of each slot's 8."""
    lengths, rng = DraftLengths(), random.Random(4)
    rates = lengths.rates_of_answer()
    rounds = [DraftRound(masks=(8,) * n, num_drafted=8 * n, num_judged=16 * n) for n in (1, 2, 3)]
    for _ in range(100):
        drafted = rng.randint(1, 3)
        slots = judged(*((8, kept) for kept in agree[:drafted]))
        each = rounds[drafted - 1]
        rates.observe(slots, ends=())
        for positions in (each.num_drafted, each.num_judged):
            load = StepLoad(running, running * positions)
            lengths.seconds.observe(load, cost(positions) * rng.uniform(0.8, 1.25))
    assert lengths.choose(rounds, rates, num_running=running) == number


def test_what_cannot_be_had_is_refused() -> None:
    exact = {"exact": True, "store": "causal", "slots": "measured"}
    for fields, message in (
        ({"buffer_size": 2, "verify": {"slots": "measured"}}, "needs verify.exact=True"),
        ({"verify": exact}, "let buffer_size be 2 or more"),
        ({"buffer_size": 2, "tau_add": 0.5, "verify": exact}, "tau_add=0.5 has no meaning with verify.slots"),
        ({"buffer_size": 2, "verify": {**exact, "slots": "some"}}, "verify.slots"),
    ):
        with pytest.raises(ValueError, match=message):
            decoding_config({}, fields, block_size=B)
    of_model = {"tau_add": 0.5, "tau_m2t": 0.9}
    assert decoding_config(of_model, {"buffer_size": 2, "verify": exact}, block_size=B) == decoding(2)
    drawn = dataclasses.replace(random_requests(1, decoding(2))[0], sampling=Sampling(temperature=1.0))
    with pytest.raises(RequestRefused, match="temperature be 0 instead of 1"):
        engine(build(), buffer_size=2).add(drawn)
    engine(build(), buffer_size=2, batch_invariant=False).add(drawn)
