"""A learner's objective as values: the terms, their weights and means, and the papers' objectives by name.

Values alone, without PyTorch, so that a command shows its options at once; `policy_loss.py` has the formulas.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from mbd_core.fields import UPDATES, Flag, Ge, Gt, Le, configuration

Aggregation = Literal["answers", "tokens", "states", "transitions"]
"""The levels of the mean that a sum over labels takes.

answers      an answer's tokens, then answers (GRPO, LightningRL)
tokens       all tokens of the update (DAPO)
states       states of all answers, of each the sum over its tokens by the longest answer's (TraceRL): answers that
             took more forwards weigh more
transitions  a state's tokens, then an answer's states, then answers (CJ-GRPO)
"""

CLIP = 0.2
"""The distance from 1 within which a ratio counts, in the papers."""


@configuration(panel=UPDATES)
class PolicyObjective:
    """A learner's objective.

    `old` is the source of a ratio's denominator: the learner's own weights before the update (`learner`), or the
    engine's log-probabilities (`rollout`). Both agree to 2e-4 in float32 if no weights came between. `correction`
    multiplies each token's term by `min(e^(old - rollout), correction)` where `old` is the learner's. Raises
    `ValueError` for contradictory fields and for fields that have no effect in this combination.
    """

    kind: Literal["reinforce", "clipped"] = "reinforce"
    """The term of each token: reinforce, or clipped (PPO)."""
    clip: Annotated[float | None, Gt(0), Le(1), Flag(name="--ratio-clip", default=f"{CLIP} with --kind clipped")] = (
        None
    )
    """How far below 1 a ratio counts; without clip_high, also how far above 1."""
    clip_high: Annotated[float | None, Gt(0), Flag(default="that of --ratio-clip")] = None
    """How far above 1 a ratio counts."""
    dual_clip: Annotated[float | None, Gt(1)] = None
    """The largest ratio that counts where the advantage is negative; above 1."""
    aggregation: Annotated[Aggregation, Flag(metavar="NAME")] = "answers"
    """The mean over answers, tokens, states or transitions."""
    old: Literal["learner", "rollout"] = "learner"
    """The source of a ratio's old log-probabilities: the learner, or the rollout's engine."""
    correction: Annotated[float | None, Gt(0)] = None
    """Weigh tokens by the learner's probability divided by the engine's, up to this."""
    kl: Annotated[float, Ge(0)] = 0.0
    """The weight of the KL divergence (k3)."""
    kl_to: Literal["reference", "old"] = "reference"
    """The model from which the KL divergence is measured: the model that training began with, or the old policy."""
    kl_aggregation: Literal["tokens", "policy"] = "tokens"
    """The mean of the KL divergence: over tokens, or as in --aggregation."""
    passes: Annotated[int, Ge(1)] = 1
    """Updates made of the same answers."""
    nll: Annotated[float, Ge(0)] = 0.0
    """The weight of correct answers' negative log-likelihood."""

    def __post_init__(self) -> None:
        if self.kind == "reinforce" and (self.clip, self.clip_high, self.dual_clip) != (None, None, None):
            raise ValueError(
                "kind=reinforce has no ratio to clip: leave clip, clip_high and dual_clip out, or give kind=clipped"
            )
        if self.kl == 0 and (self.kl_to, self.kl_aggregation) != ("reference", "tokens"):
            raise ValueError(
                "kl_to and kl_aggregation say how a KL divergence is measured, and kl=0 leaves it out: give kl above "
                "0, or kl_to=reference and kl_aggregation=tokens"
            )
        if self.correction is not None and self.old == "rollout":
            raise ValueError("correction weighs the learner's log-probabilities by the engine's: give old=learner")
        if self.kind == "reinforce" and self.old == "rollout" and self.kl_to != "old":
            raise ValueError(
                "old=rollout has no effect: kind=reinforce has no ratio, and no KL divergence is of the old policy; "
                "leave it out, or give kind=clipped"
            )

    @property
    def ratios(self) -> tuple[float, float]:
        """The interval within which a ratio counts."""
        low = CLIP if self.clip is None else self.clip
        return 1.0 - low, 1.0 + (low if self.clip_high is None else self.clip_high)

    @property
    def needs_reference(self) -> bool:
        return self.kl > 0 and self.kl_to == "reference"


OBJECTIVES: Mapping[str, PolicyObjective] = MappingProxyType(
    {
        "reinforce": PolicyObjective(),
        "TraceRL": PolicyObjective(
            kind="clipped", aggregation="states", kl=0.01, kl_to="old", kl_aggregation="policy"
        ),
        "CJ-GRPO": PolicyObjective(kind="clipped", dual_clip=3.0, aggregation="transitions"),
        "LightningRL": PolicyObjective(kind="clipped", aggregation="answers", kl=0.01, nll=0.1),
    }
)
"""The papers' objectives, by name; `reinforce` is one pass over fresh rollouts. CJ-GRPO's dual clip is verl's."""
