"""Pages of KV memory: their owners, the published prefixes that sequences may share, and the memory itself.

A page is free, owned (by one sequence, or by several once it is published), or cached: published and without an owner,
so that its content can be found until the memory is needed.

    free --alloc--> owned --release--> free                      a page that was never published
                      |
                   publish
                      v
    cached <--release-- owned --share--> owned twice             a page that is known by the hash of its chain
       |  --share-->
       '--alloc (least recently used first)--> owned

With `HostPages`, `alloc` first copies a cached page's content to the host's memory, and `lookup` copies it back into a
free or cached page.

A chain of hashes names content: the hash of a page covers its tokens, the hash of the page before it, and at the root
the namespace (models, the version of their weights, an adapter, the order of rows). The keys of a page depend on
nothing else, because they see no later page. Page 0 is the null page: it has no owner, and writes that must have no
effect go there.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from mbd_core.models.model_config import ModelConfig

NULL_PAGE = 0
DIGEST_BYTES = 16


def chain_root(namespace: str) -> bytes:
    """The parent hash of every first page; chains of different namespaces share no page."""
    return blake2b(namespace.encode(), digest_size=DIGEST_BYTES, person=b"kv root").digest()


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a page of `tokens` after the page whose hash is `parent`.

    128 bits of BLAKE2b: equal hashes are taken for equal content, which is not compared. Two different contents among
    n pages collide with a chance of about n^2 / 2^129 (1e-15 for 10^12 pages), and a collision on purpose takes 2^64
    hashes.
    """
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=DIGEST_BYTES, person=b"kv page").digest()


class PagePool:
    """Hands out page numbers, takes them back, and finds published pages; knows no tensors and no sequences.

    `host`, if there is one, keeps evicted pages.

    `lookups` counts the prefix tokens that were looked up when requests were first admitted, `hits` the tokens found
    among them. The scheduler counts them, because only it knows which lookups led to an admission.
    """

    def __init__(self, num_pages: int, host: HostPages | None = None) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: a pool needs the null page and at least one more")
        self.num_pages, self.host = num_pages, host
        self.lookups = 0
        self.hits = 0
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._num_owners = [0] * num_pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out: free pages, and cached pages, whose content is then lost."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Published pages without an owner."""
        return len(self._cached)

    @property
    def capacity(self) -> int:
        """Pages that sequences can own: all but the null page."""
        return self.num_pages - 1

    def alloc(self, count: int) -> list[int] | None:
        """`count` pages with one owner each; `None`, and no page is taken, if there are fewer.

        Cached pages are taken only when no free page is left, the least recently used first, and lose their content.
        """
        if count > self.num_free:
            return None
        if self.host is not None and count > len(self._free):
            evicted = itertools.islice(self._cached, count - len(self._free))
            self.host.keep({page: self._hash_of[page] for page in evicted})
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._num_owners[page] = 1
        return pages

    def lookup(self, chain: Sequence[bytes]) -> list[int]:
        """The published pages of the longest known start of `chain`; cached pages among them count as just used.

        Pages on the host are copied back, as far as there are pages without an owner.
        """
        if self.host is not None:
            self._bring_back(chain, self.host)
        pages = []
        for digest in chain:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        for page in reversed(pages):
            self._touch(page)
        return pages

    def _bring_back(self, chain: Sequence[bytes], host: HostPages) -> None:
        """Finds the longest start of `chain` on device or host, and copies its host pages back."""
        known = list(itertools.takewhile(lambda digest: digest in self._page_of or digest in host, chain))
        missing = [digest for digest in known if digest not in self._page_of]
        if not missing:
            return
        held_pages = [self._page_of[digest] for digest in known if digest in self._page_of]
        self.share(held_pages)  # so that no returning page evicts them
        host.touch(missing)
        pages = self.alloc(min(len(missing), self.num_free)) or []
        # evictions for the first returning pages may have overwritten host copies of the last ones
        found = list(itertools.takewhile(host.__contains__, missing))[: len(pages)]
        contents = dict(zip(pages, found, strict=False))
        host.restore(contents)
        for page, digest in contents.items():
            self.publish(page, digest)
        self.release(pages)
        self.release(held_pages)

    def share(self, pages: Sequence[int]) -> None:
        """Add an owner to published pages, so that they are not evicted."""
        for page in pages:
            assert page in self._hash_of, f"page {page} is not published, so it cannot be shared"
            self._cached.pop(page, None)
            self._num_owners[page] += 1

    def publish(self, page: int, digest: bytes) -> bool:
        """Publishes an owned page with final content under `digest`; false if `digest` already has another page."""
        assert self._num_owners[page], f"page {page} has no owner, so what it holds is not known"
        holder = self._page_of.setdefault(digest, page)
        if holder == page:
            assert self._hash_of.setdefault(page, digest) == digest, f"page {page} is published with other content"
        return holder == page

    def release(self, pages: Sequence[int], chain: Sequence[bytes] = ()) -> None:
        """Remove an owner from a sequence's pages, given in their order. The caller must not use the pages afterwards.

        `chain` holds the hashes of the leading pages whose tokens are final. The last page is released first, so that
        later pages of a chain are evicted before the earlier pages that lead to them. If another page was published
        with the same content, that page counts as just used; if it was evicted, this page is published.
        """
        for index in reversed(range(len(pages))):
            page = pages[index]
            if index < len(chain):
                self.publish(page, chain[index])
            self._num_owners[page] -= 1
            assert self._num_owners[page] >= 0, f"page {page} was released by a sequence that does not own it"
            if not self._num_owners[page]:
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)
            if index < len(chain):
                self._touch(self._page_of[chain[index]])

    def forget(self) -> None:
        """Forgets all content: cached pages become free, and owned pages are no longer published."""
        self._free += self._cached
        self._cached.clear()
        self._hash_of.clear()
        self._page_of.clear()
        if self.host is not None:
            self.host.forget()

    def _touch(self, page: int) -> None:
        if page in self._cached:
            self._cached.move_to_end(page)

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        return page

    def check_integrity(self, pages_of: Mapping[str, Sequence[int]]) -> None:
        """Checks that every page is free, cached, or owned as often as counted, and that shared pages are published.

        `pages_of` holds all pages by owner. Raises `AssertionError` naming the page.
        """
        holders: dict[int, list[str]] = {}
        places = [*pages_of.items(), ("the free list", self._free), ("the cached pages", list(self._cached))]
        for name, pages in places:
            for page in pages:
                assert NULL_PAGE < page < self.num_pages, f"{name} holds page {page}, which cannot be owned"
                holders.setdefault(page, []).append(name)
        for page, names in holders.items():
            has_no_owner = page in self._cached or not self._num_owners[page]
            is_held_twice = len(names) > 1 and (
                has_no_owner or page not in self._hash_of or len(set(names)) < len(names)
            )
            assert not is_held_twice, f"page {page} is held by {' and by '.join(names)}"
        lost_pages = set(range(1, self.num_pages)) - holders.keys()
        assert not lost_pages, f"no owner holds pages {sorted(lost_pages)}"
        counts = dict.fromkeys(range(1, self.num_pages), 0)
        for pages in pages_of.values():
            for page in pages:
                counts[page] += 1
        for page, count in counts.items():
            assert count == self._num_owners[page], f"page {page} has {count} owners, {self._num_owners[page]} counted"
            is_published = page in self._hash_of
            assert is_published or page not in self._cached, f"page {page} is cached but not published"
            assert count or page in self._cached or not is_published, f"page {page} is free but published"
        assert {p: d for d, p in self._page_of.items()} == self._hash_of, "hashes and pages do not name each other"
        if self.host is not None:
            self.host.check_integrity()


