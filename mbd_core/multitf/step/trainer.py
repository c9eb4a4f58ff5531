"""The training loop's one step, without any launcher: batch, loss, gradients, update.

A step's samples, their noise and an adapter's dropout depend only on (seed, step). So a resumed run repeats the lost
steps exactly, and any number of workers trains on the same global batch.
"""

import math
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import Distillation, Sharding, TrainConfig, check_workers
from mbd_core.multitf.data.example import IGNORE, Example
from mbd_core.multitf.data.prepared import sample_lengths
from mbd_core.multitf.states.batch import AnyBatch, MultiTFBatch, samples_of
from mbd_core.multitf.states.block_warmup import states_at
from mbd_core.multitf.states.clean_text import Lesson
from mbd_core.multitf.states.layout import SAMPLE_MEANS, StateConfig
from mbd_core.multitf.states.packing import Together, packed_alike
from mbd_core.multitf.states.sample import build_batch
from mbd_core.multitf.states.training_attention import TrainingAttention
from mbd_core.multitf.step.adapter import add_adapter, without_adapter
from mbd_core.multitf.step.compute import compile_layers, compute_precision
from mbd_core.multitf.step.loss import (
    DENSE,
    LossAndSums,
    counts_in_accuracy,
    denominator,
    distillation_loss,
    multitf_loss,
)
from mbd_core.multitf.step.loss_buckets import BUCKETS, bucket_means
from mbd_core.multitf.step.mfu import forward_flops, update_flops
from mbd_core.multitf.step.optimizers import make_optimizers
from mbd_core.multitf.step.quantized_base import quantize_base
from mbd_core.multitf.step.sample_dropout import SampleDraws
from mbd_core.multitf.step.sharding import shard_model, whole
from mbd_core.multitf.step.teaching import Teacher, taught_loss
from mbd_core.ops.machine import warn_of_emulation


@dataclass(frozen=True)
class StepMetrics:
    """One update: loss and accuracy on `labels`, tokens through the model, and `positions`, which include padding.

    `grad_norm` is of all gradients together, before clipping. The counts and `sums` are this rank's. `tflop` counts
    the model's operations (`update_flops`) in units of 10^12, `sums` the loss by bucket (`bucket_sums`). Among
    tensor-parallel workers, which have the same samples, the first worker counts tokens, operations and `sums`.
    """

    step: int
    loss: float
    accuracy: float
    labels: int
    lr: float
    tokens: int
    positions: int
    grad_norm: float
    tflop: float
    sums: tuple[float, ...]

    def point(self) -> dict[str, float]:
        """The update as a point of a run's curve."""
        numbers = {field.name: getattr(self, field.name) for field in fields(self)}
        del numbers["sums"], numbers["positions"], numbers["labels"]
        return numbers | {"padding": 1.0 - self.tokens / self.positions} | bucket_means(self.sums)


