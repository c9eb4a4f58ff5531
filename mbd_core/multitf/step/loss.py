"""The losses of MultiTF: one weighted sum over labels, whose weights come with the batch (Eqs. B.11, B.13).

DMax's self-denoising (Alg. 2) and D2F's distillation (Eq. 3) are the same sum after another forward without gradients.

Shape legend: N labels, D hidden, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mbd_core.models.decoder import Decoder, Training
from mbd_core.multitf.config import Distillation
from mbd_core.multitf.data.example import IGNORE
from mbd_core.multitf.states.batch import AR_SLOT, MultiTFBatch
from mbd_core.multitf.states.layout import Weighting
from mbd_core.multitf.states.training_attention import TrainingAttention
from mbd_core.multitf.step.loss_buckets import bucket_sums

DENSE = TrainingAttention("dense", torch.device("cpu"))
"""The default attention of a loss: a dense mask, on any device."""

LOGIT_BYTES = 2**28
"""The limit of float32 logits in memory at once; more labels go through the head in pieces."""


Scores = tuple[Tensor, Tensor]
"""Two numbers for each label (N): for a loss, the loss and whether the model's likeliest token is the label."""

TokenPlaces = tuple[Tensor, Tensor]
"""Tokens of a batch: their rows, and their places in the rows (N)."""

LossAndSums = tuple[Tensor, Tensor]
"""The loss, a scalar with gradient; then, in float64, the accuracy on the labels and the sums and counts of
`bucket_sums`."""


def denominator(batch: MultiTFBatch, weighting: Weighting) -> Tensor:
    """The divisor of the weighted sum of losses: samples, or a sum over all labels of the batch. Never 0.

    Over several workers it is summed and divided by their number, because gradients are averaged.
    """
    if weighting == "self_normalised":
        total = batch.weights.sum()
    elif weighting in ("ratio_mean", "label_mean"):
        total = (batch.labels != IGNORE).sum()
    else:
        total = torch.tensor(batch.num_samples)
    return total


def multitf_loss(
    model: Decoder,
    batch: MultiTFBatch,
    divisor: Tensor | float | None = None,
    *,
    attention: TrainingAttention = DENSE,
    rolls_out: bool | None = None,
) -> LossAndSums:
    """The weighted CE over `divisor`, by default the number of samples.

    The last layer's MLP and the LM head run on labelled positions only, the head in pieces if their logits are large;
    a batch without any label gives a zero loss. `rolls_out` adds a roll-out, by default if the batch has positions for
    it. Workers with parts of one model must all do the same, because each forward gathers weights.
    """
    if bool(batch.rollout.any()) if rolls_out is None else rolls_out:
        batch = roll_out(model, batch, attention=attention)
    label_states = states_of_labels(model, batch, attention)

    def score(hidden_ND: Tensor, labels_N: Tensor) -> Scores:
        logits_NV = wide_logits(model.logits(hidden_ND))
        return F.cross_entropy(logits_NV, labels_N, reduction="none"), logits_NV.argmax(-1) == labels_N

    return loss_and_sums(
        in_pieces(score, model, label_states.hidden, label_states.labels), label_states, batch, divisor
    )


@torch.no_grad()
def roll_out(model: Decoder, batch: MultiTFBatch, *, attention: TrainingAttention = DENSE) -> MultiTFBatch:
    """The batch with the model's likeliest tokens in place of the masks of `batch.rollout` (Alg. 2)."""
    rows, places = batch.rollout.nonzero(as_tuple=True)
    hidden = hidden_states(model, batch, attention, (rows, places))
    tokens = batch.input_ids.clone()
    for part in torch.arange(len(rows), device=tokens.device).split(_piece(model)):
        logits = model.logits(hidden[part]).float()
        logits[:, model.config.mask_token_id] = -torch.inf
        tokens[rows[part], places[part]] = logits.argmax(-1)
    return replace(batch, input_ids=tokens, rollout=torch.zeros_like(batch.rollout))


def distillation_loss(
    model: Decoder,
    batch: MultiTFBatch,
    direction: Distillation,
    *,
    as_teacher: Callable[[], AbstractContextManager[None]] = nullcontext,
    divisor: Tensor | float | None = None,
    attention: TrainingAttention = DENSE,
) -> LossAndSums:
    """D2F's asymmetric distillation (Eq. 3): the weighted KL divergence of student and teacher at masked positions.

    The teacher is the network within `as_teacher` (its adapter off), without gradients: it attends to the whole noisy
    sequence, the student under the batch's mask.
    """
    with torch.no_grad(), as_teacher():
        teacher_hidden = states_of_labels(model, batch, attention, whole=True).hidden
    label_states = states_of_labels(model, batch, attention)

    def score(hidden_ND: Tensor, taught_ND: Tensor, labels_N: Tensor) -> Scores:
        with torch.no_grad():
            teacher = wide_logits(model.logits(taught_ND))  # the head has no adapter
        student = wide_logits(model.logits(hidden_ND))
        return divergence(student, teacher, direction), student.argmax(-1) == labels_N

    return loss_and_sums(
        in_pieces(score, model, label_states.hidden, teacher_hidden, label_states.labels),
        label_states,
        batch,
        divisor,
    )


