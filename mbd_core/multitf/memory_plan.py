"""What a training step takes of each worker's memory, counted before anything is loaded; and whether that fits.

Weights, gradients and optimizer states are exact: the tensors are counted on the meta device, as they are cut among
the workers. The rest is an estimate of the peak: what the backward pass keeps (`activation_memory`), gathered weights
and copies in bfloat16, logits and masks. The allocator's own loss is `RESERVE`.

    weights      float32, also where the run computes in bfloat16: the master weights
    gradients    float32, of what is trained
    optimizer    AdamW two float32 numbers a parameter, Muon one
    gathered     bfloat16 casts of replicated weights; of sharded ones what is whole at once: embeddings, last norm and
                 head with their gradients, two layers, and the gradients of one; gradients of what is trained
    activations  of the samples computed at once: every layer's tensors, or with activation checkpointing its input,
                 and one layer's tensors twice, kept and computed anew with their gradients
    logits       of as many labels as go through the head at once
    mask         a dense mask's: for each pair of tokens a byte, and the number that all layers add to its score
"""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.multitf.activation_memory import kept_bytes
from mbd_core.multitf.loss import LOGIT_BYTES
from mbd_core.multitf.optimizers import is_muons, trained_parameters
from mbd_core.multitf.sample import choose_layouts
from mbd_core.multitf.states import StateConfig
from mbd_core.multitf.tensor_parallel import cut_dim
from mbd_core.multitf.train_config import LoraSettings, Sharding, TrainConfig
from mbd_core.multitf.trained_adapter import add_adapter