class Objective(nn.Module):
    """The model with its loss as one module, which a data-parallel wrapper can hook."""

    def __init__(
        self,
        model: Decoder,
        distillation: Distillation | None = None,
        attention: TrainingAttention = DENSE,
        *,
        rolls_out: bool | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.attention, self.rolls_out = attention, rolls_out
        self.distillation, self.teacher = distillation, teacher

    def forward(
        self, batch: MultiTFBatch, divisor: Tensor | float | None = None, lesson: Lesson | None = None
    ) -> LossAndSums:
        if self.teacher is not None:
            assert lesson is not None
            rolls_out = bool(self.rolls_out)
            return taught_loss(
                self.model, batch, lesson, self.teacher, divisor, attention=self.attention, rolls_out=rolls_out
            )
        if self.distillation is None:
            return multitf_loss(self.model, batch, divisor, attention=self.attention, rolls_out=self.rolls_out)
        teacher, attention = partial(without_adapter, self.model), self.attention
        return distillation_loss(
            self.model, batch, self.distillation, as_teacher=teacher, divisor=divisor, attention=attention
        )


class Diverged(RuntimeError):
    """The gradients of the next update are not finite. The same run would end there again."""


class Updater:
    """A model, its optimizers and the count of its updates, for all objectives.

    `device` is the device of computation, by default the model's. With several workers (`world_size`) and `sharding`,
    each worker has the whole model or its part of the model, over the default process group. The values of a model on
    the meta device must be set afterwards. Without `sharding` the caller averages the gradients. `objective` makes the
    module whose forward gives the loss.
    """

    def __init__(
        self,
        model: Decoder,
        config: TrainConfig,
        objective: Callable[[TrainingAttention], nn.Module],
        *,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self.device = next(model.parameters()).device if device is None else device
        self.precision = compute_precision(config.precision, self.device)
        if self.precision == "bfloat16":
            warn_of_emulation(self.device)
        self.model = model.train()
        self._draws = None if config.lora is None else add_adapter(model, config.lora, seed=config.seed)
        if config.lora is not None and config.lora.quantize_base:
            quantize_base(model, self.device, getattr(torch, self.precision))
        if config.compile:
            compile_layers(model)
        if config.activation_checkpointing:
            checkpoint_layers(model)
        self.attention = TrainingAttention(config.attention, self.device)
        self.objective = objective(self.attention)
        self.config = config
        self.num_workers, group = world_size, config.tensor_parallel
        self.rank, self.world_size = rank // group, world_size // group  # the rank among workers with other samples
        self.counts = rank % group == 0  # counted once for each group, because counts are summed over workers
        self.is_sharded = group > 1 or (sharding == "sharded" and world_size > 1)
        self._place(sharding)
        self.step_number = 0
        self.optimizers = make_optimizers(
            model, config.optimizer, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas
        )

    def _place(self, sharding: Sharding | None) -> None:
        if self.is_sharded:
            shard_model(
                self.objective,
                self.model,
                device=self.device,
                world_size=self.num_workers,
                in_bfloat16=self.precision == "bfloat16",
                tensor_parallel=self.config.tensor_parallel,
                cut_experts=self.config.cut_experts,
            )
            return
        self.model.to(self.device)
        if sharding == "replicated" and self.world_size > 1:
            ids = None if self.device.index is None else [self.device.index]
            self.objective = DistributedDataParallel(self.objective, device_ids=ids, gradient_as_bucket_view=True)

    def _announce(self, part: MultiTFBatch, samples: Sequence[int]) -> None:
        """Tells an adapter's dropout the next samples of this rank's share, by their numbers."""
        if self._draws is not None:
            draws = partial(SampleDraws.of, seed=self.config.seed, step=self.step_number)
            self._draws.rows = [
                [draws(samples[number], tokens=tokens) for number, tokens in row] for row in samples_of(part)
            ]

    def _autocast(self) -> AbstractContextManager[None]:
        """Sharded weights are gathered in bfloat16 already; replicated weights are cast in their products."""
        is_enabled = self.precision == "bfloat16" and not self.is_sharded
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_enabled)

    def _gradients_stay_here(self, here: bool) -> AbstractContextManager[None]:
        """Replicas average a step's gradients once, after its last part; shards add them up in place."""
        if here and isinstance(self.objective, DistributedDataParallel):
            return self.objective.no_sync()
        return nullcontext()

    def _apply(self) -> float:
        """Updates the weights by their gradients, and returns the gradients' norm before clipping.

        Raises `Diverged`, on every worker, if the norm is not finite: the update would leave no weight a number.
        """
        norm = whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)).item()
        if not math.isfinite(norm):
            raise Diverged(
                f"update {self.step_number + 1} has gradients that are not finite, so the run ends before it: give a "
                f"lower learning rate than {self.config.lr:g}, or a longer warm-up"
            )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.config.lr_at(self.step_number)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step_number += 1
        return float(norm)


