"""How drafts of a block model are verified: when a draft is verified, what counts as agreement, and how keys are
stored (S2D2, arXiv 2603.25702).

A block-diffusion model at block size 1 is autoregressive. So the same weights that draft a block without order can
judge the draft token by token, in one forward more. Or a small model drafts, and a large one judges (SimSD, arXiv
2606.02544).
"""

from typing import Annotated, Literal

from mbd_core.decoding.blocks.causal_config import PlannedRows
from mbd_core.fields import MOST, Ge, Gt, Le, check_effects, configuration

Route = Literal["span", "score", "hysteresis"]
VerifyOrder = Literal["block", "causal"]
DraftedSlots = Literal["all", "measured"]


@configuration()
class Verify:
    """Verification of drafts. Raises `ValueError` for fields without effect, and for fields that contradict each
    other."""

    route: Route = "span"
    """When a forward's draft is verified. span: if its first run of masks has at least min_span positions. score: if
    the expected number of accepted tokens less the cost is at least tau_score. hysteresis: from a score above tau_on
    until a score below tau_off."""
    min_span: Annotated[int, Ge(1), Le(MOST)] = 1
    """span: the shortest run of masks that is verified."""
    tau_score: Annotated[float, Ge(-MOST), Le(MOST)] = 0.0
    """score: the least score of a draft that is verified."""
    tau_on: Annotated[float, Ge(-MOST), Le(MOST)] = 1.0
    """hysteresis: a score above this begins to verify."""
    tau_off: Annotated[float, Ge(-MOST), Le(MOST)] = -5.0
    """hysteresis: a score below this ends it. An answer begins without verification."""
    cost: Annotated[float, Ge(0), Le(MOST)] = 1.0
    """score, hysteresis: the cost of a verification, in tokens."""
    cost_of: Literal["verification", "confident"] = "verification"
    """verification: the cost counts once. confident: once for each mask above tau_m2t, because the threshold would
    have filled these masks without a verification."""
    estimate: Literal["entropy", "margin"] = "entropy"
    """score, hysteresis: the chance that a drafted token is accepted. entropy: exp(-H / ln V). margin: 1 if it leads
    by more than tau_margin, else 0."""
    tau_margin: Annotated[float, Ge(0), Le(1)] = 0.05
    """margin: the lead, in probability."""
    temper: Annotated[float, Gt(0), Le(MOST)] = 1.0
    """A drafted token is accepted with probability min(1, (q / p)^temper): p is its probability in the draft, q in the
    judgement. Below 1 more tokens are accepted."""
    store: VerifyOrder = "block"
    """How prompt and finished blocks are stored. block: as the model stores them otherwise. causal: with the keys of
    block size 1, as a judgement assumes."""
    lead: VerifyOrder = "block"
    """How the tokens of a block before its first mask see each other. block: each sees all. causal: each sees the
    tokens before it; this needs store=causal."""
    exact: bool = False
    """The answer is that of the same model at block size 1: the same tokens if it is greedy, the same distribution if
    it is drawn. Every draft is verified. A greedy draft is kept up to its first token that is not the judgement's
    likeliest, without that token. Needs store=causal."""
    slots: DraftedSlots = "all"
    """exact: how many of the `buffer_size` blocks are drafted at once. all: every block that may begin (`tau_add`).
    measured: as many as promise the most tokens a second, by the drafts that were confirmed and by the seconds of
    measured steps. A greedy answer stays the same. A drawn answer keeps its distribution, but `seed` does not repeat
    it."""
    draft_model: bool = False
    """The engine's draft model drafts, in blocks of its own size; the model judges, by its autoregressive mode if it
    has one, else at block size 1. Needs exact."""

    def __post_init__(self) -> None:
        check_effects(self, "verify", chooser="route", effects=_ROUTE_EFFECTS)
        check_effects(self, "verify", chooser="estimate", effects={"tau_margin": ("margin",)})
        if self.tau_off > self.tau_on:
            raise ValueError(
                f"verify.tau_off={self.tau_off:g} exceeds verify.tau_on={self.tau_on:g}; give a lower tau_off"
            )
        if self.lead == "causal" and self.store != "causal":
            raise ValueError("verify.lead='causal' needs keys of that order; let verify.store be causal too")
        if self.slots == "measured" and not self.exact:
            raise ValueError(
                "verify.slots='measured' needs verify.exact=True and verify.store='causal', because other answers "
                "depend on the number of blocks; add them"
            )
        if self.draft_model and not self.exact:
            raise ValueError("verify.draft_model=True needs verify.exact=True and verify.store='causal'; add them")
        if self.exact:
            self._check_exact()

    def _check_exact(self) -> None:
        if self.store != "causal":
            raise ValueError("verify.exact=True needs keys as block size 1 stores them; let verify.store be causal")
        for name in ("route", "min_span", "temper"):
            if self._is_set(name):
                raise ValueError(
                    f"verify.{name}={getattr(self, name)!r} has no meaning with verify.exact, which verifies every "
                    "draft; leave one of them out"
                )

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != getattr(Verify, name))

    def rows(self, block_size: int, buffer_size: int) -> PlannedRows:
        """How its requests lie in the cache. After the blocks lie copies of the masks that a judgement looks at. With
        a draft model, up to `buffer_size` + 1 decided blocks before them may be stored by one of the models alone."""
        return PlannedRows(
            longest=(3 * buffer_size + 1 if self.draft_model else 2 * buffer_size) * block_size,
            rows=max(buffer_size + 1, buffer_size * (1 + (self.lead == "causal")) + self.draft_model),
            in_row=None if self.draft_model else buffer_size * block_size,
            gaps=True,
            overhang=(buffer_size + 1) * block_size - 1,
            seeds=int(self.draft_model),
            store=None if self.store == "causal" else block_size,
            grid=block_size,
        )


_SCORED: tuple[Route, ...] = ("score", "hysteresis")
_ROUTE_EFFECTS: dict[str, tuple[Route, ...]] = {
    "min_span": ("span",),
    "tau_score": ("score",),
    "tau_on": ("hysteresis",),
    "tau_off": ("hysteresis",),
    "cost": _SCORED,
    "cost_of": _SCORED,
    "estimate": _SCORED,
}
