"""Changes between two steps of a running engine: LoRA adapters, all weights, and its memory while it sleeps.

The parameters keep their addresses, so that CUDA graphs and the fused forward's joint weights stay valid.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from mbd_core.checkpoint.adapter import read_adapter
from mbd_core.checkpoint.block_experts import has_blocks
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.tensors import FLOAT32_ALWAYS
from mbd_core.models.decoder import Decoder
from mbd_core.models.lora import Adapter, AdapterSlots
from mbd_core.models.model_config import Fp8Parts, ModelConfig
from mbd_core.models.quantize import quantized_parts
from mbd_core.models.shard import Shard, served_dim
from mbd_core.ops.experts.fp8 import FP8, BlockShape, Fp8Module, quantize
from mbd_core.ops.layer.int8 import Int8Module

# LoRA adapters: each is loaded under a name and has a slot until it is unloaded, when no request uses it.


class AdapterInUse(ValueError):
    """Requests still use the adapter to be unloaded."""


@dataclass(frozen=True)
class ResidentAdapter:
    """An adapter in its slot. `serial` is unique among all adapters ever loaded, so that pages stored with an adapter
    are not found with another adapter of the same name."""

    name: str
    slot: int
    serial: int
    rank: int


class ResidentAdapters:
    """The adapters of one engine; `names` holds their names, live, and `ar_names` the names of the adapters with which
    the model has an autoregressive mode. Without `slots` no adapter can be loaded.

    Iterates over the adapters in the order of their loading.
    """

    def __init__(self, config: ModelConfig, shard: Shard, slots: AdapterSlots | None) -> None:
        self._config, self._shard, self._slots = config, shard, slots
        self._by_name: dict[str, ResidentAdapter] = {}
        self._num_loaded = 0
        self.names: set[str] = set()
        self.ar_names: set[str] = set()

    def __iter__(self) -> Iterator[ResidentAdapter]:
        return iter(tuple(self._by_name.values()))

    def get(self, name: str | None) -> ResidentAdapter | None:
        return None if name is None else self._by_name.get(name)

    def read(self, name: str, folder: Path) -> Adapter:
        """The adapter in `folder`, to be placed under `name`; raises `ValueError` if it cannot be placed."""
        if self._slots is None:
            raise ValueError("this engine loads no adapters; start it with max_adapters")
        if not name:
            raise ValueError("an adapter needs a name")
        if name in self._by_name:
            raise ValueError(f"an adapter '{name}' is loaded already; unload it first")
        if len(self._by_name) == self._slots.num_slots:
            raise ValueError(
                f"{len(self._by_name)} adapters are loaded, which is all that max_adapters allows; unload one first"
            )
        adapter = read_adapter(folder, self._config, shard=self._shard)
        if adapter.rank > self._slots.max_rank:
            raise ValueError(f"{folder}: r={adapter.rank} exceeds this engine's max_rank={self._slots.max_rank}")
        return adapter

    def place(self, name: str, adapter: Adapter) -> None:
        """Put an adapter that was read for `name` into a free slot."""
        assert self._slots is not None and name not in self._by_name
        slot = min(set(range(1, self._slots.num_slots + 1)) - {a.slot for a in self._by_name.values()})
        self._slots.write(slot, adapter)
        self._num_loaded += 1
        self._by_name[name] = ResidentAdapter(name, slot, self._num_loaded, adapter.rank)
        self.names.add(name)
        if adapter.ar_mode:
            self.ar_names.add(name)

    def remove(self, name: str) -> None:
        """Free the slot of an adapter that nobody uses."""
        assert self._slots is not None
        self.names.discard(name)
        self.ar_names.discard(name)
        self._slots.clear(self._by_name.pop(name).slot)


# Other weights in the place of the model's.

SwapMode = Literal["wait", "preempt"]
WeightSource = Path | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class StagedWeights:
    """Weights on the host, by the decoder's names, that fit the model they were staged for.

    wait     running requests end with the old weights before the swap, and no other request begins
    preempt  the swap happens at once; running requests are preempted, keep their committed tokens, and go on. Only a
             canvas that has handed out tokens ends first, because its new start would contradict them

    `version` is the version of the weights; `None` means the old version plus 1.
    """

    tensors: Mapping[str, Tensor]
    mode: SwapMode
    version: int | None = None


def stage_weights(model: Decoder, source: WeightSource, mode: SwapMode) -> StagedWeights:
    """Reads and checks the weights of `source`, a model folder or the decoder's tensors by name, for `model`'s part.

    They take the host's memory until they are in place. Raises `ValueError` naming the tensor or field that does not
    fit, and leaves `model` unchanged.
    """
    if mode not in get_args(SwapMode):
        raise ValueError(f"mode={mode!r} is unknown; choose one of {', '.join(get_args(SwapMode))}")
    dtype = model.model.norm.weight.dtype
    if isinstance(source, Path):
        try:
            keeps = quantized_parts(model) == "blocks" and has_blocks(source)
            parts: Fp8Parts | None = "blocks" if keeps else None
            source_model = load_model(source, dtype=dtype, shard=model.shard, reduce=model.reduce, fp8=parts)
        except OSError as error:
            raise ValueError(f"the folder of the weights cannot be read: {error}") from error
        theirs, ours = source_model.config, model.config
        if differs := [f.name for f in fields(ours) if getattr(theirs, f.name) != getattr(ours, f.name)]:
            name = differs[0]
            raise ValueError(
                f"{source} cannot take the place of the weights: its {name} is {getattr(theirs, name)}, the model's "
                f"{getattr(ours, name)}"
            )
        if keeps and _blocks(source_model) != _blocks(model):
            raise ValueError(f"{source} cannot take the place of the weights: its FP8 experts are in other blocks")
        return StagedWeights(_without_tied_head(source_model, source_model.state_dict()), mode)
    return StagedWeights(_check_tensors(model, source, dtype), mode)


def _blocks(model: Decoder) -> dict[str, BlockShape | None]:
    return {name: module.block for name, module in model.named_modules() if isinstance(module, Fp8Module)}


def _without_tied_head(model: Decoder, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    is_tied = model.config.tie_word_embeddings
    return {name: tensor for name, tensor in tensors.items() if not (is_tied and name == "lm_head.weight")}


def _check_tensors(model: Decoder, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies whole tensors, or this rank's part of them; at most one whole tensor is held at a time."""
    with torch.device("meta"):
        whole = Decoder(model.whole_config).state_dict()
    places = _without_tied_head(model, whole)
    shard, parts = model.shard, dict[str, Tensor]()
    for name, tensor in tensors:
        if name not in whole:
            raise ValueError(f"the new weights are no tensor of this model: '{name}'")
        if name not in places:
            continue
        shape, dim = tuple(places[name].shape), served_dim(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"the new weights' '{name}' has shape {tuple(tensor.shape)}; the model asks for {shape}")
        part = tensor if dim is None else tensor.chunk(shard.size, dim=dim)[shard.rank]
        to = torch.float32 if name.endswith(FLOAT32_ALWAYS) else dtype
        parts[name] = part.detach().to("cpu", to, copy=True)
        if not bool(parts[name].isfinite().all()):
            raise ValueError(f"the new weights' '{name}' has values that are not finite")
    if names := places.keys() - parts.keys():
        raise ValueError(f"the new weights lack tensor of this model: '{min(names)}'")
    return parts


