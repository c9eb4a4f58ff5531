"""The matrix products of a fused layer: those of one input as one product, in floating point or in int8.

Parameters that are joined become slices of the joint weight, so no weight is in memory twice.

Shape legend: T packed tokens, I input channels, O output channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mbd_core.models.layer_parts import Reduce
from mbd_core.ops.layer.int8 import Int8Linear, Int8Module, Int8Part


class Product:
    """The products of one input with the weights of linear layers, side by side."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.weight_OI = join_storage([layer.weight for layer in layers])
        self.weight_IO = self.weight_OI.t()
        self._bias_O = _joint_bias(layers)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self.weight_OI, self._bias_O)

    def added(self, to_TO: Tensor, x_TI: Tensor) -> Tensor:
        """`to_TO` plus the product of `x_TI`, for layers without a bias."""
        return torch.addmm(to_TO, x_TI, self.weight_IO)


class Int8Product:
    """As `Product`, in int8."""

    def __init__(self, layers: Sequence[Int8Part | Int8Linear]) -> None:
        first = layers[0]
        self._module: Int8Module = first.joint if isinstance(first, Int8Part) else first
        self._bias_O = _joint_bias(layers)

    def __call__(self, x_TI: Tensor) -> Tensor:
        out = self._module.product(x_TI, "weight")
        return out if self._bias_O is None else out.add_(self._bias_O)

    def added(self, to_TO: Tensor, x_TI: Tensor) -> Tensor:
        return self._module.product(x_TI, "weight").add_(to_TO)


def product_of(*layers: nn.Module) -> Product | Int8Product:
    """The product of linear layers that read one input; all are wide, or all in int8."""
    wide = [layer for layer in layers if isinstance(layer, nn.Linear)]
    narrow = [layer for layer in layers if isinstance(layer, Int8Part | Int8Linear)]
    assert len(layers) in (len(wide), len(narrow)), "some layers are rounded, others are not"
    return Product(wide) if wide else Int8Product(narrow)


def is_product(layer: nn.Module) -> bool:
    """Whether `product_of` takes the layer: a plain linear layer or one in int8, none in FP8."""
    return type(layer) in (nn.Linear, Int8Linear, Int8Part)


def add_product(
    x: Tensor,
    left: Tensor,
    product: Product | Int8Product,
    reduce: Reduce | None,
    more: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`x` plus the `product` of `left`, plus the product of `more`. `reduce` sums both over the ranks if each rank has
    a part."""
    if reduce is None:
        x = product.added(x, left)
        return x if more is None else x.addmm_(*more)
    out = product(left)
    return x + reduce(out if more is None else out.addmm_(*more))


def _joint_bias(layers: Sequence[nn.Module]) -> Tensor | None:
    biases = [layer.bias for layer in layers if isinstance(layer.bias, Tensor)]
    return join_storage(biases) if biases else None


def join_storage(parameters: Sequence[Tensor]) -> Tensor:
    """Join the parameters along their first dimension into one tensor; each parameter becomes a slice of it.

    Nothing moves if they are already adjacent.
    """
    first = parameters[0]
    num_rows = sum(p.shape[0] for p in parameters)
    if _adjacent(parameters):
        return first.detach().as_strided((num_rows, *first.shape[1:]), first.stride())
    joint = torch.cat([p.detach() for p in parameters])
    for parameter, part in zip(parameters, joint.split([p.shape[0] for p in parameters]), strict=True):
        parameter.data = part
    return joint


def _adjacent(parameters: Sequence[Tensor]) -> bool:
    first = parameters[0]
    place = first.storage_offset()
    for p in parameters:
        shares_storage = p.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (shares_storage and p.is_contiguous() and p.storage_offset() == place):
            return False
        place += p.numel()
    return True
