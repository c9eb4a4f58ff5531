"""The memory of a training step on each worker, counted on the meta device before anything is loaded.

Weights, gradients and optimizer states are exact: the tensors, sharded if the run is, are counted on the meta device.
The rest is an estimate of the peak: tensors for the backward pass (`activation_memory.py`), gathered weights and
copies in bfloat16, logits and masks. The allocator's own loss is `RESERVE`.

    weights      float32, also where the run computes in bfloat16: the master weights; a base in 4 bits as stored; a
                 frozen teacher in the run's precision
    gradients    float32, of trained parameters
    optimizer    AdamW two float32 numbers a parameter, Muon one
    gathered     bfloat16 casts of replicated weights, and the largest dequantised layer; with sharding the parts that
                 are gathered at once: embeddings, last norm and head with their gradients, two layers, and the
                 gradients of one layer; only trained parameters have gradients
    activations  for the samples computed at once: every layer's tensors, or with activation checkpointing its input,
                 and one layer's tensors twice, kept and computed anew with their gradients
    logits       for the labels that go through the head at once
    mask         for a dense mask: for each pair of tokens a byte, and the number that is added to the pair's score
"""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from mbd_core.checkpoint.loading import planned_bytes
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.multitf.config import LoraSettings, Sharding, TrainConfig
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.sample import choose_layouts
from mbd_core.multitf.step.activation_memory import kept_bytes
from mbd_core.multitf.step.adapter import add_adapter
from mbd_core.multitf.step.loss import LOGIT_BYTES
from mbd_core.multitf.step.optimizers import is_muons, trained_parameters
from mbd_core.multitf.step.parallel import cut_dim
from mbd_core.multitf.step.quantized_base import nf4_bytes, quantized_modules

