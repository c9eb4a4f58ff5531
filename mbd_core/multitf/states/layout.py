"""The training states of a run: group-layouts, noise, labels and weights (Section 3.2, App. B.1).

Group-layouts are partitions of K consecutive blocks into noise-groups.
"""

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, get_args

from mbd_core.fields import STATES, Flag, Ge, Gt, configuration
from mbd_core.multitf.states.noise import NoiseBounds, Rounding, ScheduleName

Layouts = Literal["systematic", "random", "one_group", "d2f", "none"]
RandomSizes = Literal["paper", "released"]


@dataclass(frozen=True)
class GroupLayout:
    """One partition `lambda = (H_1, ..., H_n)`: the sizes of consecutive noise-groups, in blocks.

    Raises `ValueError` for an empty layout or a group without blocks.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"a group-layout needs groups of at least one block, not sizes={self.sizes}")

    @property
    def num_blocks(self) -> int:
        return sum(self.sizes)

    def first_blocks(self) -> list[int]:
        """For each block the first block of its noise-group, `alpha` of Eq. B.8, counted from 0."""
        starts: list[int] = []
        for size in self.sizes:
            starts += [len(starts)] * size
        return starts


def systematic_layouts(num_blocks: int, max_group: int) -> list[GroupLayout]:
    """`Lambda_sys`: every group size g in 2..max_group at each of its g shifts, boundary groups clipped (Eq. B.1)."""
    _check(num_blocks, max_group)
    layouts = []
    for g in range(2, max_group + 1):
        for shift in range(g):
            bounds = sorted({0, num_blocks, *range(shift, num_blocks, g)})
            layouts.append(GroupLayout(tuple(b - a for a, b in pairwise(bounds))))
    return layouts


def random_layout(num_blocks: int, max_group: int, rng: random.Random) -> GroupLayout:
    """A layout of `Lambda_rand`: group sizes uniform on 2..max_group until the blocks are covered, the last group
    clipped."""
    _check(num_blocks, max_group)
    sizes: list[int] = []
    blocks_left = num_blocks
    while blocks_left:
        sizes.append(min(rng.randint(2, max_group), blocks_left))
        blocks_left -= sizes[-1]
    return GroupLayout(tuple(sizes))


def released_random_layout(num_blocks: int, max_group: int, rng: random.Random) -> GroupLayout:
    """A random layout of the released code: a last group of one block is repaired, then sizes are shuffled.

    The repair (for `max_group` >= 3) grows the first group that has room by one block; without such a group it takes a
    block from a group of at least 3, so that the last group has two blocks. The paper has neither step.
    """
    sizes = list(random_layout(num_blocks, max_group, rng).sizes)
    if max_group >= 3 and sizes[-1] == 1:
        growing = next((i for i, size in enumerate(sizes[:-1]) if size < max_group), None)
        shrinking = next((i for i, size in enumerate(sizes[:-1]) if size >= 3), None)
        if growing is not None:
            sizes[growing] += 1
            sizes.pop()
        elif shrinking is not None:
            sizes[shrinking] -= 1
            sizes[-1] = 2
    rng.shuffle(sizes)
    return GroupLayout(tuple(sizes))


def one_group_layout(num_blocks: int) -> GroupLayout:
    """All blocks in one noise-group: with layouts over the response, D2F's fully block-causal variant (App. C.5)."""
    return GroupLayout((num_blocks,))


def single_block_layout(num_blocks: int) -> GroupLayout:
    """Teacher forcing as a layout: every block is a noise-group of its own, after a clean prefix (Eq. 2.7)."""
    return GroupLayout((1,) * num_blocks)


