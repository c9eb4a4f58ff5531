"""Decoding with a model that stores its keys by causal rows: tokens, drafts and blocks, or canvases of drawn tokens.

Nemotron-Labs-Diffusion decodes one token a forward, or drafts that are verified, or blocks. The last token's causal
row predicts the next token; a row without order predicts the tokens of masked positions. All three methods work on one
cache, so a request may change from drafts to single tokens at any forward. DiffusionGemma decodes canvases.

`PlannedRows` is the cache layout of such a request.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from mbd_core.fields import MOST, Flag, Ge, Gt, Le, check_effects, configuration

CausalMethod = Literal["ar", "linear_spec", "dlm"]


@dataclass(frozen=True)
class PlannedRows:
    """The cache layout, after a stored prefix, of a request whose decoder plans its rows on the host.

    longest   the most positions after the stored tokens that the rows of one forward reach
    rows      the most rows of one forward
    in_row    the most positions of one row; `None`: as many as `longest`
    gaps      whether a row's keys may lie after hidden keys (`Query.gap`)
    overhang  positions past the answer's end that its rows may reach
    seeds     known tokens that are left to the decoder's first row, because it needs the logits that follow them
    store     length of the rows that store a prefix, without order inside a row; `None`: causal rows of any length
    grid      decoding begins at a multiple of this, counted from the grid's origin
    full      the whole prompt is stored as one row, at whose end the grid begins; otherwise the grid begins at 0
    """

    longest: int
    rows: int = 1
    in_row: int | None = None
    gaps: bool = False
    overhang: int = 0
    seeds: int = 0
    store: int | None = None
    grid: int = 1
    full: bool = False


@configuration()
class Thinking:
    """The answer's thinking is ended after a number of tokens (the released rule)."""

    budget: Annotated[int, Ge(0), Le(MOST)]
    """Number of the answer's tokens after which thinking is ended."""
    end_token_id: Annotated[int, Ge(0), Le(MOST)]
    """The token that ends thinking."""


@configuration()
class Causal:
    """Decoding after a prefix that causal rows store. Raises `ValueError` for a field without effect."""

    method: CausalMethod = "linear_spec"
    """ar: one token a forward. linear_spec: a block is drafted without order, and a causal row verifies it. The
    tokens on which both agree are taken, and one token more; greedy or drawn, they are the tokens of ar. dlm: blocks
    are filled without order and then stored."""
    block_length: Annotated[int | None, Ge(1), Le(MOST), Flag(default="the model's block size")] = None
    """Positions of a draft or a block."""
    tau: Annotated[float | None, Ge(0), Le(1)] = None
    """A forward fills the masks whose confidence >= tau, at least the best mask. null: dlm fills the best mask alone,
    and a draft fills all its masks in one forward."""
    context: Literal["causal", "full"] = "causal"
    """dlm: how the prompt and finished blocks are stored. causal: by causal rows, whose last position predicts a
    token. full: by rows without order, which predict none."""
    ahead: bool = False
    """linear_spec: the forward that verifies a draft also drafts what follows, once for each number of tokens that it
    may accept (TiDAR): one forward for a draft instead of two, and block_length^2 positions more in it."""
    thinking: Thinking | None = None
    """An end of the answer's thinking."""
    draft_adapter: str | None = None
    """linear_spec: the name of the LoRA adapter of the rows that draft; the other rows have the request's own
    adapter."""

    def __post_init__(self) -> None:
        check_effects(self, "causal", chooser="method", effects=_METHOD_EFFECTS)
        for name in ("tau", "thinking"):
            if self.ahead and getattr(self, name) is not None:
                raise ValueError(
                    f"causal.ahead drafts once, before the tokens are known: leave out causal.{name}, or ahead"
                )

    def row_length(self, block_size: int) -> int:
        """Positions of a draft or a block, of a model with this block size."""
        return 1 if self.method == "ar" else self.block_length or block_size

    def rows(self, block_size: int) -> PlannedRows:
        """How its requests lie in the cache."""
        length = self.row_length(block_size)
        if self.ahead:
            copies = length * length
            return PlannedRows(
                longest=length + copies,
                rows=1 + length,
                in_row=length,
                gaps=True,
                overhang=length - 1 + copies,
                seeds=1,
            )
        if self.context == "full":
            return PlannedRows(longest=length, store=length, grid=length, full=True)
        return PlannedRows(longest=length, overhang=length - 1 if self.method == "linear_spec" else 0, seeds=1)


@configuration()
class Renoise:
    """DiffusionGemma: canvases of drawn tokens after a prefix that causal rows store. Each forward keeps tokens
    within a bound on entropy and draws the others anew. A canvas has the model's block size. Raises `ValueError`
    naming the field."""

    steps: Annotated[int, Ge(1), Le(MOST)] = 48
    """The most forwards of a canvas."""
    entropy_bound: Annotated[float, Ge(0)] = 0.1
    """Drawn tokens are kept, the lowest entropies first, while the entropies before a token's own sum to at most this,
    in nats; all other positions are drawn anew."""
    t_max: Annotated[float, Gt(0)] = 0.8
    """The temperature of a canvas's first forward."""
    t_min: Annotated[float, Gt(0)] = 0.4
    """The temperature falls in equal steps towards this value; a forward after the last one would have it."""
    stability: Annotated[int, Ge(0), Le(MOST)] = 1
    """A canvas may end once its likeliest tokens have stayed the same for this many forwards."""
    tau_entropy: Annotated[float, Ge(0)] = 0.005
    """A canvas may end only if the mean entropy of its positions is below this, in nats."""

    def __post_init__(self) -> None:
        if self.t_min > self.t_max:
            raise ValueError(f"renoise.t_min={self.t_min} exceeds renoise.t_max={self.t_max}")

    def rows(self, block_size: int) -> PlannedRows:
        """How its requests lie in the cache: a finished canvas is stored by the first forward of the next one."""
        return PlannedRows(longest=2 * block_size, overhang=block_size - 1)


_METHOD_EFFECTS: dict[str, tuple[CausalMethod, ...]] = {
    "block_length": ("linear_spec", "dlm"),
    "tau": ("linear_spec", "dlm"),
    "context": ("dlm",),
    "draft_adapter": ("linear_spec",),
    "ahead": ("linear_spec",),
}
