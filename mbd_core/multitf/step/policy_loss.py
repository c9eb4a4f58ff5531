"""The objectives of reinforcement learning on replayed rollouts: weighted sums over labels, as MultiTF's loss is.

With `lp` a token's log-probability now, `old` its log-probability when it was sampled, and A its answer's advantage:

    reinforce  -A lp                                            REINFORCE, here with the advantage of its group
    clipped    -min(r A, clip(r, 1 - c, 1 + c') A), r = e^(lp - old)     PPO; c' above c as in DAPO
               and at most -d A where A < 0                              dual-clip PPO
    k3         e^(ref - lp) - 1 - (ref - lp), for KL(now || ref)         Schulman's estimate, as in GRPO
    nll        -lp on correct answers only                               VAPO, LightningRL

Each is summed with a column of weights, which define its mean (`policy_weights.weighed`). The choice of positions
counts as the environment's, as in all published learners: draws that a threshold rejected have no part in these sums.
So none of them is the exact gradient of the sampler's reward.

Shape legend: S training sequences, L tokens of the longest, N labels.
"""

import torch
from torch import Tensor, nn

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.data.example import IGNORE
from mbd_core.multitf.states.replay import ReplayBatch, RoutedBatch
from mbd_core.multitf.states.training_attention import TrainingAttention
from mbd_core.multitf.step.loss import DENSE, Scores, hidden_states, in_pieces, wide_logits
from mbd_core.multitf.step.objective import PolicyObjective

LARGEST_LOG_RATIO = 10.0
"""Log-ratios are clamped to this size before their exponential is taken, so that no update becomes infinite."""


NUM_SLOTS = 8
"""The number of slots with sums of their own; the last one also has the labels of all later slots."""
FORWARDS = (2, 4, 8, 16)
"""The bounds, inclusive, of the parts of a rollout's forwards."""
PARTS = tuple(f"slot_{slot}" for slot in range(1, NUM_SLOTS + 1)) + tuple(
    f"forward_{low + 1}_{high}" if high else f"forward_{low + 1}_on"
    for low, high in zip((0, *FORWARDS), (*FORWARDS, 0), strict=True)
)
MAXIMA = ("d_max", "ratio_max")
LOSSES = ("policy_loss", "kl_loss", "nll_loss")
SUMS = (
    "labels",
    "d_abs",
    "d_large",
    "d_k3",
    "weight",
    "weight_squared",
    "ratio",
    "clipped",
    "entropy",
    "kl_reference",
    "kl_old",
    *LOSSES,
    *(f"d_abs_{part}" for part in PARTS),
    *(f"labels_{part}" for part in PARTS),
)
LARGE = 0.1
"""Larger differences of log-probabilities are counted in `d_large`."""

PolicyLoss = tuple[Tensor, Tensor]
"""The loss, a scalar with gradient; then `MAXIMA` and `SUMS` of its labels, in float64."""


def log_probabilities(
    model: Decoder, batch: ReplayBatch, *, attention: TrainingAttention = DENSE
) -> tuple[Tensor, Tensor]:
    """For each label, row by row, its log-probability with gradient, and the entropy of its distribution (N)."""
    rows, places = (batch.labels != IGNORE).nonzero(as_tuple=True)
    experts = batch.experts if isinstance(batch, RoutedBatch) else None
    hidden = hidden_states(model, batch, attention, (rows, places), experts=experts)

    def score(hidden_ND: Tensor, labels_N: Tensor) -> Scores:
        logs_NV = wide_logits(model.logits(hidden_ND)).log_softmax(-1)
        with torch.no_grad():
            entropy_N = -(logs_NV.exp() * logs_NV).sum(-1)
        return logs_NV.gather(-1, labels_N[:, None])[:, 0], entropy_N

    return in_pieces(score, model, hidden, batch.labels[rows, places])


def policy_loss(
    model: Decoder,
    batch: ReplayBatch,
    objective: PolicyObjective,
    *,
    attention: TrainingAttention = DENSE,
    is_old: bool = False,
) -> PolicyLoss:
    """The objective's loss on a batch with the weights of `weighed`.

    `is_old`: the model has the old policy's weights, so all ratios are 1, and `batch.old` is not read. The last
    layer's MLP and the head run on labels only, the head in pieces where their logits are large.
    """
    logprobs_N, entropy_N = log_probabilities(model, batch, attention=attention)
    return objective_loss(logprobs_N, entropy_N, batch, objective, is_old=is_old)


