"""A learner's update: the same from the same rollouts, computed in whichever parts; its weights go to engines."""

import io
import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from replayed_answers import answers_of, replayed, rollout_request
from small_engines import B, build, engine

from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import LoraSettings, TrainConfig
from mbd_core.multitf.states.answer import ReplayedAnswer
from mbd_core.multitf.states.replay_cost import replay_cost
from mbd_core.multitf.step.learner import Learner, LearnerReport
from mbd_core.multitf.step.objective import OBJECTIVES, PolicyObjective

CONFIG = TrainConfig(
    steps=50, batch_size=8, lr=2e-3, warmup=1, optimizer="adamw", schedule="constant", precision="float32"
)
LORA = LoraSettings(rank=4, alpha=8, dropout=0.0)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Sums in one order, so that equal means equal."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def answers() -> list[ReplayedAnswer]:
    return answers_of(build(), [rollout_request(seed, "four slots") for seed in range(8)])


def learner(
    objective: PolicyObjective = OBJECTIVES["LightningRL"], model: Decoder | None = None, **train: Any
) -> Learner:
    return Learner(model or build(), replace(CONFIG, **train), objective)


def gist(report: LearnerReport) -> dict[str, float]:
    return {name: number for name, number in report.point().items() if name != "seconds"}


def test_a_report_says_what_was_learned_from(answers: list[ReplayedAnswer]) -> None:
    report = learner().update(answers)
    cost = [replay_cost(answer) for answer in answers]
    assert report.answers == 8 and report.labels == sum(len(answer.steps) for answer in answers)
    assert report.tokens == sum(c.tokens for c in cost) < report.positions
    assert report.forwards == sum(c.forwards for c in cost)
    assert report.trace_rl_tokens == sum(c.trace_rl for c in cost)
    assert report.d_mean < report.d_max < 2e-4 and report.d_share == 0 and report.d_k3 < 1e-7
    assert report.effective_share == pytest.approx(1, abs=1e-6)
    assert report.ratio_mean == report.ratio_max == 1 and report.clip_share == 0
    assert report.kl_reference == pytest.approx(0, abs=1e-8) and report.kl_old == 0
    assert set(report.d_parts) >= {"slot_1", "slot_2", "forward_1_2"}
    assert report.grad_norm > 0 and report.tflop > 0
    assert report.loss == pytest.approx(report.policy_loss + 0.01 * report.kl_loss + 0.1 * report.nll_loss)
    assert all(math.isfinite(number) for number in report.point().values())


@pytest.mark.parametrize("name", ["TraceRL", "LightningRL"])
def test_parts_of_an_update_are_the_update(answers: list[ReplayedAnswer], name: str) -> None:
    """In float64: AdamW divides a gradient by its own size, and so it multiplies the rounding of a small one."""
    reports, weights = [], []
    for train in ({}, {"micro_batch": 3}, {"pack": 900, "micro_batch": 2}):
        one = learner(OBJECTIVES[name], build().double(), **train)
        one.update(answers)
        reports.append(gist(one.update(answers)))
        weights.append(one.weights())
    for report, tensors in zip(reports[1:], weights[1:], strict=True):
        for number in ("loss", "policy_loss", "nll_loss", "grad_norm", "entropy", "d_mean"):
            assert report[number] == pytest.approx(reports[0][number], rel=1e-4, abs=1e-7), number
        assert all(torch.allclose(tensors[n], weights[0][n], atol=2e-5) for n in tensors)
    assert reports[2]["positions"] < reports[0]["positions"]


@pytest.mark.parametrize("name", ["TraceRL", "LightningRL"])
def test_an_update_is_that_under_a_dense_mask(answers: list[ReplayedAnswer], name: str) -> None:
    one, other = (learner(OBJECTIVES[name], **train) for train in ({}, {"attention": "dense"}))
    assert (one.attention.kind, other.attention.kind) == ("streams", "dense")
    report, wanted = (gist(each.update(answers)) for each in (one, other))
    assert report == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("train", [{}, {"optimizer": "muon"}, {"lora": LORA}])