# The KV memory itself: keys and values of all layers in pages of a fixed number of tokens.
#
# Shape legend: T packed query tokens, K key/value heads, C head channels.


class PagedKVCache:
    """Keys and values of pages, in `layers` as (pages, page_size, K, C) of each layer; layers may differ in K and C.

    A location is `page * page_size + offset`. `k` and `v` hold all layers one after another.
    """

    def __init__(
        self, config: ModelConfig, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        heads = [config.of_layer(layer) for layer in range(config.num_layers)]
        shapes = [(num_pages, page_size, c.num_kv_heads, c.head_dim) for c in heads]
        sizes = [math.prod(shape) for shape in shapes]
        self.page_size = page_size
        self.k = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.v = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.layers = tuple(
            (k.view(shape), v.view(shape))
            for k, v, shape in zip(self.k.split(sizes), self.v.split(sizes), shapes, strict=True)
        )
        self.by_location = tuple((k.flatten(0, 1), v.flatten(0, 1)) for k, v in self.layers)

    def write(self, layer: int, k: Tensor, v: Tensor, locations: Tensor) -> None:
        """Put keys and values (T, K, C) at `locations` (T,)."""
        keys, values = self.by_location[layer]
        keys.index_copy_(0, locations, k.to(keys.dtype))
        values.index_copy_(0, locations, v.to(values.dtype))

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copies the content of the pages `source` (n,) into the pages `target` (n,), in all layers."""
        for k, v in self.layers:
            k[target], v[target] = k[source], v[source]


STAGE_PAGES = 16
"""Number of pages that are gathered on the device at once. A gathered page crosses in one copy."""


class HostPages:
    """Copies of `num_pages` pages of `layers`' keys and values in the host's memory, by the hash of their content.

    A published page never changes, so its copy stays valid. The pool hands over evicted pages and asks for them by
    hash (`PagePool.lookup`). A page that came back keeps its copy, so that the next eviction costs nothing.

        device   | cached page --evict--> its memory goes to another page
                 |      | keep: gather, copy              ^ restore: copy, scatter
        host     |      v                                 |
                 | slot, least recently used first -------'

    All copies are on the device's stream of steps: they read a page before a later step writes it, and write a page
    before a later step reads it. The host waits for none of them.

    Shape legend: S pages at once, X elements of a page: its keys and values of all layers, one after another.

    num_kept, num_restored  number of pages copied to the host, and back
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
        """Marks pages as just used. The first hash of `chain` becomes the most recent; all must have copies here."""
        for digest in reversed(list(chain)):
            self._slot_of.move_to_end(digest)

    def keep(self, pages: Mapping[int, bytes]) -> None:
        """Copies pages of the device to the host. `pages` maps their numbers to their hashes; the page to be kept
        longest comes last. The least recently used copies make room, copies of this call included."""
        copies: dict[int, int] = {}  # by slot, the last page that takes it
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
        """Fills pages of the device with the copies of their hashes. `pages` maps their numbers to the hashes, which
        must all have copies here."""
        slots = [self._slot_of[digest] for digest in pages.values()]
        self.num_restored += len(slots)
        for some_slots, numbers in _batches(slots, list(pages)):
            for row, slot in enumerate(some_slots):
                self._stage_SX[row].copy_(self._memory[slot], non_blocking=True)
            index = self._index(numbers)
            for part_SX, tensor in zip(self._parts, self._tensors, strict=True):
                tensor.index_copy_(0, index, part_SX[: len(numbers)].reshape(-1, *tensor.shape[1:]))

    def forget(self) -> None:
        """Forgets all copies."""
        self._free += self._slot_of.values()
        self._slot_of.clear()

    def check_integrity(self) -> None:
        """Checks that every slot is free or holds one page; raises `AssertionError`."""
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
