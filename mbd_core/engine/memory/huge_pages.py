"""A model's weights on a CPU in pages of 2 MB, where Linux has them.

A step reads all weights once, and a CPU that looks up a page of 4 KB for each 4 KB of them waits for it, above all in
a virtual machine. Most distributions give huge pages only to memory that asks for them (`madvise`).
`python -m benchmarks forward` has such a forward beside transformers', whose weights lie in small pages.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

from mbd_core.models.decoder import Decoder

HUGE_PAGE = 2**21
ALIGNMENT = 64
"""As torch aligns tensors, because a matrix product may round differently at another alignment."""


def in_huge_pages(model: Decoder) -> Decoder:
    """Moves the weights of a model on a CPU into one piece of memory, and returns the model.

    They move one by one, so the peak memory is the model and about one tensor. Weights on a GPU stay where they are;
    packed int8 weights stay in FBGEMM's memory. A system without huge pages gives the piece in small ones.
    """
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.device.type == "cpu" and t.is_contiguous()]
    holders: dict[int, list[Tensor]] = {}  # a tied head may be a tensor of its own on the same memory
    for tensor in tensors:
        if tensor.numel():
            holders.setdefault(tensor.data_ptr(), []).append(tensor)
    if not holders:
        return model
    sizes = [-(-max(tensor.nbytes for tensor in same) // ALIGNMENT) * ALIGNMENT for same in holders.values()]
    memory_B, start = _memory(sum(sizes)), 0
    for same, size in zip(holders.values(), sizes, strict=True):
        for number, tensor in enumerate(same):
            place = memory_B[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor.data = place if number else place.copy_(tensor.data)
        start += size
    return model


def _memory(num_bytes: int) -> Tensor:
    """Memory (B,) of uint8 that lives as long as a tensor on it."""
    size = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # another system than Linux
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory would have small pages
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
