"""Who owns which page of KV memory. Page 0 is nobody's: writes that must go nowhere land there."""

from collections.abc import Mapping, Sequence

NULL_PAGE = 0


class PagePool:
    """Hands out page numbers and takes them back; knows no tensors and no sequences."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: a pool needs the null page and at least one more")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Pages that can be owned at all."""
        return self.num_pages - 1

    def alloc(self, count: int) -> list[int] | None:
        """`count` pages, or `None` (and nothing taken) if there are not as many."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def free(self, pages: Sequence[int]) -> None:
        """Take pages back; the caller must have stopped using them."""
        self._free.extend(reversed(pages))

    def check_integrity(self, owned: Mapping[str, Sequence[int]]) -> None:
        """Every page is free or has exactly one owner; raises `AssertionError` naming the page."""
        holder: dict[int, str] = {}
        for name, pages in [*owned.items(), ("the free list", self._free)]:
            for page in pages:
                assert NULL_PAGE < page < self.num_pages, f"{name} holds page {page}, which cannot be owned"
                assert page not in holder, f"page {page} is held by {holder[page]} and by {name}"
                holder[page] = name
        lost = set(range(1, self.num_pages)) - holder.keys()
        assert not lost, f"nobody holds pages {sorted(lost)}"
