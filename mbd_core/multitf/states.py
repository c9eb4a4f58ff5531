"""How training states are drawn: layouts, noise, labels and the weight of each label."""

from dataclasses import dataclass
from typing import Literal

from mbd_core.multitf.layout import Layouts, RandomSizes
from mbd_core.multitf.noise import NoiseBounds, Rounding, ScheduleName

Weighting = Literal["masked_mean", "block_ratio", "self_normalised", "ratio_mean"]
SelfDenoising = Literal["none", "both", "half"]


@dataclass(frozen=True, kw_only=True)
class StateConfig:
    """The training states of a run.

    `layouts`         `systematic` ones and `num_random` random ones beside them; `random`: those alone; `one_group`:
                      all blocks in one noise-group (App. C.5); `d2f`: native D2F, one noisy sequence without a clean
                      one, its blocks from the prompt's end and the prompt seen whole
    `max_group`       the largest noise-group; 1 is teacher forcing, and what `one_group` and `d2f` have
    `num_layouts`     draw so many of the layout set anew for each sample, an unbiased estimate of Alg. 1's mean over
                      all of it; `None` takes them all
    `random_sizes`    how random layouts are drawn: as in the paper, or repaired and shuffled as in the released code
    `span`            layouts partition the whole content (App. B.1), or begin at the first block with a response
                      token, where decoding begins
    `weighting`       Eq. B.11 (`masked_mean`), Eq. B.13 (`block_ratio`), SDAR's released loss, `sum(CE / t) /
                      sum(1 / t)` over the labels of the whole batch (`self_normalised`), or D2F's, the mean of `CE /
                      t` over them (`ratio_mean`)
    `labels`          the masked positions, or every position of the answer as DMax trains (`answer_labels`)
    `self_denoising`  DMax's OPUT (Alg. 2), whose second branch sees the model's own predictions at masked positions:
                      `both` branches of every layout, or each layout in one of them, drawn evenly (`half`)
    """

    block_size: int
    max_group: int = 1
    num_random: int = 0
    num_layouts: int | None = None
    span: Literal["content", "response"] = "content"
    schedule: ScheduleName = "chain_uniform"
    bounds: NoiseBounds = NoiseBounds()
    rounding: Rounding = "floor"
    weighting: Weighting = "masked_mean"
    layouts: Layouts = "systematic"
    random_sizes: RandomSizes = "paper"
    labels: Literal["masked", "answer"] = "masked"
    self_denoising: SelfDenoising = "none"

    def __post_init__(self) -> None:
        if self.max_group < 1 or self.block_size < 1 or self.num_random < 0:
            raise ValueError(
                f"max_group={self.max_group}, block_size={self.block_size} must be >= 1 and "
                f"num_random={self.num_random} >= 0"
            )
        if self.num_layouts is not None and self.num_layouts < 1:
            raise ValueError(f"num_layouts={self.num_layouts} must be at least 1, or None for the whole layout set")
        if self.layouts in ("one_group", "d2f") and (self.max_group, self.num_random) != (1, 0):
            raise ValueError(f"layouts={self.layouts} is one layout: leave max_group at 1 and num_random at 0")
        if self.layouts == "random" and (self.max_group < 2 or self.num_random < 1):
            raise ValueError(
                f"layouts=random needs max_group >= 2 and num_random >= 1, not {self.max_group} and {self.num_random}"
            )
        if self.schedule == "slot_ranges" and not self.bounds.slots:
            raise ValueError("schedule=slot_ranges needs bounds.slots, a range for each place in a noise-group")
        if self.schedule == "fitted" and self.bounds.fitted is None:
            raise ValueError("schedule=fitted needs bounds.fitted, the measured states that it draws from")
        if self.labels == "answer" and self.weighting != "masked_mean":
            raise ValueError(f"labels=answer is weighted by masked_mean, not {self.weighting}: not all are masked")
