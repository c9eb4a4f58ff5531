"""Pages that fell out of a device's memory, kept in the host's until a request begins with them again.

A published page never changes, so its copy is as good as it. The pool hands over what it evicts and asks for it by
hash (`PagePool.lookup`). A page that came back keeps its copy, so that the next eviction costs nothing.

    device   | cached page --evict--> its memory is another's
             |      | keep: gather, copy              ^ restore: copy, scatter
    host     |      v                                 |
             | slot, least recently used first -------'

All copies are on the device's stream of steps: they read a page before a later step writes it, and write one before a
later step reads it, and the host waits for none of them.

Shape legend: S pages at once, X numbers of a page, its keys and values of all layers one after another.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

STAGE_PAGES = 16
"""Pages that are gathered on the device before they cross, so that one page is one copy."""


class HostPages:
    """Copies of `num_pages` pages of `layers`' keys and values, by the hash of what they hold.

    num_kept, num_restored  pages that were copied to the host, and back
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], *, num_pages: int) -> None:
        self._tensors = [tensor for pair in layers for tensor in pair]
        first = self._tensors[0]
        sizes = [tensor[0].numel() for tensor in self._tensors]
        self._stage_SX = first.new_empty((STAGE_PAGES, sum(sizes)))
        self._parts = self._stage_SX.split(sizes, dim=1)
        device = torch.device("cpu") if first.is_cuda else first.device
        self._memory = torch.empty((num_pages, sum(sizes)), dtype=first.dtype, device=device, pin_memory=first.is_cuda)
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(num_pages - 1, -1, -1))
        self.num_kept = self.num_restored = 0

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slot_of

    def touch(self, chain: Iterable[bytes]) -> None:
        """These count as just used, the first of them last; they are here."""
        for digest in reversed(list(chain)):
            self._slot_of.move_to_end(digest)

    def keep(self, pages: Mapping[int, bytes]) -> None:
        """Copy pages of the device, by number with their hashes, the one that is to be kept longest last. Those that
        were used least recently make room, also these themselves."""
        copies: dict[int, int] = {}  # of a slot the last page that takes it
        for page, digest in pages.items():
            if digest in self._slot_of:
                self._slot_of.move_to_end(digest)
                continue
            slot = self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]
            self._slot_of[digest] = slot
            copies[slot] = page
        self.num_kept += len(copies)
        for slots, numbers in _batches(list(copies), list(copies.values())):
            index = self._index(numbers)
            for part_SX, tensor in zip(self._parts, self._tensors, strict=True):
                part_SX[: len(numbers)].copy_(tensor.index_select(0, index).flatten(1))
            for row, slot in enumerate(slots):
                self._memory[slot].copy_(self._stage_SX[row], non_blocking=True)

    def restore(self, pages: Mapping[int, bytes]) -> None:
        """Fill pages of the device, by number, with what these hashes name; all are here."""
        slots = [self._slot_of[digest] for digest in pages.values()]
        self.num_restored += len(slots)
        for some_slots, numbers in _batches(slots, list(pages)):
            for row, slot in enumerate(some_slots):
                self._stage_SX[row].copy_(self._memory[slot], non_blocking=True)
            index = self._index(numbers)
            for part_SX, tensor in zip(self._parts, self._tensors, strict=True):
                tensor.index_copy_(0, index, part_SX[: len(numbers)].reshape(-1, *tensor.shape[1:]))

    def forget(self) -> None:
        """Nothing is known any more."""
        self._free += self._slot_of.values()
        self._slot_of.clear()

    def check_integrity(self) -> None:
        """Every slot is free or holds one page; raises `AssertionError`."""
        slots = [*self._free, *self._slot_of.values()]
        assert sorted(slots) == list(range(len(self._memory))), "a slot of the host's memory is lost or held twice"

    def _index(self, pages: Sequence[int]) -> Tensor:
        device = self._stage_SX.device
        index = torch.tensor(pages, dtype=torch.int64, pin_memory=device.type == "cuda")
        return index.to(device, non_blocking=True)


def _batches(slots: Sequence[int], pages: Sequence[int]) -> Iterable[tuple[Sequence[int], Sequence[int]]]:
    for start in range(0, len(pages), STAGE_PAGES):
        part = slice(start, start + STAGE_PAGES)
        yield slots[part], pages[part]