class Trainer(Updater):
    """MultiTF on samples: each update's batch, its noise, its loss.

    `mean` must average a tensor over several workers. `teacher` is a separate model, if `config.teacher` names a
    model. The rest is as in `Updater`.
    """

    def __init__(
        self,
        model: Decoder,
        examples: Sequence[Example],
        states: StateConfig,
        config: TrainConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        mean: Callable[[Tensor], Tensor] | None = None,
        device: torch.device | None = None,
        sharding: Sharding | None = None,
        teacher: Decoder | None = None,
    ) -> None:
        check_workers(config, world_size)
        if len(examples) < config.batch_size:
            raise ValueError(f"{len(examples)} training samples are fewer than batch_size={config.batch_size}")
        rolls_out = states.self_denoising != "none"
        self.teacher = None if config.teacher is None else Teacher(config.teacher, teacher)
        objective = partial(Objective, model, config.distillation, rolls_out=rolls_out, teacher=self.teacher)
        super().__init__(model, config, objective, rank=rank, world_size=world_size, device=device, sharding=sharding)
        self.examples, self.states, self.mean = examples, states, mean
        self.lengths = sample_lengths(examples)

    def batch(self, step: int) -> MultiTFBatch:
        """This rank's share of the update numbered `step`, on the CPU."""
        seed, indices = self.config.seed, self._indices(step)
        rngs = [random.Random(f"{seed}/{step}/{i}") for i in indices]
        states = states_at(self.states, step / self.config.steps)
        return self.lay_out([self.examples[i] for i in indices], rngs, self._together(step), states)

    def lay_out(
        self,
        examples: Sequence[Example],
        rngs: Sequence[random.Random],
        together: Together | None = None,
        states: StateConfig | None = None,
    ) -> MultiTFBatch:
        """Samples in the run's training states, or in the states of an update, on the CPU."""
        model = self.model.config
        return build_batch(
            examples,
            self.states if states is None else states,
            mask_token_id=model.mask_token_id,
            rngs=rngs,
            shift=model.shift_logits,
            together=together,
        )

    @torch.no_grad()
    def measure(self, batch: MultiTFBatch) -> Tensor:
        """The sum of a batch's losses, its divisor, the numbers of correct and of all labels, then `bucket_sums`.

        Nothing is learned. Workers with parts of one model call it equally often.
        """
        loss, measures = self._loss(batch, 1.0)
        accuracy, sums = measures[0], measures[1:]
        labels = sums.new_tensor(_num_counted(batch))
        divisor = denominator(batch, self.states.weighting).to(sums)
        return torch.cat([torch.stack([loss.to(sums), divisor, accuracy * labels, labels]), sums])

    def _indices(self, step: int, *, of_all: bool = False) -> list[int]:
        """The samples of this rank's share; with `of_all`, of the whole batch."""
        indices = batch_indices(self.lengths, self.config.batch_size, seed=self.config.seed, step=step)
        return indices if of_all else indices[self.rank :: self.world_size]

    def _together(self, step: int) -> Together | None:
        """The packing of this rank's share."""
        if self.config.pack is None:
            return None
        lengths = [self.lengths[i] for i in self._indices(step, of_all=True)]
        shares = [lengths[rank :: self.world_size] for rank in range(self.world_size)]
        return packed_alike(shares, self.config.pack)[self.rank]

    def step(self) -> StepMetrics:
        """One update of the weights."""
        number, c = self.step_number, self.config
        batch = self.batch(number)
        divisor = self._divisor(batch)
        loss, hits, labels, sums = 0.0, 0.0, 0, [0.0] * (2 * len(BUCKETS))
        parts, samples = split_batch(batch, c.micro_batch), self._indices(number)
        for part in parts:
            self._announce(part, samples)
            with self._gradients_stay_here(part is not parts[-1]):
                part_loss, measures = self._loss(part, divisor)
                part_loss.backward()
            share, part_accuracy, *part_sums = torch.cat([part_loss.detach().double()[None], measures]).tolist()
            loss += share
            part_labels = _num_counted(part)
            hits, labels = hits + part_accuracy * part_labels, labels + part_labels
            sums = [total + part_sum for total, part_sum in zip(sums, part_sums, strict=True)]
        norm = self._apply()
        tokens, positions, tflop = batch.num_tokens, sum(p.input_ids.numel() for p in parts), self._tflop(batch)
        if not self.counts:
            tokens, positions, tflop, sums = 0, 0, 0.0, [0.0] * len(sums)
        accuracy, lr = hits / max(1, labels), c.lr_at(number)
        return StepMetrics(number, loss, accuracy, labels, lr, tokens, positions, norm, tflop, tuple(sums))

    def _loss(self, batch: MultiTFBatch, divisor: Tensor | float) -> LossAndSums:
        """The objective of a batch that lies on the CPU."""
        lesson = None if self.teacher is None else self._lesson(batch).to(self.device)
        with self._autocast():
            found: LossAndSums = self.objective(batch.to(self.device), divisor, lesson)
        return found

    def _lesson(self, batch: MultiTFBatch) -> Lesson:
        return Lesson.of(batch, self.model.config.eos_token_ids)

    def _tflop(self, batch: MultiTFBatch) -> float:
        c, rolls_out = self.config, self.states.self_denoising != "none"
        distills, lora = c.distillation is not None, c.lora is not None
        flops = update_flops(self.model.config, batch, rolls_out=rolls_out, distills=distills, lora=lora)
        if self.teacher is not None:
            reader, lesson = self.teacher.model or self.model, self._lesson(batch)
            flops += forward_flops(reader.config, lesson.reading, len(lesson.rows))
        return flops / 1e12

    def _divisor(self, batch: MultiTFBatch) -> Tensor | float:
        """The mean over the workers of their losses' divisors, never 0.

        Every worker calls `mean`, even without labels.
        """
        if self.states.weighting in SAMPLE_MEANS:
            return float(batch.num_samples)
        own_divisor = denominator(batch, self.states.weighting).double().to(self.device)
        mean_divisor = own_divisor if self.mean is None else self.mean(own_divisor)
        return mean_divisor if mean_divisor > 0 else torch.ones_like(mean_divisor)


