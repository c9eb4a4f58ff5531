"""How a run is trained: the optimisation, its precision, and how its weights and samples lie on the workers.

Values alone, without PyTorch, so that a command shows its options at once.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from mbd_core.options import DATA, OUTPUT, Option, check

Precision = Literal["auto", "float32", "bfloat16"]
OptimizerName = Literal["muon", "adamw"]
Distillation = Literal["student_teacher", "teacher_student"]
"""Whose KL divergence from whom: Eq. 3's KL(student || teacher), or the released code's KL(teacher || student)."""
Sharding = Literal["replicated", "sharded"]
"""Every worker has all weights, gradients and states (DistributedDataParallel), or its part of them (FSDP2)."""
ShardingChoice = Literal["auto", "replicated", "sharded"]
"""`auto`: replicated where that fits the workers' memory, else sharded."""
ExpertsCut = Literal["expert", "width"]
AttentionChoice = Literal["auto", "dense", "flex"]


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """An adapter's rank, scale (alpha / rank), dropout on its input, and the projections that have one."""

    rank: int = 32
    alpha: int = 32
    dropout: float = 0.1
    modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0.0 <= self.dropout < 1.0 or not self.modules:
            raise ValueError(
                f"LoRA needs rank >= 1, 0 <= dropout < 1 and modules, not rank={self.rank}, dropout={self.dropout}, "
                f"modules={self.modules}"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimisation of a run. `batch_size` counts samples over all workers.

    `optimizer`: with `muon` the two-dimensional weight matrices of the layers are updated by Muon and all else by
    AdamW without weight decay (embeddings, head, norms, and the stacked experts, which have three dimensions); with
    `adamw` everything by AdamW, with `weight_decay` on everything, as the papers' recipes say.

    The learning rate warms up linearly over `warmup` steps. `trapezoid`: it then stays, and decays linearly to 0 over
    the last `decay` share of the steps. `cosine` and `linear` fall to `lr_min` at the end; `constant` stays.

    `micro_batch`: samples that a worker computes at once; the gradients of a step are the same. `pack`: samples of up
    to so many tokens together share a training sequence (`packing`), and `micro_batch` counts sequences.
    `distillation`: learn from the network without its adapter (D2F, Eq. 3) instead of from the text. `lora`: train an
    adapter, which is merged when the model is written. `activation_checkpointing`: keep each layer's input alone, and
    compute the layer again in the backward pass. `attention`: a block mask (`flex`) or a dense one; `auto` is flex on
    a GPU. `compile`: `torch.compile` of the layers. `tensor_parallel`: so many workers share their samples and every
    layer, its experts `cut_experts` by expert or by width. In bfloat16 the objective runs under autocast; weights and
    optimizer states are float32 in either precision.
    """

    steps: int
    batch_size: int
    lr: float
    warmup: int = 100
    decay: float = 0.4
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    precision: Precision = "auto"
    optimizer: OptimizerName = "muon"
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Literal["trapezoid", "cosine", "linear", "constant"] = "trapezoid"
    lr_min: float = 0.0
    micro_batch: int | None = None
    pack: int | None = None
    distillation: Distillation | None = None
    lora: LoraSettings | None = None
    activation_checkpointing: bool = False
    attention: AttentionChoice = "auto"
    compile: bool = False
    tensor_parallel: int = 1
    cut_experts: ExpertsCut = "expert"

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1:
            raise ValueError(f"steps={self.steps} and batch_size={self.batch_size} must be at least 1")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(f"micro_batch={self.micro_batch} must be at least 1, or None for a worker's whole batch")
        if self.pack is not None and self.pack < 1:
            raise ValueError(f"pack={self.pack} must be at least 1 token, or None for a sequence of each sample")
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel={self.tensor_parallel} must be at least 1")
        if self.tensor_parallel > 1 and self.lora is not None:
            raise ValueError(
                "an adapter (LoRA) is not trained by tensor-parallel workers: use --sharding sharded alone"
            )
        if self.tensor_parallel > 1 and self.compile:
            raise ValueError(
                "--compile does not compile the layers of tensor-parallel workers: leave one of --compile and "
                "--tensor-parallel out"
            )
        if self.tensor_parallel == 1 and self.cut_experts != "expert":
            raise ValueError(
                f"--cut-experts {self.cut_experts} is for tensor-parallel workers: say how many with --tensor-parallel"
            )
        if self.distillation is not None and self.lora is None:
            raise ValueError("distillation needs lora: the teacher is the network without its adapter")

    def lr_at(self, step: int) -> float:
        """The learning rate of the update numbered `step`, from 0."""
        rising = min(1.0, (step + 1) / max(1, self.warmup))
        if self.schedule == "trapezoid":
            tail = max(1, math.ceil(self.decay * self.steps))
            return self.lr * min(rising, (self.steps - step) / tail)
        if self.schedule == "constant" or rising < 1.0:
            return self.lr * rising
        done = (step + 1 - self.warmup) / max(1, self.steps - self.warmup)
        left = (1.0 + math.cos(math.pi * done)) / 2 if self.schedule == "cosine" else 1.0 - done
        return self.lr_min + (self.lr - self.lr_min) * max(0.0, left)


def check_workers(config: TrainConfig, num_workers: int) -> None:
    """Raise `ValueError` unless the workers divide into groups that share every layer, and a batch over the groups."""
    groups, rest = divmod(num_workers, config.tensor_parallel)
    if rest:
        raise ValueError(
            f"--tensor-parallel {config.tensor_parallel} does not divide the number of training processes, "
            f"{num_workers}"
        )
    if config.batch_size % groups:
        kind = "workers" if config.tensor_parallel == 1 else f"groups of {config.tensor_parallel} workers"
        raise ValueError(f"batch_size={config.batch_size} does not divide over {groups} {kind}")


Metric = Literal["validation_loss", "validation_accuracy", "none"]


@dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """What a run measures besides its updates, and which checkpoint it keeps for that."""

    validation: Annotated[
        str | None,
        Option("Held-out data that jobs/prepare_data.py wrote, whose losses are logged.", DATA, metavar="DIR"),
    ] = None
    validate_every: Annotated[int, Option("Updates between two validations.", DATA, at_least=1)] = 100
    keep_best: Annotated[
        Metric, Option("The number by which the best checkpoint is kept beside the newest two.", OUTPUT)
    ] = "validation_loss"

    def __post_init__(self) -> None:
        check(self)
