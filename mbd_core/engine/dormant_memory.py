"""The large tensors of an engine that sleeps: their memory is given back, the tensors themselves stay.

Views, parameters that share memory, and whoever holds them need not know: a tensor keeps its storage, which has no
bytes for a while. Addresses may differ afterwards, so nothing that holds one (a CUDA graph) may outlive the sleep.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class DormantMemory:
    """Storages whose bytes are given back, with copies on the host of those that must come again as they were."""

    def __init__(self, *, lost: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Zeros will come in the place of what the `lost` tensors hold; what `kept` ones hold waits on the host."""
        self.num_bytes = 0
        """Bytes that were given back."""
        self._empty = [(whole, self._release(whole)) for whole in _storages(lost)]
        self._kept: list[tuple[Tensor, Tensor]] = []
        for whole in _storages(kept):
            self._kept.append((whole, whole.to("cpu", copy=True)))
            self._release(whole)
        if any(tensor.is_cuda for tensor in lost):
            torch.cuda.empty_cache()

    def _release(self, whole: Tensor) -> int:
        size = whole.untyped_storage().nbytes()
        whole.untyped_storage().resize_(0)
        self.num_bytes += size
        return size

    @torch.no_grad()
    def restore(self) -> None:
        """Take the memory again; raises torch's error where there is not enough of it. None is held then, and it may
        be called again."""
        try:
            for whole, copy in self._kept:
                whole.untyped_storage().resize_(copy.numel())
                whole.copy_(copy)
            for whole, size in self._empty:
                whole.untyped_storage().resize_(size)
                whole.zero_()
        except BaseException:
            taken = [whole for whole, _ in (*self._kept, *self._empty)]
            for whole in taken:
                whole.untyped_storage().resize_(0)
            if any(whole.is_cuda for whole in taken):
                torch.cuda.empty_cache()
            raise
        self._kept, self._empty = [], []
        self.num_bytes = 0


def gpu_tensors(model: nn.Module) -> list[Tensor]:
    """The parameters and buffers that are on a GPU; on a CPU a copy on the host would give nothing back."""
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda]


def _storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each storage of the tensors once, as a tensor of bytes."""
    found = {t.untyped_storage().data_ptr(): t for t in tensors}
    with torch.inference_mode(False):
        return [
            torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
            for t in found.values()
            if t.untyped_storage().nbytes()
        ]
