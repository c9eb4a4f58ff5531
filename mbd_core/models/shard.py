"""The part of each tensor that a tensor-parallel rank holds.

Projections into heads and MLP channels are cut by output rows, projections back (o_proj, down_proj) by input columns.
Every rank holds a part of each expert's width. In serving, a rank also holds a part of the vocabulary: rows of the
embeddings and of the lm_head. All other tensors are whole on every rank.
"""

from dataclasses import dataclass

ROWS = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "q_proj.bias",
    "k_proj.bias",
    "v_proj.bias",
    "gate_proj.weight",
    "up_proj.weight",
)
COLUMNS = ("o_proj.weight", "down_proj.weight", "experts.gate_proj", "experts.up_proj")
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Rank `rank` of `size` tensor-parallel ranks."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size} tensor-parallel ranks does not exist")

    def part(self, length: int) -> range:
        """The rank's part of `length` rows, cut as by `Tensor.chunk`: the last rank has fewer rows if they do not
        divide."""
        rows = -(-length // self.size)
        return range(min(self.rank * rows, length), min((self.rank + 1) * rows, length))


def split_dim(name: str) -> int | None:
    """The dimension along which the layer tensor `name` is cut, `None` if every rank holds it whole."""
    if name.endswith(ROWS):
        return 0
    if name.endswith(COLUMNS):
        return 1
    return 2 if name.endswith("experts.down_proj") else None


def served_dim(name: str) -> int | None:
    """The dimension along which an engine's rank holds a part of the tensor `name`, `None` if it holds all of it."""
    return 0 if name.endswith(VOCABULARY) else split_dim(name)
