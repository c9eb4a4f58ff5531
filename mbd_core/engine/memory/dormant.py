"""The large tensors of a sleeping engine: their memory is given back, the tensors themselves stay.

Views, parameters that share memory, and their holders need no change: a tensor keeps its storage, which has no bytes
while the engine sleeps. Addresses may differ afterwards, so no holder of an address (a CUDA graph) may outlive the
sleep.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


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
        """Takes the memory again. Raises torch's error if memory is short. Then no memory was taken, and the call may
        be repeated."""
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
