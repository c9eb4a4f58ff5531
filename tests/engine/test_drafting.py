"""The mode by load: steps and drafts are measured, the better mode is chosen, the other one is tried now and then."""

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from small_engines import B, build, request
from torch import Tensor

from mbd_core.decoding.blocks.causal_config import Causal, Thinking
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.schedule import drafting
from mbd_core.engine.schedule.drafting import (
    LEAST_STEPS,
    LEAST_VERIFIED,
    STEPS_OF_A_DRAFT,
    DraftChoices,
    DraftedStep,
    Drafting,
)
from mbd_core.engine.schedule.forward_seconds import StepLoad
from mbd_core.engine.step.batch import Batch
from mbd_core.models.decoder import Decoder, init_weights

LENGTH = 8
Cost = Callable[[StepLoad], float]


def by_rows(load: StepLoad) -> float:
    """A machine on which positions cost nothing."""
    return 1.0 + 0.01 * load.rows


def by_positions(load: StepLoad) -> float:
    return 0.01 + load.positions + load.prompt_tokens


def bent(load: StepLoad) -> float:
    """Positions cost nothing up to 64 of them."""
    return 1.0 + 0.1 * max(0, load.positions - 64)


class Server:
    """Steps of `rows` requests without a model, which draft together; each verified draft gives `accepted` tokens."""

    def __init__(self, cost: Cost, *, accepted: float, seed: int = 0) -> None:
        self.drafting, self.cost, self.accepted = Drafting(), cost, accepted
        self.rng, self.verifies = random.Random(seed), False

    def serve(self, rows: int, steps: int, *, prompt_tokens: int = 0, joining: int = 0) -> tuple[int, float, float]:
        """Steps that drafted or verified, tokens, seconds; `prompt_tokens` are stored beside each. The choice does not
        count requests that are `joining`."""
        drafted, tokens, seconds = 0, 0.0, 0.0
        for _ in range(steps):
            drafted_load, single_load = (StepLoad(rows, n, prompt_tokens) for n in (rows * LENGTH, rows))
            loads = (StepLoad(rows - joining, n * (rows - joining)) for n in (LENGTH, 1))
            choices = DraftChoices(**dict(zip(("drafts", "single"), loads, strict=True)), number=rows - joining)
            chosen, verifies = self.drafting.choose(choices), self.verifies
            assert chosen == self.drafting.choose(choices), "asking changes nothing"
            drafts = verifies or chosen
            self.verifies = drafts and not verifies
            load = drafted_load if drafts else single_load
            step = DraftedStep(
                load=load,
                single=0 if drafts else rows,
                drafts=rows if drafts else 0,
                verified=rows if verifies else 0,
                tokens=int(rows * self.accepted + self.rng.random()) if verifies else 0,
            )
            self.drafting.observe(step, self.cost(load) * self.rng.uniform(0.8, 1.25))
            tokens += step.tokens if drafts else rows
            drafted, seconds = drafted + drafts, seconds + self.cost(load)
        return drafted, tokens, seconds

    def against_best(self, rows: int, steps: int) -> tuple[float, int]:
        """Tokens a second over those of the better mode alone, and the steps in a mode that loses 5 %."""
        drafted, tokens, seconds = self.serve(rows, steps)
        single = rows / self.cost(StepLoad(rows, rows))
        drafts = rows * self.accepted / STEPS_OF_A_DRAFT / self.cost(StepLoad(rows, rows * LENGTH))
        best, wrong = max(single, drafts), drafted if single > drafts else steps - drafted
        return tokens / seconds / best, 0 if min(single, drafts) > 0.95 * best else wrong


