"""The weights of labels in an objective's sums, which define its means."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mbd_core.multitf.data.example import IGNORE
from mbd_core.multitf.states.replay import ReplayBatch
from mbd_core.multitf.step.objective import PolicyObjective


@dataclass(frozen=True)
class Totals:
    """Sums over an update's answers on all workers; `longest` is the largest number of labels in an answer."""

    answers: int
    states: int
    tokens: int
    correct_tokens: int
    longest: int

    @classmethod
    def of(cls, batch: ReplayBatch) -> "Totals":
        is_label = batch.labels != IGNORE
        return cls(
            answers=len(batch.sample[is_label].unique()),
            states=len(_states(batch).unique()),
            tokens=int(is_label.sum()),
            correct_tokens=int((is_label & batch.correct).sum()),
            longest=int(batch.sample[is_label].bincount(minlength=1).max()),
        )

    def __add__(self, other: "Totals") -> "Totals":
        """The totals of both workers' answers."""
        return Totals(
            answers=self.answers + other.answers,
            states=self.states + other.states,
            tokens=self.tokens + other.tokens,
            correct_tokens=self.correct_tokens + other.correct_tokens,
            longest=max(self.longest, other.longest),
        )


def weighed(batch: ReplayBatch, objective: PolicyObjective, totals: Totals, *, num_workers: int = 1) -> ReplayBatch:
    """The batch of an update, or of a worker's share of it, with the weights of an objective's sums.

    `totals` are the totals of all workers. The workers' gradients are averaged, so each worker multiplies its weights
    by `num_workers`.
    """
    is_label = batch.labels != IGNORE
    weights = torch.zeros_like(batch.weights)
    samples, states = batch.sample[is_label], _states(batch)
    in_sample = samples.bincount()
    _, state, in_state = states.unique(return_inverse=True, return_counts=True)
    if objective.aggregation == "answers":
        counts = in_sample[samples] * totals.answers
    elif objective.aggregation == "tokens":
        counts = torch.full_like(samples, totals.tokens)
    elif objective.aggregation == "states":
        counts = torch.full_like(samples, totals.longest * totals.states)
    else:
        states_of_sample = (states.unique() // _PER_SAMPLE).bincount()
        counts = in_state[state] * states_of_sample[samples] * totals.answers
    weights[is_label] = num_workers / counts.to(weights)
    by_token = is_label.to(weights) * num_workers / totals.tokens
    return replace(
        batch,
        weights=weights,
        kl_weights=weights if objective.kl_aggregation == "policy" else by_token,
        nll_weights=(is_label & batch.correct).to(weights) * num_workers / max(1, totals.correct_tokens),
    )


_PER_SAMPLE = 2**32


def _states(batch: ReplayBatch) -> Tensor:
    """For each label the number of its state, unique in the batch (N)."""
    is_label = batch.labels != IGNORE
    return batch.sample[is_label] * _PER_SAMPLE + batch.stream[is_label]
