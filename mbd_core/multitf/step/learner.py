"""The learner of reinforcement learning: rollouts with advantages in, one update, new weights out.

A rollout's forwards are rebuilt (`states/replay.py`), so that the learner scores its tokens in the states in which the
engine chose them. Before it learns, its log-probabilities are compared with the engine's. The differences come from
the two programs' arithmetic, and from weights that changed since the rollout.
"""

import math
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import ReplayStates, Sharding, TrainConfig
from mbd_core.multitf.data.example import IGNORE
from mbd_core.multitf.states.answer import ReplayedAnswer
from mbd_core.multitf.states.batch import SequenceColumns
from mbd_core.multitf.states.replay import ReplayBatch, collate_answers, replay_row
from mbd_core.multitf.states.replay_cost import ReplayCost, replay_cost
from mbd_core.multitf.step.adapter import without_adapter
from mbd_core.multitf.step.mfu import update_flops
from mbd_core.multitf.step.policy_loss import LOSSES, MAXIMA, PARTS, SUMS, PolicyModule, PolicyObjective
from mbd_core.multitf.step.policy_weights import Totals, weighed
from mbd_core.multitf.step.rollout_learner import RolloutLearner
from mbd_core.multitf.step.trainer import split_batch
from mbd_core.multitf.step.workers import ALONE, Workers


@dataclass(frozen=True, kw_only=True)
class LearnerReport:
    """One update, over all workers.

    loss              the weighted sum, with `policy_loss`, `kl_loss` and `nll_loss` before their weights
    grad_norm         norm of all gradients together, before clipping
    labels            number of learned tokens; `tokens` is the number of tokens in each pass, `positions` also counts
                      padding and the repetitions that keep workers in step
    trace_rl_tokens   number of tokens that TraceRL's rows of the same answers would have (`ReplayCost`)
    d_*               the learner's log-probability minus the engine's, before the update: mean and largest absolute
                      value, the share above 0.1, and `mean(e^d - 1 - d)`
    effective_share   the effective sample size of the weights e^d, as a share of the labels
    ratio_*, clip_share, entropy, kl_*   means over the labels, except `ratio_max`; `kl_reference` if it has a weight
    d_parts           the mean of |d| by slot of the Block Buffer and by part of the answer's forwards
    """

    step: int
    loss: float
    policy_loss: float
    kl_loss: float
    nll_loss: float
    lr: float
    grad_norm: float
    answers: int
    forwards: int
    labels: int
    tokens: int
    positions: int
    trace_rl_tokens: int
    tflop: float
    seconds: float
    d_mean: float
    d_max: float
    d_share: float
    d_k3: float
    effective_share: float
    ratio_mean: float
    ratio_max: float
    clip_share: float
    entropy: float
    kl_reference: float | None
    kl_old: float
    d_parts: Mapping[str, float] = field(default_factory=dict)

    def point(self) -> dict[str, float]:
        """The update as a point of a run's curve."""
        numbers = asdict(self)
        parts = numbers.pop("d_parts")
        numbers |= {f"d_{part}": number for part, number in parts.items()}
        return {name: number for name, number in numbers.items() if number is not None}


