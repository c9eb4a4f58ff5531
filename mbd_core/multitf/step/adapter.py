"""LoRA on a model in training, by peft, with dropout whose draws belong to the sample.

The network stays the same object; its adapted projections are peft's modules until `merge_adapter`. Base and adapter
may be cut among workers (`parallel.py`).
"""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mbd_core.models.decoder import Decoder
from mbd_core.multitf.config import LoraSettings
from mbd_core.multitf.step.parallel import cut_like, own_part, whole
from mbd_core.multitf.step.quantized_base import dequantize_base

# Dropout whose draws belong to the sample: the same whichever worker computes it, beside which others, how padded.
#
# torch's own draws depend on the order in which a process asks for them, and so on who computes what. Here a layer's
# draws for a sample come from a generator of their own, seeded by the run's seed, the step, the sample, and the
# layer. A layer that is computed again in the backward pass draws the same again.
#
# Shape legend: S training sequences, N samples in them, L tokens of the longest sequence, D channels.


@dataclass(frozen=True)
class SampleDraws:
    """What a sample's draws depend on, and its tokens."""

    seed: int
    tokens: int

    @classmethod
    def of(cls, sample: int, *, tokens: int, seed: int, step: int) -> "SampleDraws":
        """The draws of sample number `sample` in the update numbered `step` of a run."""
        return cls(random.Random(f"{seed}/{step}/{sample}/dropout").getrandbits(62), tokens)


class CurrentDraws:
    """The samples that are computed at present, which all dropout layers of a model share."""

    def __init__(self, rows: Sequence[Sequence[SampleDraws]] = ()) -> None:
        self.rows = rows

    @property
    def rows(self) -> Sequence[Sequence[SampleDraws]]:
        """The samples of each training sequence, in their order."""
        return self._rows

    @rows.setter
    def rows(self, rows: Sequence[Sequence[SampleDraws]]) -> None:
        self._rows = rows
        numbers = [(row, one.seed, one.tokens) for row, samples in enumerate(rows) for one in samples]
        # a compiled layer takes numbers of a tensor as its input, and those of Python as its own constants
        self.table_N3 = torch.tensor(numbers, dtype=torch.int64).reshape(-1, 3)


class SampleDropout(nn.Module):
    """`nn.Dropout(p)` on (S, L, D), layer number `layer` of those of its model; padding is not drawn for."""

    def __init__(self, p: float, layer: int, draws: CurrentDraws) -> None:
        super().__init__()
        self.p, self.draws = p, draws
        self.layer = torch.tensor(layer, device="cpu")  # no buffer: it stays where generators are seeded

    def forward(self, x_SLD: Tensor) -> Tensor:
        if not self.training:
            return x_SLD
        dropped_SLD = draw_dropped(x_SLD.detach(), self.draws.table_N3, self.layer, self.p)
        return x_SLD.masked_fill(dropped_SLD, 0.0) / (1.0 - self.p)


@torch.library.custom_op("mbd::draw_dropped", mutates_args=())
def draw_dropped(x_SLD: Tensor, table_N3: Tensor, layer: Tensor, p: float) -> Tensor:
    """Which numbers are dropped. One operation to `torch.compile`, which cannot trace generators."""
    samples, device, ends = table_N3.tolist(), x_SLD.device, [0] * len(x_SLD)
    num_announced = len({row for row, _, _ in samples})
    assert num_announced == len(x_SLD), f"{len(x_SLD)} sequences are computed, and {num_announced} were announced"
    dropped_SLD = torch.zeros(x_SLD.shape, dtype=torch.bool, device=device)
    for row, seed, tokens in samples:
        generator = torch.Generator(device).manual_seed(seed + int(layer))
        draws = torch.rand(tokens, x_SLD.shape[-1], generator=generator, device=device)
        dropped_SLD[row, ends[row] : ends[row] + tokens] = draws < p
        ends[row] += tokens
    return dropped_SLD


@draw_dropped.register_fake
def _(x_SLD: Tensor, table_N3: Tensor, layer: Tensor, p: float) -> Tensor:
    return torch.empty(x_SLD.shape, dtype=torch.bool, device=x_SLD.device)


def check_peft() -> None:
    """Raise `ValueError` if peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError:
        raise ValueError("training an adapter needs peft: install mbd-cluster[lora]") from None


def add_adapter(model: Decoder, settings: LoraSettings, *, seed: int) -> CurrentDraws:
    """Put a fresh adapter on the model, which computes as before; from now on it alone is trained.

    Its dropout draws for the samples that the result names. The adapter of a model without values (on the meta device)
    has none either, until `fill_adapter`.
    """
    check_peft()
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


@torch.no_grad()
def fill_adapter(model: Decoder, *, seed: int) -> None:
    """The values that an adapter begins with, LoRA's: down-projections drawn, up-projections zero.

    Where the model is cut among workers each fills its part of the same values.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in _adapted_layers(model).values():
        down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        weight = nn.init.kaiming_uniform_(torch.empty(down.shape), a=math.sqrt(5), generator=generator)
        own_part(down).copy_(own_part(cut_like(weight.to(own_part(down).device), down)))
        own_part(up).zero_()


def is_adapters(name: str) -> bool:
    """Whether the tensor of this name is the adapter's."""
    return ".lora_" in name


def base_tensors(model: Decoder) -> dict[str, Tensor]:
    """The tensors of the model but the adapter's, by the names that they have without one."""
    return {name.replace(".base_layer.", "."): t for name, t in model.state_dict().items() if not is_adapters(name)}


@contextmanager
def without_adapter(model: Decoder) -> Iterator[None]:
    """The model as it was before the adapter, for as long as the block lasts."""
    layers = list(_adapted_layers(model).values())
    for layer in layers:
        layer.enable_adapters(False)
        for name in layer.adapter_layer_names:  # what is trained stays so: sharding looks when it gathers a weight
            getattr(layer, name).requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merge_adapter(model: Decoder) -> None:
    """Add the adapter to the weights that it adapts; the model is then a plain one. Without an adapter nothing.

    To a base in 4 bits it is added as that computed, to the dequantised weights. Where the model is sharded every
    worker calls it, and adds to its own part of each weight.
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
    """Copies on the CPU of what `merge_adapter` would leave, whole and by the decoder's names; nothing changes.

    Every worker of a sharded model calls it.
    """
    tensors = {name: whole(tensor).detach().to("cpu", copy=True) for name, tensor in base_tensors(model).items()}
    for name, layer in _adapted_layers(model).items():
        tensors[f"{name}.weight"] += _change(layer).to("cpu")
    return tensors


def _change(layer: Any) -> Tensor:
    """What an adapter adds to the weight of its projection."""
    up, down = whole(layer.lora_B["default"].weight), whole(layer.lora_A["default"].weight)
    return up @ down * layer.scaling["default"]


@torch.no_grad()
def adapter_factors(model: Decoder) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each adapted projection, by its name in the decoder, on the CPU; every worker of a sharded model
    calls it."""

    def matrix(layer: Any, factor: str) -> Tensor:
        return whole(getattr(layer, factor)["default"].weight).float().cpu()

    return {name: (matrix(layer, "lora_A"), matrix(layer, "lora_B")) for name, layer in _adapted_layers(model).items()}


def _adapted_layers(model: Decoder) -> dict[str, Any]:
    """The projections with an adapter, peft's modules, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
