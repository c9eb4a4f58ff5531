"""Two workers of a learner over gloo make the update of one, replicated, sharded, or sharing every layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_workers import started
from learner_pair import CASES, learned, learner
from replayed_answers import answers_of, rollout_request
from small_engines import build

from mbd_core.multitf.states.answer import ReplayedAnswer

LIMIT = 240.0
CLOSE = {"rel": 1e-3, "abs": 2e-5}
"""Workers add up in another order than one does, and an optimizer's first steps are large for small gradients."""
NUMBERS = (
    "loss", "policy_loss", "kl_loss", "nll_loss", "grad_norm", "entropy", "d_mean", "kl_old", "labels", "tokens",
    "forwards", "trace_rl_tokens", "effective_share",
)  # fmt: skip


@pytest.fixture(scope="module")
def answers() -> list[ReplayedAnswer]:
    """An odd number of them: one worker has fewer."""
    return answers_of(build(), [rollout_request(seed, "four slots") for seed in range(7)])


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, answers: list[ReplayedAnswer]) -> Path:
    out = tmp_path_factory.mktemp("learner")
    torch.save(answers, out / "answers.pt")
    with started("learner_pair.py", str(out)) as workers:
        assert [worker.wait(LIMIT) for worker in workers] == [0, 0]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_workers_make_the_update_of_one(together: Path, answers: list[ReplayedAnswer], name: str) -> None:
    alone: dict[str, Any] = learned(name, answers)
    pair: dict[str, Any] = torch.load(together / f"{name}.pt", weights_only=True)
    for one, two in zip(alone["reports"], pair["reports"], strict=True):
        assert {n: two[n] for n in NUMBERS} == pytest.approx({n: one[n] for n in NUMBERS}, **CLOSE)
        assert two["d_max"] == pytest.approx(one["d_max"], rel=0.05, abs=1e-5)
    for tensor_name, tensor in alone["weights"].items():
        assert torch.allclose(pair["weights"][tensor_name], tensor, atol=2e-4), tensor_name
    for results in (alone, pair):
        results["expected"].pop("seconds"), results["found"].pop("seconds")
        assert results["found"] == results["expected"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_state_of_two_workers_is_one_s(together: Path, answers: list[ReplayedAnswer], name: str) -> None:
    pair = torch.load(together / f"{name}.pt", weights_only=True)
    one = learner(name)
    one.load_state_dict(pair["state"])
    assert all(torch.equal(t, pair["weights"][n]) for n, t in one.weights().items())
    report = one.update(answers).point()
    assert {n: report[n] for n in NUMBERS} == pytest.approx({n: pair["found"][n] for n in NUMBERS}, **CLOSE)
