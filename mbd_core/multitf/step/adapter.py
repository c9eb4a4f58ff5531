"""LoRA on a model in training, by peft.

The network stays the same object; its adapted projections are peft's modules until `merge_adapter`. Base and adapter
may be cut among workers (`parallel.py`).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mbd_core.models.decoder import Decoder
from mbd_core.models.lora import Adapter, adapted_modules
from mbd_core.models.model_config import ModelConfig
from mbd_core.multitf.config import LoraSettings
from mbd_core.multitf.step.quantized_base import dequantize_base
from mbd_core.multitf.step.sample_dropout import CurrentDraws, SampleDropout
from mbd_core.multitf.step.sharding import cut_like, own_part, whole


def check_peft() -> None:
    """Raise `ValueError` if peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError:
        raise ValueError("training an adapter needs peft: install mbd-cluster[lora]") from None


def add_adapter(model: Decoder, settings: LoraSettings, *, seed: int) -> CurrentDraws:
    """Puts a fresh adapter on the model. The model computes as before, and only the adapter is trained from now on.

    The caller sets in the result the samples of each forward, for which the adapter's dropout then draws. On the meta
    device the adapter has no values until `fill_adapter`. Raises `ValueError` for a module that the model lacks.
    """
    check_peft()
    _check_modules(model.config, settings)
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    device, draws = next(model.parameters()).device, CurrentDraws()
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.modules),
    )
    with torch.random.fork_rng(devices=[]):
        LoraModel(model, {"default": config}, "default")
    for number, layer in enumerate(_adapted_layers(model).values()):
        if settings.dropout:
            layer.lora_dropout["default"] = SampleDropout(settings.dropout, number, draws)
    model.to(device)
    if device.type != "meta":
        fill_adapter(model, seed=seed)
    return draws


def _check_modules(config: ModelConfig, settings: LoraSettings) -> None:
    """Raise `ValueError` for a name that is no projection's: peft leaves it out if another name fits."""
    if config.gemma is not None:
        return
    modules = [name for _, _, name in adapted_modules(config)]
    for name in settings.modules:
        if not any(module.endswith(f".{name}") for module in modules):
            known = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in modules))
            raise ValueError(
                f"train.lora.modules has {name!r}, which is no projection of this {config.architecture} that can have "
                f"an adapter; its names here are {known}"
            )


@torch.no_grad()
def fill_adapter(model: Decoder, *, seed: int) -> None:
    """Fills an adapter with LoRA's first values: down-projections drawn, up-projections zero.

    Where the model is cut among workers, each fills its part of the same values.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in _adapted_layers(model).values():
        down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        weight = nn.init.kaiming_uniform_(torch.empty(down.shape), a=math.sqrt(5), generator=generator)
        own_part(down).copy_(own_part(cut_like(weight.to(own_part(down).device), down)))
        own_part(up).zero_()


def check_start(start: Adapter, settings: LoraSettings) -> None:
    """Raise `ValueError` unless the adapter that a run starts from has the rank and projections of `settings`."""
    if start.rank != settings.rank:
        raise ValueError(
            f"the adapter that this run starts from has rank {start.rank}, not {settings.rank}: give --lora "
            f"{start.rank}"
        )
    projections = sorted({name.rpartition(".")[2] for name in start.factors})
    if projections != sorted(settings.modules):
        raise ValueError(
            f"the adapter that this run starts from changes {', '.join(projections)}, not "
            f"{', '.join(settings.modules)}: give --set train.lora.modules={','.join(projections)}"
        )


@torch.no_grad()
def begin_adapter(model: Decoder, start: Adapter) -> None:
    """Gives the model's adapter the factors of another adapter (`check_start`), so that both compute the same.

    Where the model is cut among workers, each takes its part. Raises `ValueError` if a layer's projection has only
    one of the two adapters.
    """
    layers = _adapted_layers(model)
    if lacking := next(iter(sorted(layers.keys() ^ start.factors.keys())), None):
        raise ValueError(
            f"only one of the adapter that this run starts from and the run's own changes {lacking}; start without an "
            "adapter, or from an adapter of the same layers"
        )
    for name, layer in layers.items():
        down, up = (getattr(layer, factor)["default"].weight for factor in ("lora_A", "lora_B"))
        down_values, up_values = start.factors[name]  # the adapter's scale is multiplied into B
        for weight, values in ((down, down_values), (up, up_values / layer.scaling["default"])):
            own_part(weight).copy_(own_part(cut_like(values.to(own_part(weight).device), weight)))


def is_of_adapter(name: str) -> bool:
    """Whether the tensor of this name belongs to an adapter."""
    return ".lora_" in name


def base_tensors(model: Decoder) -> dict[str, Tensor]:
    """The base model's tensors, by the names that they have in a model without an adapter."""
    return {name.replace(".base_layer.", "."): t for name, t in model.state_dict().items() if not is_of_adapter(name)}


@contextmanager
def without_adapter(model: Decoder) -> Iterator[None]:
    """The model without its adapter, for as long as the block lasts."""
    layers = list(_adapted_layers(model).values())
    for layer in layers:
        layer.enable_adapters(False)
        # peft marks a disabled adapter as not trained, and sharding reads the mark when it gathers a weight
        for name in layer.adapter_layer_names:
            getattr(layer, name).requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merge_adapter(model: Decoder) -> None:
    """Adds the adapter to the weights that it adapts, which leaves a plain model. Without an adapter it does nothing.

    A 4-bit base is dequantised first, as in a forward. Every worker of a sharded model calls it, and
    adds to its own part of each weight.
    """
    dequantize_base(model)
    for name, layer in _adapted_layers(model).items():
        base = layer.get_base_layer()
        weight_part = own_part(base.weight)
        weight_part.add_(own_part(cut_like(_change(layer), base.weight)))
        if not weight_part.isfinite().all():
            raise ValueError(f"the adapter of {name} has values that are not finite")
        model.set_submodule(name, base)


@torch.no_grad()
def merged_tensors(model: Decoder) -> dict[str, Tensor]:
    """Copies on the CPU of the merged weights, whole and by the decoder's names; the model is unchanged.

    Every worker of a sharded model calls it.
    """
    tensors = {name: whole(tensor).detach().to("cpu", copy=True) for name, tensor in base_tensors(model).items()}
    for name, layer in _adapted_layers(model).items():
        tensors[f"{name}.weight"] += _change(layer).to("cpu")
    return tensors


def _change(layer: Any) -> Tensor:
    """The adapter's change of its projection's weight."""
    up, down = whole(layer.lora_B["default"].weight), whole(layer.lora_A["default"].weight)
    return up @ down * layer.scaling["default"]


@torch.no_grad()
def adapter_factors(model: Decoder) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each adapted projection, by its name in the decoder, on the CPU.

    Every worker of a sharded model calls it.
    """

    def matrix(layer: Any, factor: str) -> Tensor:
        return whole(getattr(layer, factor)["default"].weight).float().cpu()

    return {name: (matrix(layer, "lora_A"), matrix(layer, "lora_B")) for name, layer in _adapted_layers(model).items()}


def _adapted_layers(model: Decoder) -> dict[str, Any]:
    """The projections with an adapter (peft's modules), by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
