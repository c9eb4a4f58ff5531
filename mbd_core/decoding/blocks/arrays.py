"""What a step's rules call by another name on tensors than on numpy arrays: each is written once, for both.

A step's rules work on a few hundred numbers. On a CPU a torch operation on so few takes 1 to 3 microseconds whatever
it does, numpy's a third of that. So on a CPU the rules run on numpy arrays of the tensors' memory (`array_of`). They
are written in the operators and methods that tensors and arrays share, and in the functions of this file. Annotations
say `Tensor` for both.
"""

import numpy as np
import torch
from torch import Tensor


def array_of(x: Tensor) -> Tensor:
    """A CPU's tensor as a numpy array of the same memory; a tensor of another device, and an array, as it is."""
    return x.numpy() if isinstance(x, Tensor) and x.is_cpu else x  # type: ignore[return-value]


def tensor_of(x: Tensor) -> Tensor:
    """A numpy array as a tensor of the same memory; a tensor as it is."""
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


def none_on_cpu(x: Tensor) -> bool:
    """Whether all are 0, read on a CPU alone: on a GPU, waiting for them would cost more than what they save."""
    return (isinstance(x, np.ndarray) or x.is_cpu) and not x.any()


def where(mask: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor:
    return np.where(mask, x, y) if isinstance(mask, np.ndarray) else torch.where(mask, x, y)


def put(target: Tensor, mask: Tensor, values: Tensor | float) -> None:
    """Overwrite `target` in place with `values` where `mask` holds."""
    if isinstance(target, np.ndarray):
        np.copyto(target, values, where=mask)
    elif isinstance(values, Tensor):
        target.copy_(torch.where(mask, values, target))
    else:
        target.masked_fill_(mask, values)


def at_least(x: Tensor, least: float) -> Tensor:
    return np.maximum(x, least) if isinstance(x, np.ndarray) else x.clamp(min=least)


def at_most(x: Tensor, most: float) -> Tensor:
    return np.minimum(x, most) if isinstance(x, np.ndarray) else x.clamp(max=most)


def maximum(x: Tensor, y: Tensor) -> Tensor:
    return np.maximum(x, y) if isinstance(x, np.ndarray) else torch.maximum(x, y)


def minimum(x: Tensor, y: Tensor) -> Tensor:
    return np.minimum(x, y) if isinstance(x, np.ndarray) else torch.minimum(x, y)


def real(x: Tensor) -> Tensor:
    """In float64."""
    return x.astype(np.float64) if isinstance(x, np.ndarray) else x.double()


def copy_of(x: Tensor) -> Tensor:
    return x.copy() if isinstance(x, np.ndarray) else x.clone()


def zeros_like(x: Tensor) -> Tensor:
    return np.zeros_like(x) if isinstance(x, np.ndarray) else torch.zeros_like(x)


def ones_like(x: Tensor) -> Tensor:
    return np.ones_like(x) if isinstance(x, np.ndarray) else torch.ones_like(x)


def arange(like: Tensor, *bounds: int) -> Tensor:
    """The integers of `range(*bounds)`, where `like` is."""
    if isinstance(like, np.ndarray):
        return np.arange(*bounds)
    return torch.arange(*bounds, device=like.device)


def concat(parts: list[Tensor], *, dim: int = 0) -> Tensor:
    return np.concatenate(parts, dim) if isinstance(parts[0], np.ndarray) else torch.cat(parts, dim)


def int32(x: Tensor) -> Tensor:
    return x.astype(np.int32) if isinstance(x, np.ndarray) else x.int()


def repeat(x: Tensor, number: int) -> Tensor:
    """Each element of `x` (K,), `number` times, (K `number`)."""
    return np.repeat(x, number) if isinstance(x, np.ndarray) else x.repeat_interleave(number)


def places(mask: Tensor) -> Tensor:
    """The places of the flattened mask that hold, ascending; a GPU waits for their number."""
    return mask.ravel().nonzero()[0] if isinstance(mask, np.ndarray) else mask.flatten().nonzero()[:, 0]


def placed(x: Tensor, at: Tensor, number: int) -> Tensor:
    """`x` (A,) at places `at` of `number` zeros; place `number` is that of padding."""
    if isinstance(x, np.ndarray):
        result = np.zeros(number + 1, x.dtype)
        result[at] = x
        return result[:-1]
    return x.new_zeros(number + 1).scatter_(0, at, x)[:-1]


def first_place(mask: Tensor) -> Tensor:
    """The first place along the last dimension at which the mask holds; 0 where it never does."""
    return mask.argmax(-1) if isinstance(mask, np.ndarray) else mask.int().argmax(-1)


def leading(mask: Tensor) -> Tensor:
    """The places of the last dimension at which the mask, and at all before, holds."""
    return np.logical_and.accumulate(mask, -1) if isinstance(mask, np.ndarray) else mask.cumprod(-1) > 0


def order(x: Tensor, *, descending: bool = False) -> Tensor:
    """The places of the last dimension, sorted by their values; ties from the left."""
    places = tensor_of(x).argsort(dim=-1, descending=descending, stable=True)
    return array_of(places) if isinstance(x, np.ndarray) else places


def spread(x: Tensor, at: Tensor) -> Tensor:
    """The numbers of `x` at places `at` of their last dimension; `at` has each place once."""
    result = zeros_like(x)
    if isinstance(result, np.ndarray):
        np.put_along_axis(result, at, x, -1)
        return result
    return result.scatter_(-1, at, x)


def along(x: Tensor, at: Tensor) -> Tensor:
    """The numbers at places `at` of the last dimension."""
    return np.take_along_axis(x, at, -1) if isinstance(x, np.ndarray) else x.gather(-1, at)


def slots_at(x: Tensor, at: Tensor) -> Tensor:
    """Of each row of `x` (R, N, ...) the slots `at` (R, K), (R, K, ...)."""
    if isinstance(x, np.ndarray):
        return x[np.arange(len(x))[:, None], at]
    return x.gather(1, at if x.ndim == 2 else at[..., None].expand(-1, -1, x.shape[2]))
