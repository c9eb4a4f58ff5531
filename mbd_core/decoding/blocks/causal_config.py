"""How a model that stores its keys by causal rows decodes (Nemotron-Labs-Diffusion): one token a forward, drafts that
are verified, or blocks; and how a request whose rows a decoder plans lies behind its stored prefix.

The next token follows from the last one's causal row; a masked position's token from a row without order. All three
methods work on one cache, so a request may change from drafts to single tokens at any forward.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from mbd_core.options import MOST, Option, check

CausalMethod = Literal["ar", "linear_spec", "dlm"]


@dataclass(frozen=True)
class PlannedRows:
    """How a request whose decoder plans its rows on the host lies in the cache, behind a stored prefix.

    longest   positions of the longest row that the decoder plans
    overhang  positions past the answer's end that its rows may reach
    seeds     known tokens that are left to the decoder's first row, because it needs the logits behind them
    store     positions of the rows that store a prefix: rows without order inside, the whole prompt as the first one;
              `None`: causal rows, of any length
    """

    longest: int
    overhang: int = 0
    seeds: int = 0
    store: int | None = None


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """The answer's thinking is ended after a number of tokens (the released rule)."""

    budget: Annotated[int, Option("Tokens of the answer behind which thinking is ended.", at_least=0, at_most=MOST)]
    end_token_id: Annotated[int, Option("The token that ends it.", at_least=0, at_most=MOST)]

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Causal:
    """Decoding behind a prefix that causal rows store. Raises `ValueError` for a field without effect."""

    method: Annotated[
        CausalMethod,
        Option(
            "ar: one token a forward. linear_spec: a block is drafted without order and verified by a causal row, as "
            "far as the two agree and one token more; greedy, and drawn, its tokens are those of ar. dlm: blocks are "
            "filled without order and then stored."
        ),
    ] = "linear_spec"
    block_length: Annotated[
        int | None,
        Option("Positions of a draft or a block.", at_least=1, at_most=MOST, default="the model's block size"),
    ] = None
    tau: Annotated[
        float | None,
        Option(
            "A forward fills the masks whose confidence >= tau, at least the best. null: dlm fills the best alone, a "
            "draft all in one forward.",
            at_least=0,
            at_most=1,
        ),
    ] = None
    context: Annotated[
        Literal["causal", "full"],
        Option("dlm: how the prompt and finished blocks are stored; full: without order, and no store gives a token."),
    ] = "causal"
    thinking: Annotated[Thinking | None, Option("An end of the answer's thinking.")] = None
    draft_adapter: Annotated[
        str | None,
        Option("linear_spec: the name of the LoRA adapter of the rows that draft; the others have the request's own."),
    ] = None

    def __post_init__(self) -> None:
        check(self)
        for name, methods in HAS_EFFECT.items():
            if getattr(self, name) != getattr(Causal, name) and self.method not in methods:
                raise ValueError(
                    f"causal.{name}={getattr(self, name)!r} has no effect with causal.method={self.method!r}; leave "
                    f"it out, or let method be {' or '.join(methods)}"
                )

    def row_length(self, block_size: int) -> int:
        """Positions of a draft or a block, of a model with this block size."""
        return 1 if self.method == "ar" else self.block_length or block_size

    def rows(self, block_size: int) -> PlannedRows:
        """How its requests lie in the cache."""
        length = self.row_length(block_size)
        if self.context == "full":
            return PlannedRows(longest=length, store=length)
        return PlannedRows(longest=length, overhang=length - 1 if self.method == "linear_spec" else 0, seeds=1)


HAS_EFFECT: dict[str, tuple[CausalMethod, ...]] = {
    "block_length": ("linear_spec", "dlm"),
    "tau": ("linear_spec", "dlm"),
    "context": ("dlm",),
    "draft_adapter": ("linear_spec",),
}
