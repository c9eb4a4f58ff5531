"""A run's optimisation, its precision, and the layout of its weights and samples on the workers.

Values alone, without PyTorch, so that a command shows its options at once.
"""

import math
from collections.abc import Collection
from typing import Annotated, Literal

from mbd_core.fields import (
    CLUSTER,
    COMPUTING,
    DATA,
    LORA,
    OUTPUT,
    UPDATES,
    Flag,
    Ge,
    Gt,
    Le,
    check_effects,
    configuration,
)

Precision = Literal["auto", "float32", "bfloat16"]
OptimizerName = Literal["muon", "adamw"]
Distillation = Literal["student_teacher", "teacher_student"]
"""The direction of the divergence: Eq. 3's KL(student || teacher), or the released code's KL(teacher || student)."""
Sharding = Literal["replicated", "sharded"]
"""Every worker has all weights, gradients and states (DistributedDataParallel), or its part of them (FSDP2)."""
ShardingChoice = Literal["auto", "replicated", "sharded"]
"""`auto`: replicated where that fits the workers' memory, else sharded."""
ExpertsCut = Literal["expert", "width"]
QuantizedBase = Literal["nf4"]
"""The base of an adapter in 4 bits (QLoRA): NF4, in blocks of 64 with 8-bit scales."""
Written = Literal["model", "adapter"]
"""The result of a run: a model, with its adapter merged into it, or the adapter alone."""
AttentionChoice = Literal["auto", "dense", "flex", "streams"]
ReplayStates = Literal["exact", "block-local", "all-masked"]
"""The states in which a learner scores an answer's tokens (`states/replay.py`)."""


@configuration(panel=LORA)
class LoraSettings:
    """An adapter's rank, scale (alpha / rank), dropout on its input, and the projections that have one."""

    rank: Annotated[int, Ge(1), Flag(name="--lora", metavar="RANK")] = 32
    """Train an adapter of this rank instead of all weights."""
    alpha: Annotated[int, Ge(1), Flag(name="--lora-alpha", default="RANK of --lora")] = 32
    """The adapter's scale is alpha / rank."""
    dropout: Annotated[float, Ge(0), Flag(name="--lora-dropout")] = 0.1
    """Share of the adapter's inputs that are dropped; below 1."""
    modules: Annotated[tuple[str, ...], Flag(name="--lora-modules", commas=True)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    )
    """The projections that get an adapter."""
    quantize_base: QuantizedBase | None = None
    """Train an adapter, and keep the matrices of the frozen base's layers in 4 bits (QLoRA), by bitsandbytes."""
    start: Annotated[str | None, Flag(metavar="DIR|URL", opened_by="workers")] = None
    """Go on from this adapter of the same base, rank and projections, as --write adapter or PEFT wrote it."""

    def __post_init__(self) -> None:
        if self.dropout >= 1.0 or not self.modules:
            raise ValueError(f"LoRA needs dropout < 1 and modules, not dropout={self.dropout}, modules={self.modules}")


BASE_TEACHER = "base"
TeacherReading = Literal["text", "blocks"]


@configuration(panel=UPDATES)
class TeacherSettings:
    """A frozen teacher, whose distributions are the targets of masked positions.

    It reads each text once, causally. A token's target is the teacher's next-token distribution after the text before
    the token. From rollouts it may read `blocks` instead: the same masks block by block after finished blocks, as
    decoding with one slot sees them. So a model of several slots can teach itself.

    `base` is the network without its adapter, or, if all weights are trained, a frozen copy of the base. To read text,
    the base must still have its autoregressive weights, as `mbd convert` writes them.

    A label's loss is `weight` times the divergence plus `1 - weight` times the cross-entropy. After an answer's end it
    is the cross-entropy alone, because teachers are not trained on text after an EOS.

    The divergence of a position with the teacher's p and the student's q, in float32 over the whole vocabulary:
    `(1 - reverse) KL(p || q) + reverse KL(q || p)`, or with `jsd` = a, `a KL(p || m) + (1 - a) KL(q || m)` for
    `m = a p + (1 - a) q`. `top_k` leaves only the summands of the teacher's likeliest tokens, with their probabilities
    among all tokens. A temperature T divides the logits of both, and the divergence is multiplied by T^2.
    """

    model: Annotated[str, Flag(name="--teacher", metavar="base|MODEL", opened_by="workers")] = BASE_TEACHER
    """Learn from an autoregressive model's next-token distributions at masked positions: base (the base without the
    adapter), or a model folder."""
    reads: Annotated[TeacherReading, Flag(name="--teacher-reads")] = "text"
    """text: the clean text, causally. blocks: the blocks of rollouts, one after the other, as with one slot."""
    weight: Annotated[float, Gt(0), Le(1), Flag(name="--teacher-weight")] = 1.0
    """The weight of the teacher's divergence; labels have the rest."""
    temperature: Annotated[float, Gt(0), Flag(name="--teacher-temperature")] = 1.0
    """The temperature of the teacher's and the student's distribution."""
    top_k: Annotated[int | None, Ge(1), Flag(name="--teacher-top-k")] = None
    """Sum over this number of the teacher's likeliest tokens instead of the vocabulary."""
    reverse: Annotated[float, Ge(0), Le(1), Flag(name="--teacher-reverse")] = 0.0
    """The share of KL(student || teacher); KL(teacher || student) has the rest."""
    jsd: Annotated[float | None, Gt(0), Flag(name="--teacher-jsd")] = None
    """The Jensen-Shannon divergence with this weight of the teacher, instead of KL; below 1."""

    def __post_init__(self) -> None:
        if self.jsd is not None and (self.jsd >= 1 or self.reverse):
            raise ValueError(
                f"jsd={self.jsd:g} must be below 1, and beside it reverse={self.reverse:g} has no meaning: give one"
            )


