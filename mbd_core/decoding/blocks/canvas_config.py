"""How a full-attention model (LLaDA, Dream, DiffuCoder) fills a canvas: the prompt and `max_tokens` masks.

The methods differ in four things: which positions may be filled now (`block_length`), how many of them a step fills
(`accept`), by which score it ranks them (`score`), and what part of the canvas a forward recomputes (`cache`,
`refresh`).
"""

from dataclasses import fields
from typing import Annotated, Literal

from mbd_core.fields import MOST, Flag, Ge, Le, check_effects, configuration

LEAST_TAU_MERGE = 0.01  # bounds the 1 / tau_merge likeliest tokens that a branch keeps for each position


@configuration()
class Leap:
    """LocalLeap: positions with confidence >= `tau` are anchors; near an anchor `tau_relaxed` is enough."""

    tau_relaxed: Annotated[float, Ge(0), Le(1)] = 0.75
    """Confidence that is enough near an anchor."""
    radius: Annotated[int, Ge(1), Le(MOST)] = 4
    """Positions up to this distance from an anchor are near it."""


@configuration()
class Refresh:
    """dLLM-Cache: how often the keys and values of the prompt, and of the whole response, are recomputed, in steps.

    All other steps compute only the current block.
    """

    prompt_interval: Annotated[int, Ge(1), Le(MOST)] = 25
    """The number of steps from one recomputation of the prompt to the next."""
    response_interval: Annotated[int, Ge(1), Le(MOST)] = 5
    """The number of steps from one recomputation of the whole response to the next."""


EosTest = Literal["always", "block_forward"]


@configuration()
class Branches:
    """BlockBatch: one branch for each block length decodes the same canvas at the same time."""

    block_lengths: tuple[Annotated[int, Ge(1), Le(MOST)], ...] = (
        4,
        8,
        16,
        32,
        64,
        128,
    )
    """The block length of each branch, ascending."""
    tau_merge: Annotated[float, Ge(LEAST_TAU_MERGE), Le(1)] = 0.5
    """A branch copies another branch's token if its own probability of that token exceeds this (1: never)."""
    tau_sync: Annotated[int, Ge(0), Le(MOST)] = 8
    """A branch that is more than this many tokens behind the leader is overwritten by it."""
    refresh: Annotated[int, Ge(1), Le(MOST)] = 32
    """A branch requests a full forward of all branches after this many tokens of completed blocks."""
    eos_test: EosTest = "always"
    """When a branch may end the request. always: whenever its block with the EOS is complete. block_forward: only
    right after a block forward of that branch (Alg. 1 line 19, the released code)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_lengths", tuple(self.block_lengths))
        if not self.block_lengths or list(self.block_lengths) != sorted(set(self.block_lengths)):
            raise ValueError(f"canvas.branches.block_lengths={self.block_lengths} must be ascending, each length once")


@configuration()
class MultiBlock:
    """d3LLM: several blocks of the canvas are decoded at once, and tokens are accepted by their entropy."""

    tau_entropy: Annotated[float, Ge(0)] = 0.45
    """A masked position becomes a token when its entropy, in nats, is at most this."""
    tau_add: Annotated[float, Ge(0), Le(1)] = 0.1
    """The next block is added when the last block has this share of its tokens."""
    tau_active: Annotated[float, Ge(0), Le(1)] = 0.95
    """A block is active once the block before it has this share of its tokens. The first active block gets its best
    token in every forward."""
    cache_delay: Annotated[int | None, Ge(0), Le(MOST)] = None
    """Forwards between the one that fills a block's last position and the one that stores it; null: none stores it."""
    refresh: Annotated[int | None, Ge(1), Le(MOST)] = None
    """With a cache: the number of forwards after which the whole canvas is computed again (null: never)."""
    rule: Annotated[Literal["llada", "dream"] | None, Flag(default="the model's")] = None
    """The released rule. llada: entropy <= tau_entropy, and always the lowest. dream: entropy < tau_entropy. null:
    dream for a model with shifted logits, else llada."""

    def __post_init__(self) -> None:
        if self.refresh is not None and self.cache_delay is None:
            raise ValueError(
                f"canvas.multi_block.refresh={self.refresh} has no effect without cache_delay; leave it out"
            )


Accept = Literal["quota", "schedule", "origin", "threshold", "factor"]
Score = Literal["confidence", "margin", "neg_entropy", "random"]
Cache = Literal["none", "prefix", "dual"]