GB = 10**9
WIDE, NARROW = 4, 2  # bytes of a float32 and of a bfloat16 number
RESERVE = 0.06
"""The share of a device's memory that its context and the gaps between allocations take."""
AUTOCAST_KEEPS = 0.8
"""What a layer keeps under autocast, of what it keeps in float32: 0.68 to 0.79 in layers of three families."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the plan is for: a model, how it is trained, on samples of how many tokens, by how many workers.

    `dense`: attention under a dense mask instead of a block mask, which takes next to nothing.
    """

    config: ModelConfig
    states: StateConfig
    train: TrainConfig
    sample_tokens: int
    num_workers: int
    sharding: Sharding
    precision: Literal["float32", "bfloat16"]
    dense: bool = False

    @property
    def is_sharded(self) -> bool:
        return self.sharding == "sharded" and self.num_workers > 1

    @property
    def num_groups(self) -> int:
        """Groups of workers with the same samples, each of `train.tensor_parallel`."""
        return max(1, self.num_workers // self.train.tensor_parallel)

    @property
    def packed_tokens(self) -> int:
        """Tokens of the samples of a training sequence, at most."""
        return max(self.sample_tokens, self.train.pack or 0)

    @property
    def sequences_at_once(self) -> int:
        """Training sequences that a worker computes at once, at most: those of its longest samples."""
        samples = max(1, self.train.batch_size // self.num_groups)
        count = -(-samples // (self.packed_tokens // self.sample_tokens))
        return count if self.train.micro_batch is None else min(count, self.train.micro_batch)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on the worker that has most, and how many parameters there are and are trained."""

    num_parameters: int
    num_trained: int
    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    logits: int
    mask: int

    @property
    def total(self) -> int:
        states = self.weights + self.gradients + self.optimizer
        return states + self.gathered + self.activations + self.logits + self.mask


def plan_memory(setting: Setting) -> MemoryPlan:
    """The plan of a setting. Nothing is allocated but a LoRA adapter, if the setting has one."""
    with torch.device("meta"):
        model = Decoder(setting.config)
    if setting.train.lora is not None:
        add_adapter(model, setting.train.lora, seed=0)
    trained = trained_parameters(model)
    muons = {n for n, p in trained.items() if setting.train.optimizer == "muon" and is_muons(n, p)}
    num_states = sum((1 if name in muons else 2) * _own(name, p, setting) for name, p in trained.items())
    tokens, labels = sequence_tokens(setting)
    return MemoryPlan(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_trained=sum(p.numel() for p in trained.values()),
        weights=WIDE * sum(_own(name, p, setting) for name, p in model.named_parameters()),
        gradients=WIDE * sum(_own(name, p, setting) for name, p in trained.items()),
        optimizer=WIDE * num_states,
        gathered=_gathered(model, setting),
        activations=setting.sequences_at_once * _activations(setting, tokens),
        logits=_logits(setting, setting.sequences_at_once * labels),
        mask=setting.sequences_at_once * tokens**2 * (1 + _width(setting)) if setting.dense else 0,
    )


def sequence_tokens(setting: Setting) -> tuple[int, int]:
    """Tokens of the longest training sequence, and how many of them can have a label."""
    states, length = setting.states, setting.packed_tokens
    if states.layouts == "d2f":
        return length, length
    layouts = choose_layouts(max(1, length // states.block_size), states, random.Random(0))
    noisy = len(layouts) * (2 if states.self_denoising == "both" else 1) * length
    return noisy + length, noisy


def _own(name: str, parameter: nn.Parameter, setting: Setting) -> int:
    """Numbers that the first worker keeps of a parameter: its first dimension is cut, the last part may be short."""
    shape, dim = list(parameter.shape), cut_dim(name, setting.train.cut_experts)
    if dim is not None:
        shape[dim] //= setting.train.tensor_parallel
    if setting.is_sharded:
        shape[0] = -(-shape[0] // setting.num_groups)
    return math.prod(shape)


def _in_group(named: Iterable[tuple[str, nn.Parameter]], train: TrainConfig) -> int:
    """Numbers that a worker has of parameters while they are gathered: all of them, or its tensor-parallel part."""
    parts = {name: 1 if cut_dim(name, train.cut_experts) is None else train.tensor_parallel for name, _ in named}
    return sum(parameter.numel() // parts[name] for name, parameter in named)


def _width(setting: Setting) -> int:
    return NARROW if setting.precision == "bfloat16" else WIDE


def _gathered(model: Decoder, setting: Setting) -> int:
    width = _width(setting)
    everything = sum(p.numel() for p in model.parameters())
    if not setting.is_sharded:
        return NARROW * everything if setting.precision == "bfloat16" else 0
    layers = [_in_group(list(layer.named_parameters()), setting.train) for layer in model.model.layers]
    trained = [_in_group(trained_parameters(layer).items(), setting.train) for layer in model.model.layers]
    root = everything - sum(p.numel() for layer in model.model.layers for p in layer.parameters())
    trained_root = sum(p.numel() for n, p in trained_parameters(model).items() if not n.startswith("model.layers."))
    return width * (root + trained_root + 2 * max(layers)) + (width + WIDE) * max(trained)


def _activations(setting: Setting, tokens: int) -> int:
    autocast = setting.precision == "bfloat16" and not setting.is_sharded
    dtype = torch.bfloat16 if setting.precision == "bfloat16" and not autocast else torch.float32
    train = setting.train
    kept = kept_bytes(
        setting.config,
        tokens=tokens,
        dtype=dtype,
        tensor_parallel=train.tensor_parallel,
        cut_experts=train.cut_experts,
    )
    share = AUTOCAST_KEEPS if autocast else 1.0
    if setting.train.activation_checkpointing:
        return kept.inputs + 2 * round(share * kept.layer)
    return round(share * (kept.layers + kept.layer))


def _logits(setting: Setting, labels: int) -> int:
    """Logits, in float32, their log-probabilities and the gradients of both."""
    vocab = setting.config.vocab_size
    at_once = min(labels, max(1, LOGIT_BYTES // (WIDE * vocab)))
    return at_once * vocab * (2 * _width(setting) + 3 * WIDE)


def plan_lines(setting: Setting, plan: MemoryPlan, *, device: str = "GPU") -> list[str]:
    """The plan as a run prints it: one line, and one with its parts."""
    size = _count(plan.num_parameters)
    count, cut = setting.num_workers, f", {setting.sharding}" if setting.num_workers > 1 else ""
    if setting.train.tensor_parallel > 1:
        cut += f", tensor parallel {setting.train.tensor_parallel}"
    trained = "" if plan.num_trained == plan.num_parameters else f" ({_count(plan.num_trained)} trained)"
    parts = ", ".join(
        f"{name} {getattr(plan, name) / GB:.1f}"
        for name in ("weights", "gradients", "optimizer", "gathered", "activations", "logits", "mask")
    )
    tokens, _ = sequence_tokens(setting)
    again = ", layers computed again" if setting.train.activation_checkpointing else ""
    return [
        f"memory: {size} parameters{trained}, {count} {device}{'s' * (count > 1)}{cut}: {plan.total / GB:.1f} GB each",
        f"  GB: {parts} ({setting.sequences_at_once} x {tokens:,} tokens at once in {setting.precision}{again})",
    ]


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"


def check_memory(setting: Setting, available: int, *, device: str = "GPU") -> MemoryPlan:
    """The plan; `ValueError` if it takes more than is `available` to a worker, saying what would make it fit."""
    plan = plan_memory(setting)
    room = round((1 - RESERVE) * available)
    if plan.total > room:
        raise ValueError(
            f"training takes {plan.total / GB:.1f} GB on each {device}, and {room / GB:.1f} GB of its "
            f"{available / GB:.1f} are for it; {_remedy(setting, room, device)}"
        )
    return plan


def _remedy(setting: Setting, room: int, device: str) -> str:
    found = next((what for what, other in _others(setting, device) if plan_memory(other).total <= room), None)
    return "choose a smaller model or shorter samples" if found is None else f"it fits with {found}"


def _others(setting: Setting, device: str) -> Iterator[tuple[str, Setting]]:
    """Settings that take less, the mildest first: smaller parts, layers computed again, more workers, an adapter."""
    train, options = setting.train, ""
    if setting.sequences_at_once > 1:
        train, options = replace(train, micro_batch=1), "--micro-batch 1 "
        yield options.rstrip(), replace(setting, train=train)
    if not train.activation_checkpointing:
        train, options = replace(train, activation_checkpointing=True), f"{options}--activation-checkpointing "
        yield options.rstrip(), replace(setting, train=train)
    for count in _more_workers(setting):
        sharded = replace(setting, train=train, num_workers=count, sharding="sharded")
        yield f"{options}--sharding sharded on {count} {device}s", sharded
    if train.lora is None and train.tensor_parallel == 1:
        options = f"{options}--lora {LoraSettings().rank}"
        adapted = replace(setting, train=replace(train, lora=LoraSettings()))
        yield options, adapted
        yield from ((f"{options} {what}", other) for what, other in _others(adapted, device))


def _more_workers(setting: Setting) -> Iterable[int]:
    """Numbers of workers over which a batch divides, from the present one on."""
    size, group = setting.train.batch_size, setting.train.tensor_parallel
    groups = (count for count in range(setting.num_groups, size + 1) if size % count == 0)
    return (count * group for count in groups if count * group > 1)