@configuration(panel=OUTPUT)
class Measuring:
    """A run's measures of itself, over a number of updates (`updates`) from the third on."""

    profile: Annotated[int, Ge(0)] = 0
    """Write torch's trace of N updates, from the third on; 0: none."""
    memory_snapshot: bool = False
    """Write a snapshot of a GPU's memory: its contents, and the lines of code that put them there."""

    @property
    def updates(self) -> int:
        return self.profile or 1


NOTHING_MEASURED = Measuring()


@configuration(panel=UPDATES)
class TrainConfig:
    """The optimisation of a run. `batch_size` counts samples over all workers.

    `optimizer`: with `muon` the two-dimensional weight matrices of the layers are updated by Muon and all else by
    AdamW without weight decay (embeddings, head, norms, and the stacked experts, which have three dimensions); with
    `adamw` everything by AdamW, with `weight_decay` on everything, as the papers' recipes say.

    The learning rate warms up linearly over `warmup` steps. `trapezoid`: it then stays, and decays linearly to 0 over
    the last `decay` share of the steps. `cosine` and `linear` fall to `lr_min` at the end; `constant` stays.

    `pack`: samples that have at most this number of tokens together share a training sequence (`packing`), and
    `micro_batch` counts sequences. `distillation`: learn from the network without its adapter (D2F, Eq. 3) instead of
    from the text. `teacher`: learn from an autoregressive model, beside the text or instead. In bfloat16 the objective
    runs under autocast; weights and optimizer states are float32 in either precision.
    """

    steps: Annotated[int, Ge(1)]
    """Updates. With another number of updates, warm-up and generated data change in proportion."""
    batch_size: Annotated[int, Ge(1)]
    """Samples of an update, over all workers."""
    lr: Annotated[float, Ge(0)]
    """The highest learning rate."""
    warmup: Annotated[int, Ge(0)] = 100
    """Updates in which the learning rate rises."""
    decay: Annotated[float, Ge(0), Le(1)] = 0.4
    """Share of the updates in which a trapezoid falls."""
    weight_decay: Annotated[float, Ge(0)] = 0.01
    """The optimizer's weight decay."""
    clip: Annotated[float, Gt(0)] = 1.0
    """The gradients' norm is clipped to this."""
    seed: Annotated[int, Ge(0)] = 0
    """Random seed of order, noise, dropout and fresh weights."""
    precision: Annotated[Precision, Flag(panel=COMPUTING, metavar="DTYPE")] = "auto"
    """float32, bfloat16, or auto: bfloat16 where all workers compute it, else float32."""
    optimizer: OptimizerName = "muon"
    """adamw, or muon: Muon for the layers' matrices, AdamW for the rest."""
    betas: Annotated[
        tuple[Annotated[float, Ge(0), Le(1)], Annotated[float, Ge(0), Le(1)]], Flag(metavar="B1,B2", commas=True)
    ] = (0.9, 0.95)
    """AdamW's betas."""
    schedule: Annotated[
        Literal["trapezoid", "cosine", "linear", "constant"], Flag(name="--lr-schedule", metavar="NAME")
    ] = "trapezoid"
    """How the learning rate goes after the warm-up: trapezoid, cosine, linear, or constant."""
    lr_min: Annotated[float, Ge(0)] = 0.0
    """The learning rate at which cosine and linear end."""
    micro_batch: Annotated[int | None, Ge(1), Flag(panel=COMPUTING)] = None
    """Samples that a worker computes at once; with `pack`, training sequences."""
    pack: Annotated[int | None, Ge(1), Flag(panel=COMPUTING)] = None
    """Short samples share training sequences, up to N tokens of samples in each."""
    distillation: Annotated[Distillation | None, Flag(metavar="NAME")] = None
    """Learn from the network without its adapter (D2F), by KL(student_teacher) or KL(teacher_student)."""
    teacher: TeacherSettings | None = None
    lora: LoraSettings | None = None
    activation_checkpointing: Annotated[bool, Flag(panel=COMPUTING)] = False
    """Keep each layer's input alone, and compute the layer again in the backward pass."""
    attention: Annotated[AttentionChoice, Flag(panel=COMPUTING, metavar="NAME")] = "auto"
    """flex (a block mask, on GPUs), dense, streams (each noise-group with the tokens that it sees), or auto: flex on a
    GPU, elsewhere dense, and streams for rollouts."""
    compile: Annotated[bool, Flag(panel=COMPUTING)] = False
    """Compile the layers (torch.compile); the first steps take minutes then."""
    tensor_parallel: Annotated[int, Ge(1), Flag(panel=CLUSTER)] = 1
    """Workers that share their samples; each holds a part of every layer."""
    cut_experts: Annotated[ExpertsCut, Flag(panel=CLUSTER)] = "expert"
    """How tensor-parallel workers share experts: each holds whole experts, or a part of each expert's width."""

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or max(self.betas) >= 1:
            raise ValueError(f"betas={list(self.betas)} must be two numbers below 1")
        if self.tensor_parallel > 1 and self.lora is not None:
            raise ValueError(
                "an adapter (LoRA) is not trained by tensor-parallel workers: use --sharding sharded alone"
            )
        if self.compile and self.lora is not None and self.lora.quantize_base:
            raise ValueError(
                "train.compile does not compile layers in 4 bits: leave one of train.compile and "
                "train.lora.quantize_base out"
            )
        if self.tensor_parallel > 1 and self.compile:
            raise ValueError(
                "train.compile does not compile the layers of tensor-parallel workers: leave one of train.compile and "
                "--tensor-parallel out"
            )
        if self.tensor_parallel == 1 and self.cut_experts != "expert":
            raise ValueError(
                f"--set train.cut_experts={self.cut_experts} is for tensor-parallel workers: say how many with "
                "--tensor-parallel"
            )
        if self.distillation is not None and self.lora is None:
            raise ValueError("distillation needs lora: the teacher is the network without its adapter")
        if self.distillation is not None and self.teacher is not None:
            raise ValueError("distillation (D2F) and an autoregressive teacher are two objectives: leave one out")

    def lr_at(self, step: int) -> float:
        """The learning rate of the update numbered `step`, from 0."""
        rising = min(1.0, (step + 1) / max(1, self.warmup))
        if self.schedule == "trapezoid":
            tail = max(1, math.ceil(self.decay * self.steps))
            return self.lr * min(rising, (self.steps - step) / tail)
        if self.schedule == "constant" or rising < 1.0:
            return self.lr * rising
        progress = (step + 1 - self.warmup) / max(1, self.steps - self.warmup)
        factor = (1.0 + math.cos(math.pi * progress)) / 2 if self.schedule == "cosine" else 1.0 - progress
        return self.lr_min + (self.lr - self.lr_min) * max(0.0, factor)