def _num_counted(batch: MultiTFBatch) -> int:
    """The number of labels that a batch's accuracy counts."""
    return int(counts_in_accuracy(batch.slot[batch.labels != IGNORE]).sum())


def checkpoint_layers(model: Decoder) -> None:
    """Makes every layer keep only its input for the backward pass, which computes the rest again."""

    def recompute(forward: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False) if torch.is_grad_enabled() else forward(*args)

    for layer in model.model.layers:
        layer.forward = partial(recompute, layer.forward)


def split_batch(batch: AnyBatch, size: int | None) -> list[AnyBatch]:
    """The batch in parts of at most `size` sequences, each only as long as its longest sequence; `None`: the whole
    batch."""
    count = len(batch.input_ids)
    if size is None or count <= size:
        return [batch]
    parts = []
    for start in range(0, count, size):
        rows = slice(start, start + size)
        length = int((batch.stream[rows] >= 0).sum(-1).max())
        parts.append(type(batch)(*(getattr(batch, f.name)[rows, :length] for f in fields(batch))))
    return parts


@lru_cache(maxsize=2)
def _epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/epoch/{epoch}").shuffle(order)
    return order


def batch_indices(lengths: Sequence[int], batch_size: int, *, seed: int, step: int) -> list[int]:
    """One batch: shuffled each epoch, drawn from a window sorted by length so that little is padding."""
    per_epoch = len(lengths) // batch_size
    epoch, place = divmod(step, per_epoch)
    order = _epoch_order(len(lengths), seed, epoch)
    window = 16
    start = place // window * window
    stop = min(start + window, per_epoch)
    chunk = sorted(order[start * batch_size : stop * batch_size], key=lambda i: (lengths[i], i))
    batches = [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
    random.Random(f"{seed}/window/{epoch}/{start}").shuffle(batches)
    return batches[place - start]
