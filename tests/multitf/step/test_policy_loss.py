"""The objectives of reinforcement learning against sums in plain Python, token by token."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from statistics import fmean
from typing import Any

import pytest
import torch
from replayed_answers import answers_of, rollout_request
from small_engines import MASK, build
from torch import Tensor

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.data.example import IGNORE
from mbd_core.multitf.states.answer import ReplayedAnswer
from mbd_core.multitf.states.batch import MultiTFBatch
from mbd_core.multitf.states.replay import ReplayBatch, replay_batch
from mbd_core.multitf.step.loss import multitf_loss
from mbd_core.multitf.step.objective import OBJECTIVES, PolicyObjective
from mbd_core.multitf.step.policy_loss import MAXIMA, SUMS, log_probabilities, objective_loss, policy_loss
from mbd_core.multitf.step.policy_weights import Totals, weighed

Token = dict[str, float]
"""One label: its `lp`, `old`, `ref`, advantage `a`, whether it is `correct`, and its `answer` and `state`."""


@pytest.fixture(scope="module")
def model() -> Decoder:
    return build()


@pytest.fixture(scope="module")
def answers(model: Decoder) -> list[ReplayedAnswer]:
    return answers_of(model, [rollout_request(seed, "four slots") for seed in range(8)])


@pytest.fixture(scope="module")
def batch(answers: list[ReplayedAnswer]) -> ReplayBatch:
    """The answers' states, with an old policy and a reference of their own."""
    made = replay_batch(answers, mask_token_id=MASK, together=[[0, 3, 1], [2], [4, 5], [6, 7]])
    generator = torch.Generator().manual_seed(1)
    old, reference = (0.4 * torch.randn(made.old.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return replace(made, old=made.old + old, reference=made.reference + reference)


def tokens_of(batch: ReplayBatch, logprobs: Tensor) -> list[Token]:
    """The labels, row by row."""
    names = {"old": "old", "ref": "reference", "a": "advantage", "correct": "correct", "rollout": "logprobs"}
    columns = {key: getattr(batch, name)[batch.labels != IGNORE].tolist() for key, name in names.items()}
    columns |= {"lp": logprobs.tolist()}
    for key, name in (("answer", "sample"), ("state", "stream")):
        columns[key] = getattr(batch, name)[batch.labels != IGNORE].tolist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def mean_over_answers(tokens: list[Token], term: Callable[[Token], float]) -> float:
    answers = {t["answer"] for t in tokens}
    return fmean(fmean(term(t) for t in tokens if t["answer"] == answer) for answer in answers)


def mean_over_tokens(tokens: list[Token], term: Callable[[Token], float]) -> float:
    return fmean(map(term, tokens))


def mean_over_states(tokens: list[Token], term: Callable[[Token], float]) -> float:
    """TraceRL: each state's sum by the longest answer, the mean over all states."""
    longest = max(sum(t["answer"] == answer for t in tokens) for answer in {t["answer"] for t in tokens})
    states = {(t["answer"], t["state"]) for t in tokens}
    return fmean(sum(term(t) for t in tokens if (t["answer"], t["state"]) == state) / longest for state in states)


def mean_over_transitions(tokens: list[Token], term: Callable[[Token], float]) -> float:
    """CJ-GRPO: the mean over a transition's tokens, over an answer's transitions, over answers."""
    values = []
    for answer in {t["answer"] for t in tokens}:
        own = [t for t in tokens if t["answer"] == answer]
        values.append(fmean(fmean(term(t) for t in own if t["state"] == s) for s in {t["state"] for t in own}))
    return fmean(values)


MEANS = {
    "answers": mean_over_answers,
    "tokens": mean_over_tokens,
    "states": mean_over_states,
    "transitions": mean_over_transitions,
}


def expected_loss(tokens: list[Token], objective: PolicyObjective) -> float:
    def surrogate(t: Token) -> float:
        a, ratio = t["a"], math.exp(t["lp"] - t["old"])
        weight = 1.0
        if objective.correction is not None:
            weight = min(math.exp(t["old"] - t["rollout"]), objective.correction)
        if objective.kind == "reinforce":
            return -a * t["lp"] * weight
        low = objective.clip or 0.2
        gain = min(ratio * a, max(1 - low, min(1 + (objective.clip_high or low), ratio)) * a)
        if objective.dual_clip is not None and a < 0:
            gain = max(gain, objective.dual_clip * a)
        return -gain * weight

    def kl(t: Token) -> float:
        other = t["old"] if objective.kl_to == "old" else t["ref"]
        return math.exp(other - t["lp"]) - 1 - (other - t["lp"])

    mean = MEANS[objective.aggregation]
    of_kl = mean if objective.kl_aggregation == "policy" else mean_over_tokens
    right = [t for t in tokens if t["correct"]]
    total = mean(tokens, surrogate) + objective.kl * of_kl(tokens, kl)
    return total - (objective.nll * fmean(t["lp"] for t in right) if objective.nll else 0.0)


CASES: dict[str, PolicyObjective] = dict(OBJECTIVES) | {
    f"{kind} {aggregation}": PolicyObjective(kind=kind, aggregation=aggregation)
    for kind in ("reinforce", "clipped")
    for aggregation in ("answers", "tokens", "states", "transitions")
}
CASES["all"] = PolicyObjective(
    kind="clipped", clip=0.1, clip_high=0.28, dual_clip=1.2, correction=1.1, kl=0.3, kl_to="old", nll=0.7
)


@pytest.mark.parametrize("name", CASES)
def test_an_objective_is_its_sum_in_plain_python(model: Decoder, batch: ReplayBatch, name: str) -> None:
    objective = CASES[name]
    ready = weighed(batch, objective, Totals.of(batch))
    with torch.no_grad():
        logprobs, _ = log_probabilities(model, ready)
    loss, _ = policy_loss(model, ready, objective)
    assert loss.item() == pytest.approx(expected_loss(tokens_of(ready, logprobs), objective), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", ["reinforce", "TraceRL", "CJ-GRPO", "LightningRL", "all"])
def test_its_gradient_is_that_of_the_sum(batch: ReplayBatch, name: str) -> None:
    objective = CASES[name]
    ready = weighed(batch, objective, Totals.of(batch))
    at = ready.logprobs[ready.labels != IGNORE] + 0.05
    variable = at.clone().requires_grad_()
    loss, _ = objective_loss(variable, torch.zeros_like(at), ready, objective)
    (gradient,) = torch.autograd.grad(loss, variable)
    for place in range(0, len(at), 9):
        tokens = tokens_of(ready, at)
        values = []
        for change in (1e-6, -1e-6):
            tokens[place]["lp"] = at[place].item() + change
            values.append(expected_loss(tokens, objective))
        assert gradient[place].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4, abs=1e-8)


def test_with_the_old_weights_all_objectives_have_one_gradient(model: Decoder, batch: ReplayBatch) -> None:
    gradients = []
    for objective in (PolicyObjective(), PolicyObjective(kind="clipped", clip=0.01, dual_clip=1.5)):
        ready = weighed(batch, objective, Totals.of(batch))
        loss, numbers = policy_loss(model, ready, objective, is_old=True)
        gradients.append(torch.autograd.grad(loss, model.lm_head.weight)[0])
        assert dict(zip((*MAXIMA, *SUMS), numbers.tolist(), strict=True))["clipped"] == 0
    assert torch.allclose(*gradients, atol=1e-7)


def test_reinforce_on_equal_advantages_is_multitfs_loss(model: Decoder, batch: ReplayBatch) -> None:
    ones = replace(batch, advantage=torch.ones_like(batch.advantage))
    expected, _ = multitf_loss(model, MultiTFBatch(*(getattr(ones, f.name) for f in fields(MultiTFBatch))))
    loss, _ = policy_loss(model, weighed(ones, PolicyObjective(), Totals.of(ones)), PolicyObjective())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_numbers_beside_a_loss(model: Decoder, batch: ReplayBatch) -> None:
    objective = PolicyObjective(kind="clipped", dual_clip=1.2, kl=0.1)
    ready = weighed(batch, objective, Totals.of(batch))
    logprobs, entropy = (t.detach() for t in log_probabilities(model, ready))
    shifted = logprobs + torch.linspace(-0.5, 0.5, len(logprobs))
    _, found = objective_loss(shifted, entropy, ready, objective)
    numbers = dict(zip((*MAXIMA, *SUMS), found.tolist(), strict=True))
    tokens = tokens_of(ready, shifted)
    d = [t["lp"] - t["rollout"] for t in tokens]
    ratios = [math.exp(t["lp"] - t["old"]) for t in tokens]
    clipped = [
        (t["a"] > 0 and r > 1.2) or (t["a"] < 0 and (r < 0.8 or r > 1.2)) for t, r in zip(tokens, ratios, strict=True)
    ]
    expected: dict[str, Any] = {
        "labels": len(d),
        "d_abs": sum(map(abs, d)),
        "d_large": sum(abs(x) > 0.1 for x in d),
        "d_k3": sum(math.exp(x) - 1 - x for x in d),
        "d_max": max(map(abs, d)),
        "weight": sum(map(math.exp, d)),
        "weight_squared": sum(math.exp(2 * x) for x in d),
        "ratio": sum(ratios),
        "ratio_max": max(ratios),
        "clipped": sum(clipped),
        "entropy": float(entropy.sum()),
    }
    assert 0 < sum(clipped) < len(d)
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    for parts in ("slot", "forward"):
        assert sum(v for n, v in numbers.items() if n.startswith(f"labels_{parts}")) == len(d)
        assert sum(v for n, v in numbers.items() if n.startswith(f"d_abs_{parts}")) == pytest.approx(sum(map(abs, d)))


def test_an_entropy_is_of_the_whole_distribution(model: Decoder, batch: ReplayBatch) -> None:
    _, entropy = log_probabilities(model, batch)
    assert entropy.min() > 0 and entropy.max() < math.log(model.config.vocab_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dual_clip": 3.0}, "no ratio to clip"),
        ({"clip": 0.2}, "no ratio to clip"),
        ({"old": "rollout", "kl": 0.1}, "old=rollout has no effect: kind=reinforce has no ratio"),
        ({"kl_to": "old"}, "kl=0 leaves it out"),
        ({"kl_aggregation": "policy"}, "kl=0 leaves it out"),
        ({"kind": "clipped", "dual_clip": 0.9}, "above 1"),
        ({"old": "rollout", "correction": 2.0}, "give old=learner"),
        ({"aggregation": "words"}, "one of"),
    ],
)
def test_objectives_that_contradict_themselves_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyObjective(**changes)
