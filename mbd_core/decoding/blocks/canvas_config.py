"""How a full-attention model (LLaDA, Dream, DiffuCoder) fills a canvas: the prompt and `max_tokens` masks.

The methods differ in four things: which positions may be filled now (`block_length`), how many of them a step fills
(`accept`), by which score it ranks them (`score`), and what part of the canvas a forward recomputes (`cache`,
`refresh`).
"""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from mbd_core.options import MOST, Option, OptionRefused, check

LEAST_TAU_MERGE = 0.01  # bounds the 1 / tau_merge likeliest tokens that a branch keeps for each position


@dataclass(frozen=True, kw_only=True)
class Leap:
    """LocalLeap: positions with confidence >= `tau` are anchors; near an anchor `tau_relaxed` is enough."""

    tau_relaxed: Annotated[float, Option("Confidence that is enough near an anchor.", at_least=0, at_most=1)] = 0.75
    radius: Annotated[
        int, Option("Positions up to this distance from an anchor are near it.", at_least=1, at_most=MOST)
    ] = 4

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """dLLM-Cache: how often the keys and values of the prompt, and of the whole response, are recomputed, in steps.

    All other steps compute only the current block.
    """

    prompt_interval: Annotated[int, Option("Steps between two of the prompt.", at_least=1, at_most=MOST)] = 25
    response_interval: Annotated[int, Option("Steps between two of the whole response.", at_least=1, at_most=MOST)] = 5

    def __post_init__(self) -> None:
        check(self)


EosTest = Literal["always", "block_forward"]


@dataclass(frozen=True, kw_only=True)
class Branches:
    """BlockBatch: one branch for each block length decodes the same canvas at the same time."""

    block_lengths: Annotated[tuple[int, ...], Option("One for each branch, ascending.", at_least=1, at_most=MOST)] = (
        4,
        8,
        16,
        32,
        64,
        128,
    )
    tau_merge: Annotated[
        float,
        Option(
            "A branch copies another branch's token if its own probability of it exceeds this (1: never).",
            at_least=LEAST_TAU_MERGE,
            at_most=1,
        ),
    ] = 0.5
    tau_sync: Annotated[
        int,
        Option(
            "A branch that is more than this many tokens behind the leader is overwritten by it.",
            at_least=0,
            at_most=MOST,
        ),
    ] = 8
    refresh: Annotated[
        int,
        Option(
            "A branch requests a full forward of all branches after this many tokens of completed blocks.",
            at_least=1,
            at_most=MOST,
        ),
    ] = 32
    eos_test: Annotated[
        EosTest,
        Option(
            "When a branch may end the request. always: whenever its block with the EOS is complete. block_forward: "
            "only right after a block forward of that branch (Alg. 1 line 19, the released code)."
        ),
    ] = "always"

    def __post_init__(self) -> None:
        check(self)
        object.__setattr__(self, "block_lengths", tuple(self.block_lengths))
        if not self.block_lengths or list(self.block_lengths) != sorted(set(self.block_lengths)):
            raise OptionRefused("block_lengths", f"={self.block_lengths} must be ascending, each length once")


@dataclass(frozen=True, kw_only=True)
class MultiBlock:
    """d3LLM: several blocks of the canvas are decoded at once, and tokens are accepted by their entropy."""

    tau_entropy: Annotated[
        float, Option("A masked position becomes a token when its entropy, in nats, is at most this.", at_least=0)
    ] = 0.45
    tau_add: Annotated[
        float,
        Option("The next block is added when the last one has this share of its tokens.", at_least=0, at_most=1),
    ] = 0.1
    tau_active: Annotated[
        float,
        Option(
            "A block is active once the one before it has this share of its tokens. The first active block gets its "
            "best token in every forward.",
            at_least=0,
            at_most=1,
        ),
    ] = 0.95
    cache_delay: Annotated[
        int | None,
        Option(
            "A done block is stored this many forwards after it was done; null: nothing is stored.",
            at_least=0,
            at_most=MOST,
        ),
    ] = None
    refresh: Annotated[
        int | None,
        Option(
            "With a cache: every so many forwards the whole canvas is computed again (null: never).",
            at_least=1,
            at_most=MOST,
        ),
    ] = None
    rule: Annotated[
        Literal["llada", "dream"] | None,
        Option(
            "The released rule. llada: entropy <= tau_entropy, and always the lowest. dream: entropy < tau_entropy. "
            "null: that of the model, by whether its logits are shifted.",
            default="the model's",
        ),
    ] = None

    def __post_init__(self) -> None:
        check(self)
        if self.refresh is not None and self.cache_delay is None:
            raise OptionRefused("refresh", f"={self.refresh} has no effect without cache_delay; leave it out")