@torch.no_grad()
def overwrite(model: Decoder, weights: StagedWeights) -> None:
    """Copies staged weights over the model's, in place. Weights that are FP8 or int8 only in the model are rounded
    anew, with new scales."""
    places = {name: tensor for name, tensor in model.state_dict().items() if name in weights.tensors}
    for name, place in places.items():
        _copy(place, weights.tensors[name])
    num_rounded = 0
    for prefix, module in model.named_modules():
        if isinstance(module, Fp8Module):
            for buffer, values in module.named_buffers(recurse=False):
                weight = buffer.removesuffix("_values")
                if weight != buffer and f"{prefix}.{weight}" in weights.tensors:
                    full_weight = weights.tensors[f"{prefix}.{weight}"].to(values.device)
                    fp8_weight = quantize(full_weight, block=module.block)
                    _copy(values, fp8_weight.values)
                    module.get_buffer(f"{weight}_scale").copy_(fp8_weight.scale)
                    num_rounded += 1
        if isinstance(module, Int8Module):
            for weight in [name.removesuffix("_scale") for name in module.state_dict() if name.endswith("_scale")]:
                source = f"{prefix}.{weight}"
                is_tied = model.config.tie_word_embeddings and source == "lm_head.weight"
                module.round_weight(weight, weights.tensors["model.embed_tokens.weight" if is_tied else source])
                num_rounded += not is_tied
    assert len(places) + num_rounded == len(weights.tensors), "a staged weight has no place in the model"


def _copy(place: Tensor, source: Tensor) -> None:
    """FP8 is copied as bytes."""
    if place.dtype == FP8:
        place, source = place.view(torch.uint8), source.view(torch.uint8)
    place.copy_(source)


# The large tensors of a sleeping engine: their memory is given back, the tensors themselves stay.
#
# Views, parameters that share memory, and their holders need no change: a tensor keeps its storage, which has no bytes
# while the engine sleeps. Addresses may differ afterwards, so no holder of an address (a CUDA graph) may outlive the
# sleep.


class NotEnoughMemory(torch.OutOfMemoryError):
    """An engine cannot wake up because a rank lacks memory; every rank sleeps on."""


class DormantMemory:
    """Storages whose bytes are given back; the bytes that must return unchanged are copied to the host."""

    def __init__(self, *, caches: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Drops the content of `caches`, which come back as zeros; the content of `weights` waits on the host."""
        self.num_bytes = 0
        """Number of bytes that were given back."""
        self._sizes = [(storage, self._release(storage)) for storage in _storages(caches)]
        self._copies: list[tuple[Tensor, Tensor]] = []
        for storage in _storages(weights):
            self._copies.append((storage, storage.to("cpu", copy=True)))
            self._release(storage)
        if any(tensor.is_cuda for tensor in caches):
            torch.cuda.empty_cache()

    def _release(self, storage: Tensor) -> int:
        size = storage.untyped_storage().nbytes()
        storage.untyped_storage().resize_(0)
        self.num_bytes += size
        return size

    @torch.no_grad()
    def restore(self) -> None:
        """Takes the memory again. If memory is short it raises torch's error, holds none, and may be called again."""
        try:
            for storage, copy in self._copies:
                storage.untyped_storage().resize_(copy.numel())
                storage.copy_(copy)
            for storage, size in self._sizes:
                storage.untyped_storage().resize_(size)
                storage.zero_()
        except BaseException:
            storages = [storage for storage, _ in (*self._copies, *self._sizes)]
            for storage in storages:
                storage.untyped_storage().resize_(0)
            if any(storage.is_cuda for storage in storages):
                torch.cuda.empty_cache()
            raise
        self._copies, self._sizes = [], []
        self.num_bytes = 0


def gpu_tensors(model: nn.Module) -> list[Tensor]:
    """The parameters and buffers on a GPU; on a CPU a copy on the host would give nothing back."""
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda]


def _storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each storage of the tensors once, as a tensor of bytes."""
    by_address = {t.untyped_storage().data_ptr(): t for t in tensors}
    with torch.inference_mode(False):
        return [
            torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
            for t in by_address.values()
            if t.untyped_storage().nbytes()
        ]