def layout_set(
    num_blocks: int,
    *,
    max_group: int,
    num_random: int,
    rng: random.Random,
    kind: Layouts = "systematic",
    random_sizes: RandomSizes = "paper",
) -> list[GroupLayout]:
    """`Lambda = Lambda_sys + Lambda_rand` (Eq. B.2), or only random layouts; `max_group=1` is plain teacher forcing.

    `one_group` and `d2f` are one layout, of one noise-group over all blocks; `none` is no layout.
    """
    if kind == "none":
        return []
    if kind in ("one_group", "d2f"):
        return [one_group_layout(num_blocks)]
    if max_group == 1:
        return [single_block_layout(num_blocks)]
    draw = random_layout if random_sizes == "paper" else released_random_layout
    random_layouts = [draw(num_blocks, max_group, rng) for _ in range(num_random)]
    return random_layouts if kind == "random" else systematic_layouts(num_blocks, max_group) + random_layouts


def _check(num_blocks: int, max_group: int) -> None:
    if num_blocks < 1:
        raise ValueError(f"num_blocks={num_blocks}: a layout needs at least one block")
    if max_group < 2:
        raise ValueError(f"max_group={max_group}: noise-groups hold at least 2 blocks; use 1 for teacher forcing")


Weighting = Literal["masked_mean", "block_ratio", "nelbo", "self_normalised", "ratio_mean", "label_mean"]
SAMPLE_MEANS: tuple[Weighting, ...] = ("masked_mean", "block_ratio", "nelbo")
"""Weights by which each sample counts once; other weights pool the labels of a batch."""
SelfDenoising = Literal["none", "both", "half"]


