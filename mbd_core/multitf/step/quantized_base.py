"""QLoRA: the frozen base of an adapter in 4 bits (NF4), by bitsandbytes.

The matrices of the layers are quantised: projections, dense MLPs and stacked experts. Embeddings, head, norms and
router stay as they are. A matrix is dequantised for its product, and again in the backward pass, so a wide matrix
never outlives its product. The numbers equal LoRA's on the dequantised base.

NF4 (Dettmers et al. 2023, QLoRA, App. E) keeps for each number the nearest of 16 levels, the quantiles of a normal
distribution, times the largest magnitude of its block of 64. These magnitudes are 8-bit numbers themselves, in blocks
of 256 (double quantisation): 4.127 bits a number altogether.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mbd_core.models.decoder import Decoder
from mbd_core.models.mlp import Experts, compute_experts

BLOCK, BLOCK_OF_SCALES = 64, 256
FLOAT32_BYTES = 4
STACKS = ("gate_proj", "up_proj", "down_proj")


def check_bitsandbytes(device: torch.device | None = None) -> None:
    """Raises `ValueError` if bitsandbytes is not installed, or does not compute on `device`."""
    try:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    except ImportError:
        raise ValueError("--set train.lora.quantize_base=nf4 needs bitsandbytes: install mbd-cluster[qlora]") from None
    if device is None:
        return
    try:
        dequantize_4bit(*quantize_4bit(torch.ones(BLOCK, device=device), quant_type="nf4"))
    except Exception as error:  # a library without a kernel for the device may raise anything
        raise ValueError(
            f"--set train.lora.quantize_base=nf4 cannot be honoured: bitsandbytes does not compute on {device} "
            f"here: {error}"
        ) from error


class Nf4:
    """A tensor in NF4. `wide` dequantises it, by default to `dtype`."""

    def __init__(self, values: Tensor, dtype: torch.dtype) -> None:
        from bitsandbytes.functional import quantize_4bit

        self.shape, self.dtype = values.shape, dtype
        self._packed, self._state = quantize_4bit(
            values.detach().float(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )

    def wide(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dequantised tensor, made anew at each call."""
        from bitsandbytes.functional import dequantize_4bit

        self._state.dtype = dtype or self.dtype
        tensor: Tensor = dequantize_4bit(self._packed, self._state)
        return tensor.view(self.shape)

    @property
    def num_bytes(self) -> int:
        state = self._state
        parts = (self._packed, state.absmax, state.state2.absmax)
        return sum(part.numel() * part.element_size() for part in parts)


def nf4_bytes(numel: int) -> int:
    """Bytes of `numel` numbers in NF4."""
    scales = -(-numel // BLOCK)
    return -(-numel // 2) + scales + FLOAT32_BYTES * -(-scales // BLOCK_OF_SCALES)


class _Product(torch.autograd.Function):
    """`x @ W^T + b`, keeping only W in NF4 for its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Nf4, bias: Tensor | None) -> Tensor:
        ctx.matrix = matrix
        return F.linear(x, matrix.wide(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return gradient @ ctx.matrix.wide().to(gradient.dtype), None, None


class Nf4Linear(nn.Module):
    """A frozen `nn.Linear` whose matrix is in NF4. Its bias, if any, stays as it is."""

    def __init__(self, linear: nn.Linear, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix, self.bias = Nf4(linear.weight.to(device), dtype), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Product.apply(x, self.matrix, self.bias)
        return out

    def dequantized(self) -> nn.Linear:
        """The plain layer with the dequantised matrix, in float32."""
        width, inputs = self.matrix.shape
        linear = nn.Linear(inputs, width, bias=False, device="meta")
        linear.weight = nn.Parameter(self.matrix.wide(torch.float32), requires_grad=False)
        linear.bias = self.bias
        return linear


class Nf4Experts(nn.Module):
    """Frozen `Experts` whose stacks are in NF4. The backward pass computes them again from their input."""

    def __init__(self, experts: Experts, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.stacks = {name: Nf4(getattr(experts, name).to(device), dtype) for name in STACKS}

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._compute(x_TD, ids_TK, weights_TK)
        out: Tensor = checkpoint(
            self._compute, x_TD, ids_TK, weights_TK, use_reentrant=False, preserve_rng_state=False
        )
        return out

    def _compute(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        gate, up, down = (self.stacks[name].wide() for name in STACKS)
        return compute_experts(x_TD, gate, up, down, ids_TK, weights_TK)

    def dequantized(self, model: Decoder) -> Experts:
        """The plain experts with the dequantised stacks, in float32."""
        assert model.config.moe is not None
        with torch.device("meta"):
            experts = Experts(model.config.hidden_size, model.config.moe)
        for name, stack in self.stacks.items():
            setattr(experts, name, nn.Parameter(stack.wide(torch.float32), requires_grad=False))
        return experts


def quantized_modules(model: Decoder) -> dict[str, nn.Linear | Experts]:
    """The modules in the model's layers that QLoRA quantises, by name: all matrices but the adapter's and router's."""
    return {
        f"model.layers.{name}": module
        for name, module in model.model.layers.named_modules()
        if isinstance(module, Experts) or (isinstance(module, nn.Linear) and ".lora_" not in name)
    }


@torch.no_grad()
def quantize_base(model: Decoder, device: torch.device, dtype: torch.dtype) -> None:
    """Quantises the layers' matrices of a model with an adapter, one after another, on `device`, where they stay.

    `dtype` is the matrix's dtype in a product. Raises `ValueError` as `check_bitsandbytes`.
    """
    check_bitsandbytes(device)
    for name, module in quantized_modules(model).items():
        kind = Nf4Experts if isinstance(module, Experts) else Nf4Linear
        model.set_submodule(name, kind(module, device, dtype))  # type: ignore[arg-type]


@torch.no_grad()
def dequantize_base(model: Decoder) -> None:
    """Replaces NF4 layers by plain layers with their values in float32; others stay as they are."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Nf4Linear):
            model.set_submodule(name, module.dequantized())
        elif isinstance(module, Nf4Experts):
            model.set_submodule(name, module.dequantized(model))
