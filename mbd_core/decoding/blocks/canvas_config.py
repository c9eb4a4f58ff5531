"""How a full-attention model (LLaDA, Dream, DiffuCoder) fills a canvas: the prompt and `max_tokens` masks.

The methods differ in four things: which positions may be filled now (`block_length`), how many of them a step fills
(`accept`), by which score it ranks them (`score`), and what part of the canvas a forward recomputes (`cache`,
`refresh`).
"""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from mbd_core.decoding.checks import check_choice, check_count, check_share, check_weight

LEAST_TAU_MERGE = 0.01  # bounds the 1 / tau_merge likeliest tokens that a branch keeps for each position


@dataclass(frozen=True, kw_only=True)
class Leap:
    """LocalLeap: positions with confidence >= `tau` are anchors; near an anchor `tau_relaxed` is enough.

    radius  positions up to this distance from an anchor are near it
    """

    tau_relaxed: float = 0.75
    radius: int = 4

    def __post_init__(self) -> None:
        check_share("leap.", "tau_relaxed", self.tau_relaxed)
        check_count("leap.", "radius", self.radius)


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """dLLM-Cache: how often the keys and values of the prompt, and of the whole response, are recomputed, in steps.

    All other steps compute only the current block.
    """

    prompt_interval: int = 25
    response_interval: int = 5

    def __post_init__(self) -> None:
        check_count("refresh.", "prompt_interval", self.prompt_interval)
        check_count("refresh.", "response_interval", self.response_interval)


EosTest = Literal["always", "block_forward"]


@dataclass(frozen=True, kw_only=True)
class Branches:
    """BlockBatch: one branch for each block length decodes the same canvas at the same time.

    block_lengths  ascending
    tau_merge      a branch copies another branch's token if its own probability of it exceeds this (1: never)
    tau_sync       a branch that is more than this many tokens behind the leader is overwritten by it
    refresh        a branch requests a full forward of all branches after this many tokens of completed blocks
    eos_test       when a branch may end the request. always: whenever its block with the EOS is complete.
                   block_forward: only right after a block forward of that branch (Alg. 1 line 19, the released code)
    """

    block_lengths: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    tau_merge: float = 0.5
    tau_sync: int = 8
    refresh: int = 32
    eos_test: EosTest = "always"

    def __post_init__(self) -> None:
        if not isinstance(self.block_lengths, list | tuple):
            raise ValueError(f"branches.block_lengths={self.block_lengths!r} must be a list of block lengths")
        object.__setattr__(self, "block_lengths", tuple(self.block_lengths))
        for length in self.block_lengths:
            check_count("branches.", "block_lengths", length)
        if not self.block_lengths or list(self.block_lengths) != sorted(set(self.block_lengths)):
            raise ValueError(f"branches.block_lengths={self.block_lengths} must be ascending, each length once")
        check_share("branches.", "tau_merge", self.tau_merge)
        if self.tau_merge < LEAST_TAU_MERGE:
            raise ValueError(f"branches.tau_merge={self.tau_merge} must be at least {LEAST_TAU_MERGE}")
        check_count("branches.", "tau_sync", self.tau_sync, least=0)
        check_count("branches.", "refresh", self.refresh)
        check_choice("branches.", "eos_test", self.eos_test, get_args(EosTest))


Accept = Literal["quota", "schedule", "origin", "threshold", "factor"]
Score = Literal["confidence", "margin", "neg_entropy", "random"]
Cache = Literal["none", "prefix", "dual"]


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """One full-attention method; the defaults are Fast-dLLM's threshold decoding without a cache.

    block_length       positions that may be filled now, from the prompt's end on; `None`: the whole canvas (Dream)
    steps              with accept = quota, schedule or origin: forwards for the whole canvas (default: max_tokens).
                       With threshold: a step fills at most 1 / steps of the canvas plus what earlier steps of the
                       block left unused (Fast-dLLM for Dream; default: no bound)
    accept             quota      an equal share of the block in each of its steps (LLaDA)
                       schedule   int(masked * (1 - s / t)) positions a step, for times from 1 to `eps` (Dream). All
                                  `steps` forwards run, also those that accept nothing: that is the baseline's cost
                       origin     each position with probability 1 - s / t (Dream's `origin`)
                       threshold  all positions with confidence >= tau, at least the best (Fast-dLLM; ">=" as released)
                       factor     the best n positions, for the largest n with (n + 1)(1 - c_n) <= factor (Fast-dLLM,
                                  Sec. 3)
    score              what "best" means: highest probability of the token, largest lead over the second token, lowest
                       entropy, or a random order
    score_temperature  quota and schedule draw their positions with odds exp(score / score_temperature) (Dream's
                       `alg_temp`; 0: take the best)
    cache              none: every forward computes the whole canvas. prefix: the first forward of a block computes the
                       whole canvas, the others the block and all after it. dual: the others the block (Fast-dLLM)
    refresh            dLLM-Cache's intervals instead of `cache`
    cfg_scale          classifier-free guidance: logits are un + (cfg_scale + 1)(cond - un), from a second lane (LLaDA)
    forbid_eos         EOS is never predicted and has probability 0 (LLaDA's `logits_eos_inf`)
    leap               LocalLeap's relaxed threshold
    branches           BlockBatch

    Raises `ValueError` naming the field, also for a field without effect under the other fields.
    """

    block_length: int | None = 32
    steps: int | None = None
    accept: Accept = "threshold"
    score: Score = "confidence"
    score_temperature: float = 0.0
    tau: float = 0.9
    factor: float = 1.0
    eps: float = 1e-3
    cache: Cache = "none"
    refresh: Refresh | None = None
    cfg_scale: float = 0.0
    forbid_eos: bool = False
    leap: Leap | None = None
    branches: Branches | None = None

    def __post_init__(self) -> None:
        for name in ("block_length", "steps"):
            if getattr(self, name) is not None:
                check_count("canvas.", name, getattr(self, name))
        for name, hint in (("accept", Accept), ("score", Score), ("cache", Cache)):
            check_choice("canvas.", name, getattr(self, name), get_args(hint))
        for name in ("tau", "eps"):
            check_share("canvas.", name, getattr(self, name))
        for name in ("score_temperature", "factor", "cfg_scale"):
            check_weight("canvas.", name, getattr(self, name))
        check_choice("canvas.", "forbid_eos", self.forbid_eos, (True, False))
        for name, kind in (("refresh", Refresh), ("leap", Leap), ("branches", Branches)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"canvas.{name}={value!r} must be an object with the fields of {kind.__name__}")
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
        if self.branches is None:
            return
        for name, default in DEFAULTS.items():
            if name not in WITH_BRANCHES and getattr(self, name) != default:
                raise ValueError(f"canvas.{name}={getattr(self, name)!r} cannot be honoured with canvas.branches")


DEFAULTS = {f.name: f.default for f in fields(Canvas)}
WITH_BRANCHES = ("tau", "forbid_eos", "branches")
NEEDS_ACCEPT: dict[str, tuple[str, ...]] = {
    "steps": ("quota", "schedule", "origin", "threshold"),
    "score": ("quota", "schedule", "threshold"),
    "score_temperature": ("quota", "schedule"),
    "tau": ("threshold",),
    "factor": ("factor",),
    "eps": ("schedule", "origin"),
    "leap": ("threshold",),
}