@configuration(panel=STATES)
class StateConfig:
    """The training states of a run.

    `layouts`         `systematic`: systematic layouts, and `num_random` random layouts in addition; `random`: only
                      random layouts; `one_group`: all blocks in one noise-group (App. C.5); `d2f`: native D2F, one
                      noisy stream without a clean stream, whose blocks begin at the prompt's end and see the whole
                      prompt; `none`: no noisy stream, only the AR loss
    `max_group`       the largest noise-group; 1 is teacher forcing, and the only value for `one_group` and `d2f`
    `num_layouts`     draw this number from the layout set for each sample, an unbiased estimate of Alg. 1's mean over
                      the whole set; `None` takes the whole set
    `random_sizes`    how random layouts are drawn: as in the paper, or repaired and shuffled as in the released code
    `span`            layouts partition the whole content (App. B.1), or begin at the first block with a response
                      token, where decoding begins
    `weighting`       of a sample's labels: Eq. B.11 (`masked_mean`), Eq. B.13 (`block_ratio`), or BD3LM's bound,
                      `sum(CE / t)` over the number of the answer's tokens (`nelbo`). Of the whole batch's labels:
                      SDAR's released loss, `sum(CE / t) / sum(1 / t)` (`self_normalised`), D2F's loss, the mean of
                      `CE / t` (`ratio_mean`), or the mean of CE (`label_mean`)
    `complementary`   a second stream for each noisy stream, which masks exactly the answer's tokens that the first
                      stream shows, so that each token is a label once (Fast-dLLM v2)
    `half_life_ratio` later positions of a block are masked more often if the block's ratio is low (`choose_masked`);
                      the half-life is this share of a block
    `block_warmup`    pairs (share of the run's updates, block size): up to this share of the updates, blocks have this
                      size; after the last pair they have `block_size` (`block_warmup`)
    `labels`          the positions with labels: the masked positions, or every position of the answer as DMax trains
                      (`answer_labels`)
    `self_denoising`  DMax's OPUT (Alg. 2), whose second branch sees the model's own predictions at masked positions:
                      `both` branches of every layout, or each layout in one of them, drawn evenly (`half`)
    `clean`           how clean tokens see each other: in blocks, as most models store their keys, or in order, for
                      models that store their keys by causal rows (Nemotron, TiDAR)
    `ar_weight`       the weight of the next token's CE on the same answers (`causal_stream`): it weights an answer's
                      mean if weights are means of samples, else each label in the pooled sum
    """

    block_size: Annotated[int, Ge(1)]
    """Tokens of a block, the trained model's too."""
    max_group: Annotated[int, Ge(1)] = 1
    """Blocks of the largest noise-group; 1: teacher forcing."""
    num_random: Annotated[int, Ge(0)] = 0
    """Random layouts in addition to the systematic layouts."""
    num_layouts: Annotated[int | None, Ge(1)] = None
    """Layouts drawn for each sample from the whole set; without a number, the whole set."""
    span: Literal["content", "response"] = "content"
    """Where layouts begin: at the first block, or at the response's first block."""
    schedule: Annotated[
        ScheduleName,
        Flag(
            help=f"The noise-schedule, which draws mask ratios: {', '.join(get_args(ScheduleName))}.",
            name="--noise",
            metavar="NAME",
        ),
    ] = "chain_uniform"
    bounds: NoiseBounds = NoiseBounds()
    rounding: Rounding = "floor"
    """Masked positions of a block, from its ratio."""
    weighting: Annotated[
        Weighting,
        Flag(help=f"The weight of each label in the loss: {', '.join(get_args(Weighting))}.", metavar="NAME"),
    ] = "masked_mean"
    layouts: Annotated[
        Layouts, Flag(help=f"How blocks are cut into noise-groups: {', '.join(get_args(Layouts))}.", metavar="NAME")
    ] = "systematic"
    random_sizes: RandomSizes = "paper"
    """How random layouts are drawn."""
    labels: Literal["masked", "answer"] = "masked"
    """Which positions have labels."""
    self_denoising: SelfDenoising = "none"
    """DMax's branches that see the model's own predictions."""
    complementary: bool = False
    """Each noisy stream a second time with the complement of its masks."""
    half_life_ratio: Annotated[float | None, Gt(0)] = None
    """Mask later positions of a block more often: at ratio 0, twice as often this share of a block later."""
    block_warmup: Annotated[tuple[tuple[float, int], ...], Flag(metavar="[[SHARE,SIZE],...]")] = ()
    """Block sizes of the first updates, before block_size; each size lasts up to its share of all updates."""
    clean: Literal["block_causal", "causal"] = "block_causal"
    """How clean tokens see each other: in blocks, or in order, for a model that stores its keys by causal rows."""
    ar_weight: Annotated[float, Ge(0)] = 0.0
    """Weight of the autoregressive loss beside the block loss, by which the model keeps its AR mode; 0: none."""

    def __post_init__(self) -> None:
        if self.layouts in ("one_group", "d2f", "none") and (self.max_group, self.num_random) != (1, 0):
            raise ValueError(f"layouts={self.layouts} is one layout: leave max_group at 1 and num_random at 0")
        if not self.fills_masks and (not self.ar_weight or self.labels != "masked" or self.self_denoising != "none"):
            raise ValueError(
                "layouts=none trains only the AR loss: give ar_weight above 0; leave labels and self_denoising out"
            )
        if self.layouts in ("d2f", "none") and (self.complementary or self.block_warmup or self.clean == "causal"):
            raise ValueError(
                f"layouts={self.layouts} has no clean stream: leave complementary, block_warmup and clean out"
            )
        if self.half_life_ratio is not None and self.rounding == "bernoulli":
            raise ValueError(
                "half_life_ratio orders a number of masked positions: give rounding=nearest, not bernoulli"
            )
        shares = [0.0, *(share for share, _ in self.block_warmup)]
        if shares != sorted(set(shares)) or shares[-1] >= 1.0 or any(size < 1 for _, size in self.block_warmup):
            raise ValueError(
                f"block_warmup={[list(pair) for pair in self.block_warmup]} must be pairs of a share of the updates, "
                "ascending and between 0 and 1, and a block size of at least 1"
            )
        if self.layouts == "d2f" and self.ar_weight:
            raise ValueError(
                f"ar_weight={self.ar_weight}: a model of layouts=d2f sees whole sequences and has no AR mode; leave "
                "ar_weight out"
            )
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

    @property
    def fills_masks(self) -> bool:
        """Whether there are noisy streams; without them, there is only the AR loss."""
        return self.layouts != "none"