Accept = Literal["quota", "schedule", "origin", "threshold", "factor"]
Score = Literal["confidence", "margin", "neg_entropy", "random"]
Cache = Literal["none", "prefix", "dual"]


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """One full-attention method; the defaults are Fast-dLLM's threshold decoding without a cache.

    Raises `ValueError` naming the field, also for a field without effect under the other fields.
    """

    block_length: Annotated[
        int | None,
        Option(
            "Positions that may be filled now, from the prompt's end on; null: the whole canvas (Dream).",
            at_least=1,
            at_most=MOST,
        ),
    ] = 32
    steps: Annotated[
        int | None,
        Option(
            "With accept = quota, schedule or origin: forwards for the whole canvas (default: max_tokens). With "
            "threshold: a step fills at most 1 / steps of the canvas plus what earlier steps of the block left unused "
            "(Fast-dLLM for Dream; default: no bound).",
            at_least=1,
            at_most=MOST,
        ),
    ] = None
    accept: Annotated[
        Accept,
        Option(
            "quota: an equal share of the block in each of its steps (LLaDA). schedule: int(masked * (1 - s / t)) "
            "positions a step, for times from 1 to `eps` (Dream); all `steps` forwards run, also those that accept "
            "nothing: that is the baseline's cost. origin: each position with probability 1 - s / t (Dream). "
            'threshold: all positions with confidence >= tau, at least the best (Fast-dLLM; ">=" as released). '
            "factor: the best n positions, for the largest n with (n + 1)(1 - c_n) <= factor (Fast-dLLM, Sec. 3)."
        ),
    ] = "threshold"
    score: Annotated[
        Score,
        Option(
            'What "best" means: highest probability of the token, largest lead over the second token, lowest entropy, '
            "or a random order."
        ),
    ] = "confidence"
    score_temperature: Annotated[
        float,
        Option(
            "quota and schedule draw their positions with odds exp(score / score_temperature) (Dream's `alg_temp`; 0: "
            "take the best).",
            at_least=0,
        ),
    ] = 0.0
    tau: Annotated[float, Option("The threshold of `accept` = threshold.", at_least=0, at_most=1)] = 0.9
    factor: Annotated[float, Option("The factor of `accept` = factor.", at_least=0)] = 1.0
    eps: Annotated[float, Option("The last time of `accept` = schedule or origin.", at_least=0, at_most=1)] = 1e-3
    cache: Annotated[
        Cache,
        Option(
            "none: every forward computes the whole canvas. prefix: the first forward of a block computes the whole "
            "canvas, the others the block and all after it. dual: the others the block (Fast-dLLM)."
        ),
    ] = "none"
    refresh: Annotated[Refresh | None, Option("dLLM-Cache's intervals instead of `cache`.")] = None
    cfg_scale: Annotated[
        float,
        Option(
            "Classifier-free guidance: logits are un + (cfg_scale + 1)(cond - un), from a second lane (LLaDA).",
            at_least=0,
        ),
    ] = 0.0
    forbid_eos: Annotated[bool, Option("EOS is never predicted and has probability 0 (LLaDA's `logits_eos_inf`).")] = (
        False
    )
    leap: Annotated[Leap | None, Option("LocalLeap's relaxed threshold.")] = None
    branches: Annotated[Branches | None, Option("BlockBatch.")] = None
    multi_block: Annotated[MultiBlock | None, Option("d3LLM's several blocks at once.")] = None

    def __post_init__(self) -> None:
        check(self)
        self._check_parts()

    def _check_parts(self) -> None:
        """Raise `ValueError` for fields that contradict each other."""
        for name, needed in NEEDS_ACCEPT.items():
            if self.accept not in needed and getattr(self, name) != DEFAULTS[name]:
                raise ValueError(
                    f"canvas.{name}={getattr(self, name)!r} has no effect with canvas.accept={self.accept!r}; "
                    f"leave it out, or let accept be {' or '.join(needed)}"
                )
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
# Parts that replace most of the other fields, and those that stay beside them.
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