GB = 10**9
WIDE, NARROW = 4, 2  # bytes of a float32 and of a bfloat16 number
RESERVE = 0.06
"""The share of a device's memory that its context and the gaps between allocations take."""
AUTOCAST_KEEPS = 0.8
"""The share of a layer's float32 bytes that it keeps under autocast: 0.68 to 0.79 in layers of three families."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The subject of a plan: a model, its training, the length of its samples, the number of workers.

    `dense`: attention has a dense mask; a block mask takes almost no memory. `teacher`: a frozen model beside the
    trained model, unsharded on each worker.
    """

    config: ModelConfig
    states: StateConfig
    train: TrainConfig
    sample_tokens: int
    num_workers: int
    sharding: Sharding
    precision: Literal["float32", "bfloat16"]
    dense: bool = False
    teacher: ModelConfig | None = None

    @property
    def is_sharded(self) -> bool:
        return self.sharding == "sharded" and self.num_workers > 1

    @property
    def num_groups(self) -> int:
        """Groups of workers with the same samples, each of `train.tensor_parallel`."""
        return max(1, self.num_workers // self.train.tensor_parallel)

    @property
    def packed_tokens(self) -> int:
        """The largest number of tokens in a training sequence of packed samples."""
        return max(self.sample_tokens, self.train.pack or 0)

    @property
    def sequences_at_once(self) -> int:
        """The largest number of training sequences that a worker computes at once, for its longest samples."""
        samples = max(1, self.train.batch_size // self.num_groups)
        count = -(-samples // (self.packed_tokens // self.sample_tokens))
        return count if self.train.micro_batch is None else min(count, self.train.micro_batch)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on the fullest worker, and the numbers of all and of trained parameters."""

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


def plan_memory(workload: Workload) -> MemoryPlan:
    """The plan of a workload. It allocates at most a LoRA adapter."""
    with torch.device("meta"):
        model = Decoder(workload.config)
    if workload.train.lora is not None:
        add_adapter(model, workload.train.lora, seed=0)
    trained = trained_parameters(model)
    muons = {n for n, p in trained.items() if workload.train.optimizer == "muon" and is_muons(n, p)}
    quantized = _quantized_parameters(model, workload.train)
    num_states = sum((1 if name in muons else 2) * _worker_numel(name, p, workload) for name, p in trained.items())
    tokens, labels = sequence_tokens(workload)
    return MemoryPlan(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_trained=sum(p.numel() for p in trained.values()),
        weights=sum(
            nf4_bytes(p.numel()) if name in quantized else WIDE * _worker_numel(name, p, workload)
            for name, p in model.named_parameters()
        )
        + (0 if workload.teacher is None else planned_bytes(workload.teacher, getattr(torch, workload.precision))),
        gradients=WIDE * sum(_worker_numel(name, p, workload) for name, p in trained.items()),
        optimizer=WIDE * num_states,
        gathered=_gathered_bytes(model, workload),
        activations=workload.sequences_at_once * _activations(workload, tokens),
        logits=_logits(workload, workload.sequences_at_once * labels),
        mask=workload.sequences_at_once * tokens**2 * (1 + _width(workload)) if workload.dense else 0,
    )


def sequence_tokens(workload: Workload) -> tuple[int, int]:
    """Tokens of the longest training sequence, and its possible labels."""
    states, length = workload.states, workload.packed_tokens
    if states.layouts in ("d2f", "none"):
        return length, length
    layouts = choose_layouts(max(1, length // states.block_size), states, random.Random(0))
    noisy = len(layouts) * (1 + (states.self_denoising == "both")) * (1 + states.complementary) * length
    labels = length if states.ar_weight else 0
    causal = labels if states.clean != "causal" else 0
    return noisy + length + causal, noisy + labels


def _worker_numel(name: str, parameter: nn.Parameter, workload: Workload) -> int:
    """The first worker's share of a parameter's numbers. The first dimension is sharded, and the last worker's part
    may be shorter."""
    shape, dim = list(parameter.shape), cut_dim(name, workload.train.cut_experts)
    if dim is not None:
        shape[dim] //= workload.train.tensor_parallel
    if workload.is_sharded:
        shape[0] = -(-shape[0] // workload.num_groups)
    return math.prod(shape)


def _in_group(parameters: Iterable[tuple[str, nn.Parameter]], train: TrainConfig) -> int:
    """A worker's share of parameters while they are gathered: all of them, or its tensor-parallel part."""
    parts = {name: 1 if cut_dim(name, train.cut_experts) is None else train.tensor_parallel for name, _ in parameters}
    return sum(parameter.numel() // parts[name] for name, parameter in parameters)


def _quantized_parameters(model: Decoder, train: TrainConfig) -> dict[str, str]:
    """The parameters in 4 bits, each with its module."""
    if train.lora is None or train.lora.quantize_base is None:
        return {}
    modules = quantized_modules(model)
    parameters = ((name, name.rpartition(".")[0]) for name, p in model.named_parameters() if p.ndim > 1)
    return {name: module for name, module in parameters if module in modules}


def _width(workload: Workload) -> int:
    return NARROW if workload.precision == "bfloat16" else WIDE


def _gathered_bytes(model: Decoder, workload: Workload) -> int:
    width = _width(workload)
    num_parameters = sum(p.numel() for p in model.parameters())
    if not workload.is_sharded:
        quantized, sizes = _quantized_parameters(model, workload.train), dict[str, int]()
        for name, module in quantized.items():
            sizes[module] = sizes.get(module, 0) + model.get_parameter(name).numel()
        casts = num_parameters - sum(sizes.values()) if workload.precision == "bfloat16" else 0
        return NARROW * casts + width * max(sizes.values(), default=0)
    layers = [_in_group(list(layer.named_parameters()), workload.train) for layer in model.model.layers]
    trained_layers = [_in_group(trained_parameters(layer).items(), workload.train) for layer in model.model.layers]
    root = num_parameters - sum(p.numel() for layer in model.model.layers for p in layer.parameters())
    trained_root = sum(p.numel() for n, p in trained_parameters(model).items() if not n.startswith("model.layers."))
    return width * (root + trained_root + 2 * max(layers)) + (width + WIDE) * max(trained_layers)


def _activations(workload: Workload, tokens: int) -> int:
    autocast = workload.precision == "bfloat16" and not workload.is_sharded
    dtype = torch.bfloat16 if workload.precision == "bfloat16" and not autocast else torch.float32
    train = workload.train
    saved_bytes = kept_bytes(
        workload.config,
        tokens=tokens,
        dtype=dtype,
        tensor_parallel=train.tensor_parallel,
        cut_experts=train.cut_experts,
    )
    share = AUTOCAST_KEEPS if autocast else 1.0
    if workload.train.activation_checkpointing:
        return saved_bytes.inputs + 2 * round(share * saved_bytes.layer)
    return round(share * (saved_bytes.layers + saved_bytes.layer))


def _logits(workload: Workload, labels: int) -> int:
    """Bytes of logits, float32 log-probabilities and the gradients of both; and of a teacher's, without gradients."""
    vocab = workload.config.vocab_size
    at_once = min(labels, max(1, LOGIT_BYTES // (WIDE * vocab)))
    teachers = 0 if workload.train.teacher is None else _width(workload) + 2 * WIDE
    return at_once * vocab * (2 * _width(workload) + 3 * WIDE + teachers)


def plan_lines(workload: Workload, plan: MemoryPlan, *, device: str = "GPU") -> list[str]:
    """The plan as a run prints it: one line, and one line with its parts."""
    size = _count(plan.num_parameters)
    count, cut = workload.num_workers, f", {workload.sharding}" if workload.num_workers > 1 else ""
    if workload.train.tensor_parallel > 1:
        cut += f", tensor parallel {workload.train.tensor_parallel}"
    suffix = "" if plan.num_trained == plan.num_parameters else f" ({_count(plan.num_trained)} trained)"
    parts = ", ".join(
        f"{name} {getattr(plan, name) / GB:.1f}"
        for name in ("weights", "gradients", "optimizer", "gathered", "activations", "logits", "mask")
    )
    tokens, _ = sequence_tokens(workload)
    recompute = ", layers computed again" if workload.train.activation_checkpointing else ""
    return [
        f"memory: {size} parameters{suffix}, {count} {device}{'s' * (count > 1)}{cut}: {plan.total / GB:.1f} GB each",
        f"  GB: {parts} ({workload.sequences_at_once} x {tokens:,} tokens at once in {workload.precision}{recompute})",
    ]


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"


def fitting(workloads: Iterable[Workload], available: int, *, device: str = "GPU") -> tuple[Workload, MemoryPlan]:
    """The first workload that fits into `available` bytes of a worker, less `RESERVE`, and its plan.

    Raises `ValueError` if none does, with changes that would make the last workload fit.
    """
    room = round((1 - RESERVE) * available)
    for workload in workloads:
        plan = plan_memory(workload)
        if plan.total <= room:
            return workload, plan
    remedies = (
        f"it fits with {what}"
        for what, smaller in _smaller_workloads(workload, device)
        if plan_memory(smaller).total <= room
    )
    raise ValueError(
        f"training takes {plan.total / GB:.1f} GB on each {device}, and {room / GB:.1f} GB of its "
        f"{available / GB:.1f} are for it; {next(remedies, 'choose a smaller model or shorter samples')}"
    )


def _smaller_workloads(workload: Workload, device: str) -> Iterator[tuple[str, Workload]]:
    """Workloads that take less, the mildest first: micro-batches, recomputed layers, more workers, an adapter."""
    train, options = workload.train, ""
    if workload.sequences_at_once > 1:
        train, options = replace(train, micro_batch=1), "--set train.micro_batch=1 "
        yield options.rstrip(), replace(workload, train=train)
    if not train.activation_checkpointing:
        train, options = (
            replace(train, activation_checkpointing=True),
            f"{options}--set train.activation_checkpointing=true ",
        )
        yield options.rstrip(), replace(workload, train=train)
    for count in _more_workers(workload):
        with_shards = replace(workload, train=train, num_workers=count, sharding="sharded")
        yield f"{options}--sharding sharded on {count} {device}s", with_shards
    if train.lora is None and train.tensor_parallel == 1:
        options = f"{options}--lora {LoraSettings().rank}"
        with_adapter = replace(workload, train=replace(train, lora=LoraSettings()))
        yield options, with_adapter
        yield from ((f"{options} {what}", smaller) for what, smaller in _smaller_workloads(with_adapter, device))
    elif train.lora is not None and train.lora.quantize_base is None:
        train = replace(train, lora=replace(train.lora, quantize_base="nf4"))
        yield f"{options}--set train.lora.quantize_base=nf4", replace(workload, train=train, sharding="replicated")


def _more_workers(workload: Workload) -> Iterable[int]:
    """Numbers of workers over which a batch divides, from the present one on."""
    size, group = workload.train.batch_size, workload.train.tensor_parallel
    groups = (count for count in range(workload.num_groups, size + 1) if size % count == 0)
    return (count * group for count in groups if count * group > 1)