COSTS = pytest.mark.parametrize("cost", [by_rows, by_positions, bent])
ACCEPTED = pytest.mark.parametrize("accepted", [1.1, 2.0, 4.0, 8.0])
LOADS = (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize(
    ("cost", "accepted"),
    [
        pytest.param(cost, accepted, marks=pytest.mark.slow if (number + place) % 2 else ())
        for number, cost in enumerate((by_rows, by_positions, bent))
        for place, accepted in enumerate((1.1, 2.0, 4.0, 8.0))
    ],
)
def test_the_better_mode_is_found_at_every_load(cost: Cost, accepted: float) -> None:
    """Whatever a machine's positions cost and whatever drafts yield, and when the load changes at once."""
    server = Server(cost, accepted=accepted)
    for rows in (*LOADS, 1, 48, 5):
        server.serve(rows, 80 if rows == 1 else 16)
        assert server.against_best(rows, 400)[0] > 0.95, rows


@COSTS
@ACCEPTED
@pytest.mark.parametrize("rows", LOADS)
def test_a_fresh_engine_has_chosen_when_few_rows_are_verified(cost: Cost, accepted: float, rows: int) -> None:
    """It drafts until then: the more requests run, the shorter. Then few steps are in the mode that loses."""
    server, steps = Server(cost, accepted=accepted), STEPS_OF_A_DRAFT * -(-LEAST_VERIFIED // rows)
    assert server.serve(rows, steps)[0] == steps
    share, wrong = server.against_best(rows, 200)
    assert share > 0.95 and wrong <= 8


def test_both_modes_stay_measured_and_a_change_of_text_is_noticed() -> None:
    server = Server(by_rows, accepted=6.0)
    server.serve(8, 200)
    drafted, _, _ = server.serve(8, 1000)
    assert 900 < drafted < 1000, "single tokens are tried, and seldom"
    server.accepted = 1.5
    server.serve(8, 400)
    drafted, _, _ = server.serve(8, 1000)
    assert 0 < drafted < 100
    server.accepted = 6.0
    server.serve(8, 400)
    assert server.serve(8, 1000)[0] > 900


def test_requests_that_join_at_each_step_bring_no_tries() -> None:
    """The choice is made before they do: it never sees the load that is measured."""
    server = Server(by_positions, accepted=2.0)
    server.serve(8, 100)
    assert server.serve(8, 200, joining=1)[0] <= STEPS_OF_A_DRAFT


def test_beside_long_prompts_the_other_mode_is_tried_as_seldom() -> None:
    server = Server(lambda load: 0.01 + 1e-4 * load.positions + 2e-5 * load.prompt_tokens, accepted=2.4)
    server.serve(16, 1000)
    assert server.serve(16, 1000, prompt_tokens=512)[0] < 100


def test_one_slow_step_changes_nothing() -> None:
    server = Server(by_positions, accepted=4.0)
    server.serve(4, 100)
    choices = DraftChoices(drafts=StepLoad(4, 4 * LENGTH), single=StepLoad(4, 4), number=4)
    server.drafting.observe(DraftedStep(load=choices.single, single=4, drafts=0, verified=0, tokens=0), 1e4)
    assert server.serve(4, LEAST_STEPS - 1)[0] <= STEPS_OF_A_DRAFT


def test_a_rank_that_follows_does_as_rank_0() -> None:
    follower = Server(by_positions, accepted=2.0)
    follower.serve(8, 100)
    for drafts in (True, False):
        follower.drafting.follow(drafts)
        follower.serve(8, 1)
        assert follower.serve(8, 50)[0] == 50 * drafts


# In an engine whose forwards take the time that a fake clock says.


@pytest.fixture(scope="module")
def model() -> Decoder:
    model = build("NemotronLabsDiffusionModel", attention="causal", qk_norm=False)
    init_weights(model, seed=3, std=0.3)
    with torch.no_grad():
        model.lm_head.weight[0] = 0.0
    return model


class Clock:
    def __init__(self, cost: Cost) -> None:
        self.now, self.cost, self.loads = 0.0, cost, list[StepLoad]()

    def __call__(self) -> float:
        return self.now

    def watch(self, engine: Engine) -> None:
        forward = engine.runner.forward

        def timed(batch: Batch) -> Tensor:
            self.loads.append(StepLoad(len(batch.kv_lens_K), len(batch.input_ids_T)))
            self.now += self.cost(self.loads[-1])
            return forward(batch)

        engine.runner.forward = timed  # type: ignore[method-assign]


def asked(number: int, **changes: object) -> list[Request]:
    decoding = DecodingConfig(block_size=B, causal=Causal(block_length=LENGTH))
    fields = {"decoding": decoding, "prompt": (5, 6, 7), "max_tokens": 60, "ignore_eos": True, "logprobs": False}
    return [request(f"r{i}", i, "ar", **(fields | {"prompt": (5, 6, 7 + i)} | changes)) for i in range(number)]


def served(model: Decoder, cost: Cost, requests: list[Request], **changes: object) -> tuple[list[object], Clock]:
    sizes = {"max_rows": 4, "num_pages": 150, "page_size": 8, "batch_invariant": False, "block_budget": 4}
    clock = Clock(cost)
    engine = Engine(model, EngineConfig(**(sizes | changes)), clock=clock)  # type: ignore[arg-type]
    clock.watch(engine)
    return [(o.tokens, o.finish_reason) for o in engine.generate(requests)], clock


def test_an_engine_drafts_where_it_pays_and_gives_the_same_tokens(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request and four at once, with drafts that hardly agree and drafts that do, on two machines."""
    monkeypatch.setattr(drafting, "LEAST_VERIFIED", 4)
    agrees = build("NemotronLabsDiffusionModel", attention="causal", qk_norm=False)
    with torch.no_grad():
        agrees.lm_head.weight.zero_()  # every token is the same
    late = slice(LEAST_STEPS, None)
    for number, (drafter, cost, pays) in itertools.product(
        (1, 4), ((model, by_positions, False), (agrees, by_positions, False), (agrees, by_rows, True))
    ):
        requests = asked(number, max_tokens=100)
        wanted, always = served(drafter, cost, requests, block_budget=None)
        answers, clock = served(drafter, cost, requests)
        assert answers == wanted
        shares = [sum(x.positions > x.rows for x in c.loads[late]) / len(c.loads[late]) for c in (clock, always)]
        assert shares[1] == 1.0 and (shares[0] > 0.8 if pays else shares[0] < 0.2)
        assert clock.now < 1.2 * always.now if pays else clock.now < 0.8 * always.now


def test_requests_that_decode_soon_count_as_if_they_did(model: Decoder) -> None:
    """A draft of one request is verified beside three more, which wait for their prompts."""
    sizes = {"max_rows": 4, "num_pages": 150, "page_size": 8, "batch_invariant": False, "block_budget": 4}
    engine = Engine(model, EngineConfig(**sizes))  # type: ignore[arg-type]
    first, *others = asked(5)
    engine.add(first)
    while engine.counts.forwards["decode"] < 3:
        engine.step()
    seen, choose = list[DraftChoices](), engine.drafting.choose  # type: ignore[union-attr]
    engine.drafting.choose = lambda choices: seen.append(choices) or choose(choices)  # type: ignore[union-attr]
    for other in others:
        engine.add(other)
    engine.step()
    assert seen == [DraftChoices(drafts=StepLoad(4, 4 * LENGTH), single=StepLoad(4, 4), number=4)]


def test_the_choice_is_of_requests_that_lose_nothing_by_it(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of one that declines, nor of one whose thinking is ended by another rule with drafts."""
    monkeypatch.setattr(drafting, "LEAST_VERIFIED", 4)
    (plain,) = asked(1)
    causal = Causal(block_length=LENGTH, thinking=Thinking(budget=100, end_token_id=9))
    kept = DecodingConfig(block_size=B, causal=Causal(block_length=LENGTH), adaptive=False)
    for decoding in (kept, DecodingConfig(block_size=B, causal=causal)):
        (r,) = asked(1, decoding=decoding)
        _, clock = served(model, by_positions, [r])
        assert all(load.positions == LENGTH for load in clock.loads[2:])
    _, clock = served(model, by_positions, [plain])
    assert any(load.positions == 1 for load in clock.loads[2:])