def divergence(student: Tensor, teacher: Tensor, direction: Distillation) -> Tensor:
    """The KL divergence of two distributions given as logits (N, V), for each position (N)."""
    logs, target = student.log_softmax(-1), teacher.log_softmax(-1)
    if direction == "student_teacher":
        logs, target = target, logs
    return F.kl_div(logs, target, reduction="none", log_target=True).sum(-1)


def hidden_states(
    model: Decoder,
    batch: MultiTFBatch,
    attention: TrainingAttention,
    tokens: TokenPlaces,
    *,
    whole: bool = False,
    experts: Tensor | None = None,
) -> Tensor:
    """The hidden states (N, D) that predict these tokens; `experts` (S, L, M, K) replaces each token's choice of
    experts.

    Without tokens, one token is computed nevertheless: weights that a forward does not use have no gradient, not even
    zero.
    """
    rows_N, places_N = tokens
    kept_N = rows_N * batch.input_ids.shape[1] + batch.source[rows_N, places_N]
    computed_N = kept_N if len(kept_N) else kept_N.new_zeros(1)
    training = Training(kept=computed_N, experts=experts)
    moe = model.config.moe
    needs_blocks = moe is not None and moe.expert_capacity > 0  # a token's experts depend on its whole block
    attend = attention.of(
        batch, whole=whole, num_layers=model.config.num_layers, kept=None if needs_blocks else computed_N
    )
    hidden: Tensor = model(batch.input_ids, batch.positions, attend, training=training)
    return hidden[: len(kept_N)]


@dataclass(frozen=True)
class LabelStates:
    """For each label, the hidden state that predicts it (N, D) and its columns of the batch (N)."""

    hidden: Tensor
    labels: Tensor
    weights: Tensor
    slots: Tensor
    ratios: Tensor


def states_of_labels(
    model: Decoder, batch: MultiTFBatch, attention: TrainingAttention, *, whole: bool = False
) -> LabelStates:
    rows, places = (batch.labels != IGNORE).nonzero(as_tuple=True)
    hidden = hidden_states(model, batch, attention, (rows, places), whole=whole)
    columns = (column[rows, places] for column in (batch.labels, batch.weights, batch.slot, batch.ratio))
    return LabelStates(hidden, *columns)


def wide_logits(logits: Tensor) -> Tensor:
    """The logits in at least float32: a loss of bfloat16 logits would be too inexact."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _piece(model: Decoder) -> int:
    """The number of labels whose float32 logits may exist at once."""
    return max(1, LOGIT_BYTES // (4 * model.config.vocab_size))


def in_pieces(score: Callable[..., Scores], model: Decoder, *columns: Tensor) -> Scores:
    """`score` of the columns' rows. If they need several pieces, the backward pass computes it again."""
    size = _piece(model)
    if len(columns[0]) <= size:
        return score(*columns)
    parts = [
        checkpoint(score, *part, use_reentrant=False)
        for part in zip(*(column.split(size) for column in columns), strict=True)
    ]
    first, second = zip(*parts, strict=True)
    return torch.cat(first), torch.cat(second)


def loss_and_sums(
    scores: Scores, label_states: LabelStates, batch: MultiTFBatch, divisor: Tensor | float | None
) -> LossAndSums:
    losses, hits = scores
    loss = (losses * label_states.weights.to(losses.dtype)).sum() / (batch.num_samples if divisor is None else divisor)
    counted = hits.detach()[counts_in_accuracy(label_states.slots)].float()
    accuracy = counted.sum() / max(1, counted.numel())
    sums = bucket_sums(losses, hits, label_states.slots, label_states.ratios)
    return loss, torch.cat([accuracy.double()[None], sums])


def counts_in_accuracy(slots: Tensor) -> Tensor:
    """Whether the accuracy counts each label (N), given its slot: the labels of noisy streams, or, if there are none,
    all."""
    is_noisy = slots != AR_SLOT
    return is_noisy if bool(is_noisy.any()) else torch.ones_like(is_noisy)