def check_schedule(config: TrainConfig, given: Collection[str]) -> None:
    """Raise `ValueError` for a given field that has no effect with the schedule of the learning rate."""
    effects = {"decay": ["trapezoid"], "lr_min": ["cosine", "linear"]}
    check_effects(config, "train", chooser="schedule", effects=effects, given=given)


def check_workers(config: TrainConfig, num_workers: int) -> None:
    """Raise `ValueError` unless the workers divide into groups that share every layer, and a batch over the groups."""
    groups, remainder = divmod(num_workers, config.tensor_parallel)
    if remainder:
        raise ValueError(
            f"--tensor-parallel {config.tensor_parallel} does not divide the number of training processes, "
            f"{num_workers}"
        )
    if config.batch_size % groups:
        kind = "workers" if config.tensor_parallel == 1 else f"groups of {config.tensor_parallel} workers"
        raise ValueError(f"batch_size={config.batch_size} does not divide over {groups} {kind}")


def check_learning(config: TrainConfig) -> None:
    """Raise `ValueError` for settings that a learner of reinforcement learning does not have."""
    if config.distillation is not None:
        raise ValueError("distillation is MultiTF's objective, and not a learner's; leave it out")
    if config.lora is not None and config.lora.start is not None:
        raise ValueError(
            f"--set train.lora.start={config.lora.start} is MultiTF's, and not a learner's: merge the adapter into "
            "the model first (mbd convert MODEL --adapter DIR --out OUT)"
        )
    if config.lora is not None and config.lora.dropout:
        raise ValueError(
            f"an adapter's dropout of {config.lora.dropout} makes the learner's log-probabilities differ from the "
            "engine's: give dropout 0"
        )
    if config.lora is not None and config.lora.quantize_base is not None:
        raise ValueError(
            f"train.lora.quantize_base={config.lora.quantize_base} is MultiTF's, and not a learner's, whose whole "
            "weights go to the engines after each update; leave it out"
        )


