"""LoRA on a model in training, by peft: added before the first step, switched off for a teacher, merged at the end.

The network stays the same object; its adapted projections are peft's modules until `merge_adapter`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mbd_core.models.decoder import Decoder


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


def check_peft() -> None:
    """Raise `ValueError` if peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError:
        raise ValueError("training an adapter needs peft: install mbd-cluster[lora]") from None


def add_adapter(model: Decoder, settings: LoraSettings, *, seed: int) -> None:
    """Put a fresh adapter on the model, which computes as before; from now on it alone is trained."""
    check_peft()
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    device = next(model.parameters()).device
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.modules),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LoraModel(model, {"default": config}, "default")
    model.to(device)


@contextmanager
def without_adapter(model: Decoder) -> Iterator[None]:
    """The model as it was before the adapter, for as long as the block lasts."""
    layers = list(_adapted(model).values())
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merge_adapter(model: Decoder) -> None:
    """Add the adapter to the weights that it adapts; the model is then a plain one. Without an adapter nothing."""
    for name, layer in _adapted(model).items():
        layer.merge(safe_merge=True)
        model.set_submodule(name, layer.get_base_layer())


def _adapted(model: Decoder) -> dict[str, Any]:
    """The projections with an adapter, peft's modules, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
