"""The duration of a step on a chip: its forwards by the roofline, the engine's own part, and the longest term.

No number here was measured on a GPU. The fractions of the data sheet's rates that kernels reach, and the time between
kernels, are estimates (benchmarks/capacity/README.md). They are options, so that a machine's own numbers can replace
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from benchmarks.capacity.chips import CHIPS, Chip
from mbd_core.fields import ENGINE, MODEL, Flag, Ge, Gt, Le, configuration
from mbd_core.models.model_config import Fp8Parts, ModelConfig
from mbd_core.models.shapes import SHAPES

if TYPE_CHECKING:
    from benchmarks.roofline import ForwardCost

Bound = Literal["bandwidth", "arithmetic", "launches", "host"]
RANK_COUNTS = (1, 2, 4, 8)
CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class Work:
    """The load of one forward.

    live_tokens   tokens whose outputs are read afterwards; only these choose experts
    scores        number of pairs of a query and a key that it attends to
    kv_tokens     tokens whose keys and values are read or written
    logit_tokens  positions with logits
    launched      whether its kernels are launched one by one, not as a graph
    """

    tokens: int
    live_tokens: int
    scores: int
    kv_tokens: int
    logit_tokens: int
    launched: bool = False

    def __add__(self, other: Work) -> Work:
        """One forward with both loads."""
        return Work(
            tokens=self.tokens + other.tokens,
            live_tokens=self.live_tokens + other.live_tokens,
            scores=self.scores + other.scores,
            kv_tokens=self.kv_tokens + other.kv_tokens,
            logit_tokens=self.logit_tokens + other.logit_tokens,
            launched=self.launched or other.launched,
        )


def prompt_work(start: int, stop: int, *, block_size: int) -> Work:
    """A chunk of a prompt's whole blocks, from token `start` to `stop`; each block attends to all up to its end."""
    blocks = (stop - start) // block_size
    scores = block_size * (blocks * start + block_size * blocks * (blocks + 1) // 2)
    return Work(tokens=stop - start, live_tokens=stop - start, scores=scores, kv_tokens=stop, logit_tokens=0)


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """A step's seconds, and the term that takes most of them."""

    seconds: float
    bound: Bound


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """The seconds of steps: the seconds of their forwards, which depend on their loads, and the host's part.

    bandwidth    bytes a second that forwards reach
    flops        operations a second in matrix products
    score_flops  operations a second in attention
    fixed        seconds that a forward takes whatever its load, as a graph
    launched     the same if the host launches its kernels one by one
    host         seconds of a step's work on the host
    overlap      whether the host works while the device works
    link         bytes a second between the `ranks`, which sum `num_sums` times in a forward
    """

    cost: ForwardCost
    bandwidth: float
    flops: float
    score_flops: float
    fixed: float
    launched: float
    host: float
    overlap: bool
    hidden_size: int = 0
    num_sums: int = 0
    ranks: int = 1
    link: float = 0.0

    def terms(self, work: Work) -> dict[Bound, float]:
        """The seconds of a forward by bound. Bytes and operations overlap; launches come on top."""
        cost = self.cost.of(
            tokens=work.tokens,
            scores=0,
            kv_tokens=work.kv_tokens,
            logit_tokens=work.logit_tokens,
            live_tokens=work.live_tokens,
        )
        scores = work.scores * self.cost.score_flops / self.score_flops
        return {
            "bandwidth": cost.bytes / self.bandwidth,
            "arithmetic": cost.flops / self.flops + scores,
            "launches": (self.launched if work.launched else self.fixed) + self._sums(work.tokens),
        }

    def _sums(self, tokens: int) -> float:
        """The seconds of the ranks' sums: in one shot if the parts are small, else over a ring."""
        if self.ranks == 1:
            return 0.0
        part = tokens * self.hidden_size * 2
        if part <= ONE_SHOT[min(self.ranks, 4)]:
            return self.num_sums * (ONE_SHOT_SECONDS + (self.ranks - 1) * part / self.link)
        return self.num_sums * (RING_SECONDS + 2 * (self.ranks - 1) / self.ranks * part / self.link)

    def forward(self, work: Work) -> float:
        """Seconds of one forward."""
        terms = self.terms(work)
        return max(terms["bandwidth"], terms["arithmetic"]) + terms["launches"]

    def step(self, forwards: Sequence[Work]) -> StepSeconds:
        """A step of these forwards, one after the other."""
        device = sum(self.forward(work) for work in forwards)
        if self.overlap and self.host > device:
            return StepSeconds(seconds=self.host, bound="host")
        sums: dict[Bound, float] = {}
        for work in forwards:
            for name, seconds in self.terms(work).items():
                sums[name] = sums.get(name, 0.0) + seconds
        bound = max(sums, key=lambda name: sums[name])
        if not self.overlap and self.host > sums[bound]:
            bound = "host"
        return StepSeconds(seconds=device if self.overlap else device + self.host, bound=bound)


ONE_SHOT = {2: 8 * 2**20, 4: 512 * 2**10}  # bytes of a rank's part, by ranks; docs/reference/gpu.md
ONE_SHOT_SECONDS, RING_SECONDS = 6e-6, 17e-6  # of one sum; published: 7 us at 0.5 MB, 16 to 18 us in graphs (NCCL)
NODES_A_LAYER, NODES_BESIDE = 12, 8  # of a captured step: python -m benchmarks.gpu.step_nodes


OF_GPUS = (
    "fp8",
    "tensor_parallel",
    "bandwidth_share",
    "flops_share",
    "score_share",
    "node_us",
    "launch_us",
    "host_ms",
)
"""The fields of a deployment that have no meaning on a CPU."""


@configuration(panel=ENGINE)
class Deployment:
    """A model on a number of GPUs, with assumptions on them."""

    model: Annotated[str, Flag(help=f"A shape: {', '.join(SHAPES)}.", panel=MODEL)] = "llada2-mini"
    chip: Annotated[
        str, Flag(help=f"The GPU, {' or '.join(CHIPS)}, or {CPU}: this machine, measured on one thread.", panel=MODEL)
    ] = "h100"
    fp8: Annotated[Fp8Parts | None, Flag(panel=MODEL)] = None
    """Weights that are rounded to one byte."""
    tensor_parallel: Annotated[int, Ge(1)] = 1
    """GPUs of a replica."""
    memory_fraction: Annotated[float, Gt(0), Le(1)] = 0.9
    """Share of a GPU's memory for weights, activations and pages."""
    bandwidth_share: Annotated[float, Gt(0), Le(1)] = 0.9
    """Share of the data sheet's bytes a second that kernels reach."""
    flops_share: Annotated[float, Gt(0), Le(1)] = 0.6
    """Share of the data sheet's operations a second that matrix products reach."""
    score_share: Annotated[float, Gt(0), Le(1)] = 0.4
    """Share of the data sheet's operations a second that attention reaches."""
    node_us: Annotated[float, Ge(0)] = 5.5
    """Microseconds from the end of a graph's kernel to the beginning of the next."""
    launch_us: Annotated[float, Ge(0)] = 10.0
    """The same if the host launches each kernel."""
    host_ms: Annotated[float, Ge(0)] = 0.2
    """Milliseconds of a step's work on the host."""

    def __post_init__(self) -> None:
        for name, known in (("model", SHAPES), ("chip", (*CHIPS, CPU))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)} must be one of {', '.join(known)}")
        if self.fp8 in ("experts", "blocks") and self.config.moe is None:
            raise ValueError(
                f"fp8={self.fp8} cannot be honoured: {self.model} has no experts; fp8=all rounds its layers"
            )
        given = [name for name in OF_GPUS if getattr(self, name) != getattr(Deployment, name)]
        if self.chip == CPU and given:
            raise ValueError(f"chip=cpu is measured as it is: leave out {' and '.join(given)}")
        self.config.sharded(self.tensor_parallel)

    def describe(self) -> str:
        """The model, its precision and its GPUs."""
        precision = "bfloat16" if self.fp8 is None else f"FP8 ({self.fp8})"
        return f"{self.model} in {precision} on {self.tensor_parallel} x {self.sheet.describe()}"

    @property
    def config(self) -> ModelConfig:
        return SHAPES[self.model]

    @property
    def sheet(self) -> Chip:
        """The chip's data sheet."""
        return CHIPS[self.chip]

    def cost(self) -> ForwardCost:
        """The costs of one rank's forwards."""
        from benchmarks.roofline import ForwardCost

        return ForwardCost(
            self.config,
            matrix_bytes=1 if self.fp8 == "all" else None,
            expert_bytes=1 if self.fp8 else None,
            ranks=self.tensor_parallel,
        )

    def steps(self) -> StepModel:
        """The step model: static forwards run as graphs, the forwards of prompts kernel by kernel."""
        chip, num_layers = self.sheet, self.config.num_layers
        nodes = NODES_A_LAYER * num_layers + NODES_BESIDE
        return StepModel(
            cost=self.cost(),
            bandwidth=self.bandwidth_share * chip.bandwidth,
            flops=self.flops_share * chip.flops,
            score_flops=self.score_share * chip.flops,
            fixed=nodes * self.node_us * 1e-6,
            launched=nodes * self.launch_us * 1e-6,
            host=self.host_ms * 1e-3,
            overlap=True,
            hidden_size=self.config.hidden_size,
            num_sums=2 * num_layers + 1,
            ranks=self.tensor_parallel,
            link=chip.nvlink,
        )

    @property
    def activation_bytes(self) -> float:
        """An estimate of the bytes that a rank's largest step needs in addition to weights and pages: the logits that
        are held at once with their copies, and the hidden states and MLPs of a prompt's chunk. The sum counts twice,
        because graphs keep their own buffers."""
        c = self.config.sharded(self.tensor_parallel)
        width = c.intermediate_size if c.moe is None else c.moe.intermediate_size * c.moe.experts_per_token
        return 2 * (LOGIT_BYTES + CHUNK * 2.0 * (4 * c.hidden_size + 3 * width))

    @property
    def page_bytes(self) -> float:
        """Bytes of a rank that are left for pages."""
        budget = self.memory_fraction * self.sheet.memory
        return budget - self.cost().stored_bytes - self.activation_bytes

    def check_memory(self, tokens: int) -> None:
        """Raise `ValueError` unless the weights and the keys and values of `tokens` fit. The message says what would
        fit."""
        if self.page_bytes >= tokens * self.cost().kv_token_bytes:
            return
        need = self.cost().stored_bytes + self.activation_bytes + tokens * self.cost().kv_token_bytes
        raise ValueError(
            f"{self.model} needs {need / 1e9:.0f} GB a GPU for its weights and one sequence of {tokens} tokens, and "
            f"{self.memory_fraction:g} of an {self.sheet.name} are "
            f"{self.memory_fraction * self.sheet.memory / 1e9:.0f} GB; {self._what_fits(tokens)}"
        )

    def _what_fits(self, tokens: int) -> str:
        parts: list[Fp8Parts | None] = [self.fp8]
        if self.fp8 is None:
            parts.append("all" if self.config.moe is None else "experts")
        for fp8 in parts:
            for ranks in RANK_COUNTS:
                try:
                    other = replace(self, fp8=fp8, tensor_parallel=ranks)
                except ValueError:
                    continue  # the ranks do not divide the model's sizes
                if other.page_bytes >= tokens * other.cost().kv_token_bytes:
                    rounded = "" if fp8 is self.fp8 else f" --fp8 {fp8}"
                    return f"it fits with --tensor-parallel {ranks}{rounded}"
        most = replace(self, fp8=parts[-1])
        lengths = most.page_bytes / most.cost().kv_token_bytes
        if lengths > 0:
            return f"it fits with {int(lengths)} tokens" + (f" and --fp8 {most.fp8}" if most.fp8 else "")
        return "no number of ranks makes it fit"


LOGIT_BYTES = 2**30  # bytes of a greedy step's logits: mbd_core/engine/build.py
CHUNK = 2048  # tokens of a prompt in a step, by default