def objective_loss(
    logprobs_N: Tensor, entropy_N: Tensor, batch: ReplayBatch, objective: PolicyObjective, *, is_old: bool = False
) -> PolicyLoss:
    """The loss and numbers of a batch's labels, given their log-probabilities, row by row."""
    is_label = batch.labels != IGNORE

    def column(name: str) -> Tensor:
        values: Tensor = getattr(batch, name)[is_label]
        return values.to(logprobs_N.dtype) if values.is_floating_point() else values

    rollout_N, old_N, reference_N, advantage_N = map(column, ("logprobs", "old", "reference", "advantage"))
    old_N = logprobs_N.detach() if is_old else old_N
    ratio_N = _exp(logprobs_N - old_N)
    term_N, is_clipped_N = token_loss(logprobs_N, ratio_N, advantage_N, objective)
    if objective.correction is not None:
        term_N = term_N * _exp(old_N - rollout_N).clamp(max=objective.correction)
    to_reference_N, to_old_N = k3(logprobs_N, reference_N), k3(logprobs_N, old_N)
    policy = (column("weights") * term_N).sum()
    kl = (column("kl_weights") * (to_old_N if objective.kl_to == "old" else to_reference_N)).sum()
    nll = -(column("nll_weights") * logprobs_N).sum()
    loss = policy + objective.kl * kl + objective.nll * nll
    with torch.no_grad():
        d_N = (logprobs_N - rollout_N).double()
        weight_N = _exp(d_N)
        slot_N = column("slot").clamp(max=NUM_SLOTS - 1)
        edges = torch.tensor(FORWARDS, device=slot_N.device)
        forward_N = NUM_SLOTS + torch.bucketize(column("forward"), edges)
        parts = d_N.new_zeros(2, len(PARTS))
        for part_N in (slot_N, forward_N):
            parts[0].index_add_(0, part_N, d_N.abs())
            parts[1].index_add_(0, part_N, torch.ones_like(d_N))
        columns = (
            torch.ones_like(d_N),
            d_N.abs(),
            d_N.abs() > LARGE,
            weight_N - 1.0 - d_N,
            weight_N,
            weight_N.square(),
            ratio_N,
            is_clipped_N,
            entropy_N,
            to_reference_N,
            to_old_N,
        )
        maxima = [torch.cat([x, x.new_zeros(1)]).max().double() for x in (d_N.abs(), ratio_N.detach())]
        sums = [x.detach().double().sum() for x in (*columns, policy, kl, nll)]
        numbers = torch.cat([torch.stack([*maxima, *sums]), parts.flatten()])
    return loss, numbers


def token_loss(
    logprobs_N: Tensor, ratio_N: Tensor, advantage_N: Tensor, objective: PolicyObjective
) -> tuple[Tensor, Tensor]:
    """Each token's term without weights, and whether a clip has removed its gradient (N)."""
    if objective.kind == "reinforce":
        return -advantage_N * logprobs_N, torch.zeros_like(logprobs_N, dtype=torch.bool)
    plain_N, clipped_N = ratio_N * advantage_N, ratio_N.clamp(*objective.ratios) * advantage_N
    gain_N = torch.minimum(plain_N, clipped_N)
    if objective.dual_clip is not None:
        gain_N = torch.where(advantage_N < 0, torch.maximum(gain_N, objective.dual_clip * advantage_N), gain_N)
    return -gain_N, (gain_N != plain_N) & (advantage_N != 0)


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """An unbiased estimate of KL(now || reference) from samples of `now`, never negative (N)."""
    log_ratio_N = reference_N - logprobs_N
    return _exp(log_ratio_N) - 1.0 - log_ratio_N


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


class PolicyModule(nn.Module):
    """The model with its objective as one module, which a data-parallel wrapper can hook."""

    def __init__(self, model: Decoder, objective: PolicyObjective, attention: TrainingAttention = DENSE) -> None:
        super().__init__()
        self.model, self.objective, self.attention = model, objective, attention

    def forward(self, batch: ReplayBatch, *, is_old: bool = False, only_scores: bool = False) -> PolicyLoss:
        """The loss and its numbers; with `only_scores` the labels' log-probabilities and entropies (N)."""
        if only_scores:
            return log_probabilities(self.model, batch, attention=self.attention)
        return policy_loss(self.model, batch, self.objective, attention=self.attention, is_old=is_old)