@configuration()
class Canvas:
    """One full-attention method; the defaults are Fast-dLLM's threshold decoding without a cache.

    Raises `ValueError` naming the field, also for a field without effect under the other fields.
    """

    block_length: Annotated[int | None, Ge(1), Le(MOST)] = 32
    """Length of the blocks, which are filled from left to right, from the prompt's end on; null: one block (Dream)."""
    steps: Annotated[int | None, Ge(1), Le(MOST)] = None
    """With accept = quota, schedule or origin: forwards for the whole canvas (default: max_tokens). With threshold: a
    step fills at most 1 / steps of the canvas plus what earlier steps of the block left unused (Fast-dLLM for Dream;
    default: no bound)."""
    accept: Accept = "threshold"
    """quota: an equal share of the block in each of its steps (LLaDA). schedule: int(masked * (1 - s / t)) positions
    in the step from time t to time s, where times fall from 1 to `eps` (Dream); all `steps` forwards run, even if they
    accept nothing, for the baseline's cost. origin: each position with probability 1 - s / t (Dream). threshold: all
    positions with confidence >= tau, at least the best (Fast-dLLM; ">=" as released). factor: the best n, for the
    largest n with (n + 1)(1 - c_n) <= factor, at least the best (Fast-dLLM, Sec. 3)."""
    score: Score = "confidence"
    """What "best" means: highest probability of the token, largest lead over the second token, lowest entropy, or a
    random order."""
    score_temperature: Annotated[float, Ge(0)] = 0.0
    """quota and schedule draw their positions with odds exp(score / score_temperature) (Dream's `alg_temp`; 0: take
    the best)."""
    tau: Annotated[float, Ge(0), Le(1)] = 0.9
    """The threshold of `accept` = threshold."""
    factor: Annotated[float, Ge(0)] = 1.0
    """The factor of `accept` = factor."""
    eps: Annotated[float, Ge(0), Le(1)] = 1e-3
    """The last time of `accept` = schedule or origin."""
    cache: Cache = "none"
    """none: every forward computes the whole canvas. prefix: the first forward of a block computes the whole canvas,
    its other forwards the block and all positions after it. dual: its other forwards the block alone (Fast-dLLM)."""
    refresh: Refresh | None = None
    """dLLM-Cache's intervals instead of `cache`."""
    cfg_scale: Annotated[float, Ge(0)] = 0.0
    """Classifier-free guidance: logits are un + (cfg_scale + 1)(cond - un), from a second lane (LLaDA)."""
    forbid_eos: bool = False
    """EOS is never predicted and has probability 0 (LLaDA's `logits_eos_inf`)."""
    leap: Leap | None = None
    """LocalLeap's relaxed threshold."""
    branches: Branches | None = None
    """BlockBatch."""
    multi_block: MultiBlock | None = None
    """d3LLM's several blocks at once."""

    def __post_init__(self) -> None:
        self._check_parts()

    def _check_parts(self) -> None:
        """Raise `ValueError` for fields that contradict each other."""
        check_effects(self, "canvas", chooser="accept", effects=NEEDS_ACCEPT)
        if self.leap and self.leap.tau_relaxed > self.tau:
            raise ValueError(f"canvas.leap.tau_relaxed={self.leap.tau_relaxed} exceeds canvas.tau={self.tau}")
        if self.score_temperature and self.score == "random":
            raise ValueError("canvas.score_temperature has no effect with canvas.score='random'; leave it out")
        if self.refresh and self.cache != "none":
            raise ValueError(f"canvas.refresh cannot be honoured with canvas.cache={self.cache!r}; leave one out")
        if self.refresh and self.block_length is None and self.refresh.response_interval > 1:
            raise ValueError(
                f"canvas.refresh.response_interval={self.refresh.response_interval} needs canvas.block_length: "
                "without blocks every forward computes the whole response"
            )
        for part, allowed in ALONE.items():
            if getattr(self, part) is None:
                continue
            for name, default in DEFAULTS.items():
                if name not in (part, *allowed) and getattr(self, name) != default:
                    raise ValueError(f"canvas.{name}={getattr(self, name)!r} cannot be honoured with canvas.{part}")


DEFAULTS = {f.name: f.default for f in fields(Canvas)}
# Parts that replace most of the other fields, and the fields that may still be set beside them.
ALONE = {"branches": ("tau", "forbid_eos"), "multi_block": ("block_length", "forbid_eos")}
NEEDS_ACCEPT: dict[str, tuple[str, ...]] = {
    "steps": ("quota", "schedule", "origin", "threshold"),
    "score": ("quota", "schedule", "threshold"),
    "score_temperature": ("quota", "schedule"),
    "tau": ("threshold",),
    "factor": ("factor",),
    "eps": ("schedule", "origin"),
    "leap": ("threshold",),
}