def test_an_update_is_deterministic_and_a_resumed_learner_goes_on_bit_for_bit(
    answers: list[ReplayedAnswer], train: dict[str, Any]
) -> None:
    through = learner(**train)
    expected = [gist(through.update(answers)) for _ in range(4)]
    first = learner(**train)
    reports = [gist(first.update(answers)) for _ in range(2)]
    state, file = first.state_dict(), io.BytesIO()
    reports.append(gist(first.update(answers)))  # what goes on does not change the state
    torch.save(state, file)
    file.seek(0)
    second = learner(**train)
    second.load_state_dict(torch.load(file, weights_only=True))
    reports[2:] = [gist(second.update(answers)) for _ in range(2)]
    assert reports == expected
    assert all(torch.equal(t, second.weights()[name]) for name, t in through.weights().items())


def test_a_state_with_another_reference_is_refused(answers: list[ReplayedAnswer]) -> None:
    one = learner()
    one.update(answers)
    changed = build()
    changed.load_state_dict(one.weights())
    with pytest.raises(ValueError):
        learner(model=changed).load_state_dict(one.state_dict())


@pytest.mark.parametrize("train", [{}, {"lora": LORA}])
def test_a_divergence_from_the_reference_is_from_the_model_of_the_beginning(
    answers: list[ReplayedAnswer], train: dict[str, Any]
) -> None:
    one = learner(PolicyObjective(kl=0.01), **train)
    values = [one.update(answers).kl_reference for _ in range(4)]
    assert values[0] == pytest.approx(0, abs=1e-7)
    assert values[1] is not None and 1e-6 < values[1] < values[3]


def test_more_passes_have_the_ratios_of_the_first_ones_weights(answers: list[ReplayedAnswer]) -> None:
    one = learner(PolicyObjective(kind="clipped", clip=0.05, passes=3))
    report = one.update(answers)
    assert one.step_number == 3 and report.d_max < 2e-4
    assert report.ratio_max > 1.05 and report.clip_share > 0
    from_rollout = learner(PolicyObjective(kind="clipped", clip=0.05, passes=3, old="rollout"))
    assert from_rollout.update(answers).loss == pytest.approx(report.loss, abs=1e-4)


@pytest.mark.parametrize("train", [{}, {"lora": LORA}])
def test_an_engine_with_the_learners_weights_says_what_the_learner_says(train: dict[str, Any]) -> None:
    requests = [rollout_request(seed, "four slots") for seed in range(8)]
    served = engine(build())
    one = learner(PolicyObjective(), lr=0.01, **train)
    for _ in range(2):
        outputs = served.generate(requests)
        report = one.update([replayed(*pair) for pair in zip(requests, outputs, strict=True)])
        assert report.d_max < 2e-4
        served.update_weights(one.weights().items())
    stale = one.update([replayed(*pair) for pair in zip(requests, outputs, strict=True)])
    assert stale.d_mean > 0.01 and stale.effective_share < 0.999


def test_a_reward_rises(answers: list[ReplayedAnswer]) -> None:
    """Rollouts by one engine, advantages of each group, an update, the weights back: even tokens are rewarded."""
    served, one = engine(build(), max_rows=16), learner(PolicyObjective(), lr=0.02)
    shares = []
    for step in range(8):
        requests = [
            rollout_request(
                seed, "four slots", max_tokens=3 * B, ignore_eos=True, stop_token_ids=(),
                sampling=Sampling(temperature=1.0, seed=100 * step + seed),
            )
            for seed in range(16)
        ]  # fmt: skip
        outputs = served.generate(requests)
        rewards = [sum(token % 2 == 0 for token in output.tokens) / len(output.tokens) for output in outputs]
        mean = sum(rewards) / len(rewards)
        shares.append(mean)
        batch = [
            replayed(request, output, advantage=reward - mean)
            for request, output, reward in zip(requests, outputs, rewards, strict=True)
        ]
        one.update(batch)
        served.update_weights(one.weights().items())
    assert sum(shares[-2:]) / 2 > sum(shares[:2]) / 2 + 0.2


def test_what_a_learner_cannot_honour_is_refused(answers: list[ReplayedAnswer]) -> None:
    one = learner()
    before = deepcopy(one.weights())
    with pytest.raises(ValueError):
        one.update([])
    assert all(torch.equal(t, before[name]) for name, t in one.weights().items())
    with pytest.raises(ValueError, match="give dropout 0"):
        learner(lora=replace(LORA, dropout=0.1))
    with pytest.raises(ValueError, match="distillation"):
        learner(lora=LORA, distillation="student_teacher")
