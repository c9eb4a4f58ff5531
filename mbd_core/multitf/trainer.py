"""The training loop's one step, without any launcher: batch, loss, gradients, update.

A step's samples and the noise of each depend on (seed, step) alone: a resumed run repeats exactly what was lost, and
any number of workers trains on the same global batch.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.loss import multitf_loss
from mbd_core.multitf.precision import Precision, compute_precision
from mbd_core.multitf.sample import Example, MultiTFBatch, StateConfig, build_batch


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimisation of a run. `batch_size` counts samples over all workers.

    The learning rate warms up linearly, stays, and decays linearly to 0 over the last `decay` share of the steps.
    Weight matrices are updated by Muon, the embeddings and norms by AdamW, as PyTorch implements them. In bfloat16 the
    objective runs under autocast; weights and optimizer states are float32 in either precision.
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

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1:
            raise ValueError(f"steps={self.steps} and batch_size={self.batch_size} must be at least 1")

    def lr_at(self, step: int) -> float:
        """The learning rate of the update numbered `step`, from 0."""
        tail = max(1, math.ceil(self.decay * self.steps))
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup), (self.steps - step) / tail)


@dataclass(frozen=True)
class StepMetrics:
    """One update: loss, accuracy on masked tokens (this rank's), learning rate, tokens through the model."""

    step: int
    loss: float
    accuracy: float
    lr: float
    tokens: int


class Objective(nn.Module):
    """The model with its loss as one module, which a data-parallel wrapper can hook."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: MultiTFBatch) -> tuple[Tensor, Tensor]:
        return multitf_loss(self.model, batch)


class Trainer:
    """Owns the optimizers and the step count.

    The model must be on its device already: `precision` is what the configured one means there. The caller may wrap
    `objective` (DDP) before the first step.
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
    ) -> None:
        if config.batch_size % world_size:
            raise ValueError(f"batch_size={config.batch_size} does not divide over {world_size} workers")
        if len(examples) < config.batch_size:
            raise ValueError(f"{len(examples)} training samples are fewer than batch_size={config.batch_size}")
        self.device = next(model.parameters()).device
        self.precision = compute_precision(config.precision, self.device)
        self.model = model.train()
        self.objective: nn.Module = Objective(model)
        self.examples, self.states, self.config = examples, states, config
        self.rank, self.world_size = rank, world_size
        self.step_number = 0
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "model.layers" in n]
        inside = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in inside]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def batch(self, step: int) -> MultiTFBatch:
        """This rank's share of the update numbered `step`, on the CPU."""
        c = self.config
        indices = _batch_indices(self.examples, c.batch_size, seed=c.seed, step=step)[self.rank :: self.world_size]
        return build_batch(
            [self.examples[i] for i in indices],
            self.states,
            mask_token_id=self.model.config.mask_token_id,
            rngs=[random.Random(f"{c.seed}/{step}/{i}") for i in indices],
        )

    def step(self) -> StepMetrics:
        """One update of the weights."""
        number, c = self.step_number, self.config
        batch = self.batch(number).to(self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bfloat16"):
            loss, accuracy = self.objective(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), c.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = c.lr_at(number)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step_number += 1
        return StepMetrics(number, loss.item(), accuracy.item(), c.lr_at(number), batch.input_ids.numel())

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs besides its recipe: weights, optimizer state, step."""
        return {
            "step": self.step_number,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step_number = state["step"]


@lru_cache(maxsize=2)
def _epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/epoch/{epoch}").shuffle(order)
    return order


def _batch_indices(examples: Sequence[Example], batch_size: int, *, seed: int, step: int) -> list[int]:
    """One batch: shuffled each epoch, drawn from a window sorted by length so that little is padding."""
    per_epoch = len(examples) // batch_size
    epoch, place = divmod(step, per_epoch)
    order = _epoch_order(len(examples), seed, epoch)
    window = 16
    start = place // window * window
    stop = min(start + window, per_epoch)
    chunk = sorted(order[start * batch_size : stop * batch_size], key=lambda i: (len(examples[i].tokens), i))
    batches = [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
    random.Random(f"{seed}/window/{epoch}/{start}").shuffle(batches)
    return batches[place - start]
