"""Experts that a rollout recorded and a learner's routers are given: routing replay."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from replayed_answers import answers_of, rollout_request
from small_engines import EXPERTS, build, engine
from torch import Tensor

from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.models.decoder import Decoder
from mbd_core.models.mlp import Router, recorded_experts
from mbd_core.multitf.config import TrainConfig
from mbd_core.multitf.data.example import IGNORE
from mbd_core.multitf.states.answer import ReplayedAnswer
from mbd_core.multitf.states.replay import ReplayBatch, RoutedBatch, replay_batch
from mbd_core.multitf.step.learner import Learner
from mbd_core.multitf.step.objective import OBJECTIVES, PolicyObjective
from mbd_core.multitf.step.policy_loss import log_probabilities

EXACT = 2e-4


def build_routed(**changes: Any) -> Decoder:
    """A model whose two layers both have experts."""
    return build(moe=replace(EXPERTS, first_dense_layers=0, **changes))


def recorded(model: Decoder, method: str = "four slots", count: int = 8, **changes: Any) -> list[ReplayedAnswer]:
    return answers_of(model, [rollout_request(seed, method, experts=True) for seed in range(count)], **changes)


def without_record(answers: list[ReplayedAnswer]) -> list[ReplayedAnswer]:
    return [replace(answer, experts=()) for answer in answers]


def batch_of(answers: list[ReplayedAnswer], **settings: Any) -> ReplayBatch:
    return replay_batch(answers, mask_token_id=0, **settings)


def scores(model: Decoder, batch: ReplayBatch) -> Tensor:
    with torch.no_grad():
        return log_probabilities(model, batch)[0]


def with_other_routers(model: Decoder) -> Decoder:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Router):
                module.weight.add_(torch.randn(module.weight.shape, generator=generator), alpha=0.3)
    return model


CASES: list[tuple[str, dict[str, Any]]] = [
    ("single", {}),
    ("four slots", {}),
    ("two slots", {"batch_invariant": True}),
    ("four slots", {"static_shapes": True, "overlap": True}),
    ("four slots", {"max_rows": 2, "num_pages": 24}),
]


@pytest.mark.parametrize(("method", "changes"), CASES)
def test_with_the_engines_weights_a_record_changes_nothing(method: str, changes: dict[str, Any]) -> None:
    model = build_routed()
    answers = recorded(model, method, **changes)
    batch, free = batch_of(answers), batch_of(without_record(answers))
    assert isinstance(batch, RoutedBatch) and type(free) is ReplayBatch
    assert batch.experts.shape == (*batch.input_ids.shape, 2, EXPERTS.experts_per_token)
    routed = scores(model, batch)
    assert (routed - scores(model, free)).abs().max() < EXACT
    assert (routed - batch.logprobs[batch.labels != IGNORE]).abs().max() < EXACT
    with torch.no_grad(), recorded_experts(model) as calls:  # the router's own choice is the record's
        log_probabilities(model, free)
    chosen = calls[0][0].view(*batch.input_ids.shape, -1).sort(-1).values
    is_there = batch.stream >= 0
    assert torch.equal(chosen[is_there], batch.experts[..., 0, :].sort(-1).values.long()[is_there])


def test_other_routers_compute_the_recorded_experts_with_weights_of_their_own() -> None:
    model = build_routed()
    answers = recorded(model)
    batch, free = batch_of(answers), batch_of(without_record(answers))
    before = scores(model, batch)
    with_other_routers(model)
    with torch.no_grad(), recorded_experts(model) as calls:
        routed = log_probabilities(model, batch)[0]
    assert isinstance(batch, RoutedBatch)
    assert torch.equal(calls[0][0], batch.experts[..., 0, :].flatten(0, 1).long())
    with torch.no_grad(), recorded_experts(model) as own_calls:
        unrouted = log_probabilities(model, free)[0]
    assert (own_calls[0][0].sort(-1).values != calls[0][0].sort(-1).values).any(-1).float().mean() > 0.2
    assert (routed - unrouted).abs().max() > 100 * EXACT
    assert (routed - before).abs().max() > EXACT, "the weights of the experts are the learner's"


def test_routers_learn_under_a_record_and_packing_and_recomputation_keep_it() -> None:
    config = TrainConfig(
        steps=2, batch_size=8, lr=1e-3, optimizer="adamw", schedule="constant", precision="float32", micro_batch=2
    )
    answers = recorded(build_routed())
    reports, weights = [], []
    for changes in ({}, {"pack": 400}, {"activation_checkpointing": True}):
        model = with_other_routers(build_routed())
        before = [m.weight.detach().clone() for m in model.modules() if isinstance(m, Router)]
        learner = Learner(model, replace(config, **changes), OBJECTIVES["reinforce"])
        reports.append(learner.update(answers))
        weights.append([m.weight.detach() for m in model.modules() if isinstance(m, Router)])
        assert all(not torch.equal(old, new) for old, new in zip(before, weights[-1], strict=True))
    for report in reports[1:]:
        assert report.loss == pytest.approx(reports[0].loss, abs=1e-5)
        assert report.d_max == pytest.approx(reports[0].d_max, abs=1e-4)
        assert report.grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-3)
    unrouted = Learner(with_other_routers(build_routed()), config, OBJECTIVES["reinforce"]).update(
        without_record(answers)
    )
    assert abs(unrouted.d_mean - reports[0].d_mean) > 100 * EXACT


def test_a_frozen_reference_is_scored_under_the_record_too() -> None:
    """It is the policy still, so the divergence is 0; scored with its own experts it would not be."""
    config = TrainConfig(steps=1, batch_size=8, lr=0.0, optimizer="adamw", schedule="constant", precision="float32")
    answers, model = recorded(build_routed()), with_other_routers(build_routed())
    learner = Learner(model, config, PolicyObjective(kl=0.1))
    assert learner.update(answers).kl_reference == pytest.approx(0.0, abs=1e-6)
    free = scores(model, batch_of(without_record(answers))) - scores(model, batch_of(answers))
    assert (free.exp() - 1 - free).mean() > 1e-3


def test_blocks_that_choose_together_are_recorded_alike() -> None:
    model = build_routed(expert_capacity=4, num_groups=1, topk_groups=1)
    answers = recorded(model)
    batch = batch_of(answers)
    assert isinstance(batch, RoutedBatch)
    assert (scores(model, batch) - batch.logprobs[batch.labels != IGNORE]).abs().max() < EXACT


def test_a_record_has_the_tokens_of_every_forward_and_of_no_other_request() -> None:
    model = build_routed()
    requests = [rollout_request(seed, "four slots", experts=seed < 2) for seed in range(4)]
    outputs = engine(model).generate(requests)
    plain = engine(model).generate([replace(request, experts=False) for request in requests])
    assert [o.tokens for o in outputs] == [o.tokens for o in plain]
    for number, output in enumerate(outputs):
        assert output.piece.steps is not None
        records = output.experts
        assert bool(records) == (number < 2)
        forwards = [record.forward for record in records if record.forward]
        assert forwards == (list(range(1, output.counts.num_forwards + 1)) if records else [])
        assert all(r.ids.dtype.name == "uint8" and r.ids.max() < EXPERTS.num_experts for r in records)


def test_what_cannot_be_recorded_or_replayed_is_refused() -> None:
    model = build_routed()
    request = rollout_request(0, "four slots", experts=True)
    with pytest.raises(RequestRefused):
        engine(build()).add(request)
    with pytest.raises(RequestRefused):
        engine(model).add(replace(request, rollout=False))
    with pytest.raises(RequestRefused):
        engine(model).add(replace(request, max_tokens=20, committed=(5,)))
    answers = recorded(model, count=2)
    with pytest.raises(ValueError, match="shrink=1"):
        batch_of(answers, shrink=2)
    with pytest.raises(ValueError, match="1 of 2 answers"):
        batch_of([answers[0], *without_record(answers[1:])])
    kept = tuple(record for record in answers[0].experts if record.forward != 1)
    cut = replace(answers[0], experts=kept)
    with pytest.raises(ValueError, match="its record is not whole"):
        batch_of([cut])