class Learner(RolloutLearner):
    """A policy in training on replayed answers.

    `config.batch_size` is the planned number of answers in an update; dropped groups may leave fewer, and there may be
    more. `states` and `shrink` are `replay_batch`'s. If the objective has a KL divergence to a frozen reference, the
    reference is the given model, or, if an adapter is trained, the model without the adapter. So a resumed learner
    gets the run's first model, and then its own state (`load_state_dict`).
    """

    def __init__(
        self,
        model: Decoder,
        config: TrainConfig,
        objective: PolicyObjective,
        *,
        states: ReplayStates = "exact",
        shrink: int = 1,
        workers: Workers = ALONE,
        sharding: Sharding | None = None,
    ) -> None:
        if config.teacher is not None:
            raise ValueError("a teacher is a distiller's, and a policy has none; leave it out")
        keeps_reference = objective.needs_reference and config.lora is None
        if keeps_reference and sharding == "sharded" and workers.size > 1:
            raise ValueError(
                "no frozen reference is kept beside sharded weights: train an adapter (lora), whose reference is the "
                "model without it, or give kl_to=old"
            )
        reference = deepcopy(model).to(workers.device).eval().requires_grad_(False) if keeps_reference else None
        self.policy = objective
        module = partial(PolicyModule, model, objective)
        super().__init__(
            model, config, module, states=states, shrink=shrink, workers=workers, sharding=sharding, frozen=reference
        )
        self._reference = None if reference is None else PolicyModule(reference, objective, self.attention)

    def update(self, answers: Sequence[ReplayedAnswer]) -> LearnerReport:
        """Updates the weights on these answers, which all workers get in the same order.

        The same answers, weights and optimizer states give the same update, bit for bit. Before any change, raises
        `ValueError` without answers and for answers that cannot be replayed.
        """
        began, step = time.perf_counter(), self.step_number
        share = self._share(answers)
        parts = [self._scored(part) for part in split_batch(share.batch, self.config.micro_batch)]
        lrs = [self.config.lr_at(step + number) for number in range(self.policy.passes)]
        passes = [self._pass(parts) for _ in lrs]
        flops = len(passes) * update_flops(self.model.config, share.batch, lora=self.config.lora is not None)
        counts = {
            "tokens": share.cost.tokens,
            "positions": sum(part.input_ids.numel() for part in parts),
            "trace_rl_tokens": share.cost.trace_rl,
            "forwards": share.cost.forwards,
        }
        values = counts, flops, torch.stack([numbers for numbers, _ in passes])
        every = [others for others, is_counted in self.workers.all_values((values, self.counts)) if is_counted]
        maxima, sums = torch.stack([numbers for _, _, numbers in every]).split([len(MAXIMA), len(SUMS)], dim=-1)
        first, mean = (dict(zip(SUMS, row.tolist(), strict=True)) for row in (sums.sum(0)[0], sums.sum(0).mean(0)))
        for name in LOSSES:  # `weighed` multiplies a worker's weights by the number of workers
            mean[name] /= len(every)
        mean["loss"] = mean["policy_loss"] + self.policy.kl * mean["kl_loss"] + self.policy.nll * mean["nll_loss"]
        return LearnerReport(
            step=step,
            lr=fmean(lrs),
            grad_norm=fmean(norm for _, norm in passes),
            answers=len(answers),
            labels=round(first["labels"]),
            tflop=sum(flops for _, flops, _ in every) / 1e12,
            seconds=time.perf_counter() - began,
            **{name: sum(counts[name] for counts, _, _ in every) for name in counts},
            d_max=maxima[:, 0, MAXIMA.index("d_max")].max().item(),
            ratio_max=maxima[..., MAXIMA.index("ratio_max")].max().item(),
            **_means(first, mean),
            kl_reference=mean["kl_reference"] / first["labels"] if self.policy.needs_reference else None,
            d_parts={
                part: first[f"d_abs_{part}"] / first[f"labels_{part}"] for part in PARTS if first[f"labels_{part}"]
            },
        )

    def _share(self, answers: Sequence[ReplayedAnswer]) -> "UpdateShare":
        """This worker's answers as a weighed batch.

        If an answer is left over, the workers without it compute the longest answer again, without labels, because
        workers with parts of one model must compute equally often.
        """
        count = self.world_size
        order, own = self._dealt(answers)
        rows = [self._row(answer) for answer in own]
        if len(own) < math.ceil(len(order) / count):
            rows.append(self._row(order[0]))
            rows[-1]["labels"] = [IGNORE] * len(rows[-1]["labels"])
        batch = collate_answers(rows, self._together(order, lambda answer: self._cost(answer).tokens))
        first, *others = [
            totals for totals, counts in self.workers.all_values((Totals.of(batch), self.counts)) if counts
        ]
        cost = sum(map(self._cost, own), ReplayCost())
        return UpdateShare(weighed(batch, self.policy, sum(others, first), num_workers=count), cost)

    def _row(self, answer: ReplayedAnswer) -> SequenceColumns:
        model = self.model.config
        layers = 0 if model.moe is None else sum(map(model.moe.is_sparse, range(model.num_layers)))
        for record in answer.experts:
            moe, given = model.moe, record.ids.shape[1:]
            if moe is None or given != (layers, moe.experts_per_token) or record.ids.max() >= moe.num_experts:
                raise ValueError(f"the rollout's experts {given} are not those of this model's {layers} such layers")
        return replay_row(
            answer,
            mask_token_id=model.mask_token_id,
            shrink=self.shrink,
            states=self.states,
            shift=model.shift_logits,
        )

    def _cost(self, answer: ReplayedAnswer) -> ReplayCost:
        return replay_cost(answer, shrink=self.shrink, states=self.states)

    @torch.no_grad()
    def _scored(self, part: ReplayBatch) -> ReplayBatch:
        """The batch with the log-probabilities for ratios and KL divergences, where the loss needs them."""
        columns = {}
        if self.policy.needs_reference and self._reference is None:
            with without_adapter(self.model):
                columns["reference"] = self._scores(self.objective, part)
        elif self._reference is not None:
            columns["reference"] = self._scores(self._reference, part)
        if self.policy.old == "learner" and not self._is_old:
            columns["old"] = self._scores(self.objective, part)
        return replace(part, **columns)

    def _scores(self, module: nn.Module, part: ReplayBatch) -> Tensor:
        """A column of a module's scores for the labels."""
        with self._autocast():
            scores_N, _ = module(part.to(self.device), only_scores=True)
        column = torch.zeros_like(part.logprobs)
        column[part.labels != IGNORE] = scores_N.to(column)
        return column

    @property
    def _is_old(self) -> bool:
        """Whether the model has the old policy's weights in every pass."""
        return self.policy.old == "learner" and self.policy.passes == 1

    def _pass(self, parts: Sequence[ReplayBatch]) -> tuple[Tensor, float]:
        """One update: `MAXIMA` and `SUMS` of this worker's labels, and the gradients' norm."""
        numbers = []
        for part in parts:
            with self._gradients_stay_here(part is not parts[-1]):
                with self._autocast():
                    loss, part_numbers = self.objective(part.to(self.device), is_old=self._is_old)
                loss.backward()
            numbers.append(part_numbers)
        norm = self._apply()
        each = torch.stack(numbers).cpu()
        return torch.cat([each[:, : len(MAXIMA)].amax(0), each[:, len(MAXIMA) :].sum(0)]), norm


@dataclass(frozen=True)
class UpdateShare:
    """A worker's part of an update."""

    batch: ReplayBatch
    cost: ReplayCost


def _means(first: Mapping[str, float], mean: Mapping[str, float]) -> dict[str, Any]:
    """A report's means: for differences the means of the first pass, before any change; for other numbers the means of
    all passes."""
    labels = first["labels"]
    return {
        **{name: mean[name] for name in ("loss", "policy_loss", "kl_loss", "nll_loss")},
        "d_mean": first["d_abs"] / labels,
        "d_share": first["d_large"] / labels,
        "d_k3": first["d_k3"] / labels,
        "effective_share": first["weight"] ** 2 / first["weight_squared"] / labels,
        "ratio_mean": mean["ratio"] / labels,
        "clip_share": mean["clipped"] / labels,
        "entropy": mean["entropy"] / labels,
        "kl_old": mean["kl_old"] / labels,
    }