BestMetric = Literal["validation_loss", "validation_accuracy", "sweep_accuracy", "none"]


@configuration(panel=DATA)
class ValidationOptions:
    """A run's measures on held-out data, and the checkpoint that it keeps by a measure."""

    validation: Annotated[str | None, Flag(metavar="DIR|FILE|SHARE", opened_by="workers")] = None
    """Log the losses of held-out data: a folder that jobs/prepare_data.py wrote, a file of conversations in one of its
    formats, or a share of the training data, as 0.02."""
    validate_every: Annotated[int, Ge(1)] = 100
    """Updates between two validations."""
    keep_best: Annotated[BestMetric, Flag(panel=OUTPUT)] = "validation_loss"
    """The number by which the best checkpoint is kept beside the newest two."""

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share < 1:
            raise ValueError(
                f"--validation {self.validation}: a share of the training data is above 0 and below 1, as 0.02; write "
                f"a folder of that name as ./{self.validation}"
            )
        if self.validation is None and (every := self.validate_every) != ValidationOptions.validate_every:
            raise ValueError(
                f"--set held_out.validate_every={every} has no meaning without --validation, which names the data"
            )

    @property
    def share(self) -> float | None:
        """The share of the training data's conversations that is held out; `None` for data of their own."""
        try:
            return None if self.validation is None else float(self.validation)
        except ValueError:
            return None


NOTHING_HELD_OUT = ValidationOptions()


@configuration(panel=DATA)
class Sweeping:
    """A small task that an engine beside the run decodes with the run's weights."""

    sweep_every: Annotated[int, Ge(0)] = 0
    """On a Ray cluster, log accuracy and TPF of a small task, decoded beside the run, every N updates; 0: never."""
    sweep_task: Annotated[str, Flag(metavar="NAME[:LIMIT]")] = "gsm-mini:32"
    """The task of these sweeps, and how many of its problems."""
    sweep_data: Annotated[str | None, Flag(metavar="PATH", opened_by="workers")] = None
    """Where a task that is not generated lies, as jobs/eval_sweep.py takes it."""

    def __post_init__(self) -> None:
        limit = self.sweep_task.partition(":")[2]
        if ":" in self.sweep_task and (not limit.isdecimal() or int(limit) < 1):
            raise ValueError(
                f"--set sweeping.sweep_task={self.sweep_task} must be a task, or a task and a number of problems of "
                "at least 1, as gsm-mini:32"
            )
        for name in ("sweep_task", "sweep_data"):
            if not self.sweep_every and (value := getattr(self, name)) != getattr(Sweeping, name):
                raise ValueError(
                    f"--set sweeping.{name}={value} has no meaning without sweeps: leave it out, or say how often "
                    "with --set sweeping.sweep_every=N"
                )

    @property
    def task(self) -> str:
        return self.sweep_task.partition(":")[0]

    @property
    def limit(self) -> int:
        """How many problems are decoded."""
        return int(self.sweep_task.partition(":")[2] or SWEPT_PROBLEMS)


SWEPT_PROBLEMS = 32
"""The number of problems if the task names none."""
NO_SWEEPS = Sweeping()


def check_best(held_out: ValidationOptions, sweeping: Sweeping) -> None:
    """Raise `ValueError` for a best checkpoint by a number that is not measured."""
    if held_out.keep_best == "validation_accuracy" and held_out.validation is None:
        raise ValueError("--set held_out.keep_best=validation_accuracy needs --validation, which names the data")
    if held_out.keep_best == "sweep_accuracy" and not sweeping.sweep_every:
        raise ValueError(
            "--set held_out.keep_best=sweep_accuracy needs sweeps: say how often with --set sweeping.sweep_every=N"
        )
