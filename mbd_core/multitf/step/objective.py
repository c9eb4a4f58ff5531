"""What a learner of rollouts minimises, as values: the terms, their weights and means, the papers' own by name.

Values alone, without PyTorch, so that a command shows its options at once; `policy_loss.py` has the formulas.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from mbd_core.options import UPDATES, Option, check

Aggregation = Literal["answers", "tokens", "states", "transitions"]
"""What a sum over labels is the mean over.

answers      an answer's tokens, then answers (GRPO, LightningRL)
tokens       all tokens of the update (DAPO)
states       states of all answers, of each the sum over its tokens by the longest answer's (TraceRL): answers that
             took more forwards weigh more
transitions  a state's tokens, then an answer's states, then answers (CJ-GRPO)
"""

CLIP = 0.2
"""How far from 1 a ratio counts, in the papers."""


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """What a learner minimises.

    `old` is where a ratio's denominator comes from: the learner's own weights before the update (`learner`), or the
    engine's log-probabilities (`rollout`), which are the same to 2e-4 in float32 where no weights came between.
    `correction` multiplies each token's term by `min(e^(old - rollout), correction)` where `old` is the learner's.
    Raises `ValueError` for fields that contradict each other, and for one that these others leave without effect.
    """

    kind: Annotated[
        Literal["reinforce", "clipped"], Option("The term of each token: reinforce, or clipped (PPO).", UPDATES)
    ] = "reinforce"
    clip: Annotated[
        float | None,
        Option(
            "How far below 1 a ratio counts; above it too.",
            UPDATES,
            above=0,
            at_most=1,
            flag="--ratio-clip",
            default=f"{CLIP} with --kind clipped",
        ),
    ] = None
    clip_high: Annotated[
        float | None, Option("How far above 1 a ratio counts.", UPDATES, above=0, default="that of --ratio-clip")
    ] = None
    dual_clip: Annotated[
        float | None,
        Option("The largest ratio that counts where the advantage is negative; above 1.", UPDATES, above=1),
    ] = None
    aggregation: Annotated[
        Aggregation, Option("The mean over answers, tokens, states or transitions.", UPDATES, metavar="NAME")
    ] = "answers"
    old: Annotated[
        Literal["learner", "rollout"],
        Option("Whose log-probabilities a ratio is of: the learner's, or the engine's.", UPDATES),
    ] = "learner"
    correction: Annotated[
        float | None,
        Option("Weigh tokens by the learner's over the engine's probability, up to this.", UPDATES, above=0),
    ] = None
    kl: Annotated[float, Option("The weight of the KL divergence (k3).", UPDATES, at_least=0)] = 0.0
    kl_to: Annotated[
        Literal["reference", "old"],
        Option("From the model that training began with, or from the old policy.", UPDATES),
    ] = "reference"
    kl_aggregation: Annotated[
        Literal["tokens", "policy"], Option("Its mean: over tokens, or the same as of --aggregation.", UPDATES)
    ] = "tokens"
    passes: Annotated[int, Option("Updates made of the same answers.", UPDATES, at_least=1)] = 1
    nll: Annotated[float, Option("The weight of correct answers' negative log-likelihood.", UPDATES, at_least=0)] = 0.0

    def __post_init__(self) -> None:
        check(self)
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
        """Between which a ratio counts."""
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
