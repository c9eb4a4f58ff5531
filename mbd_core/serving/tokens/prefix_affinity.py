"""The choice of a request's replica: the replica that has seen the longest prefix of its prompt, unless it is clearly
busier.

A replica's prefix cache holds the whole pages of the text it has read and written. The sender of the requests
remembers which replica got which prompt, and asks no replica. A turn of a conversation begins with the turn before it,
so its pages are known, and it goes where they were stored. Remembered pages may have left the replica's cache; then
the prompt is computed anew, as on any other replica.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.memory.pages import chain_root, page_hash

MAX_PREFIXES = 100_000  # about 40 MB


def leading_pages(request: Request, *, page_size: int) -> list[bytes]:
    """A hash for each whole page at the request's beginning; it covers all earlier pages and the adapter."""
    tokens = (*request.prompt, *request.committed)
    parent, chain = chain_root(f"adapter {request.adapter}"), []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        parent = page_hash(parent, tokens[start : start + page_size])
        chain.append(parent)
    return chain


class PrefixAffinity:
    """The prefixes that each replica has seen; the `max_prefixes` most recently used are kept.

    balance  a replica with this many requests more than the least loaded replica may still be preferred
    """

    def __init__(self, *, balance: int, max_prefixes: int = MAX_PREFIXES) -> None:
        if balance < 0 or max_prefixes < 1:
            raise ValueError(f"balance={balance} must be at least 0, max_prefixes={max_prefixes} at least 1")
        self._balance, self._max_prefixes = balance, max_prefixes
        self._seen_by: OrderedDict[bytes, set[str]] = OrderedDict()  # least recently used first
        self._num_seen: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._seen_by)

    def choose(self, pages: Sequence[bytes], loads: Mapping[str, int]) -> str:
        """The replica for a request that begins with `pages`; `loads` holds the open requests of each replica.

        The replica that has seen the longest prefix is chosen; among several such replicas, the least loaded one. If
        no replica has seen a page, or if such replicas are clearly busier, the least loaded of all replicas is chosen;
        among equally loaded replicas, the one that has seen the fewest pages.
        """
        least = min(loads.values())
        for page in reversed(pages):
            replicas = self._seen_by.get(page, set()) & loads.keys()
            if replicas:
                best = min(replicas, key=lambda replica: (loads[replica], self._num_seen[replica], replica))
                if loads[best] <= least + self._balance:
                    return best
                break
        return min(loads, key=lambda replica: (loads[replica], self._num_seen[replica], replica))

    def note(self, pages: Sequence[bytes], replica: str) -> None:
        """Remember that the replica got a request that begins with `pages`."""
        for page in reversed(pages):  # most requests share the first page, so it becomes the most recently used
            seen_by = self._seen_by.setdefault(page, set())
            self._seen_by.move_to_end(page)
            if replica not in seen_by:
                seen_by.add(replica)
                self._num_seen[replica] += 1
        while len(self._seen_by) > self._max_prefixes:
            _, seen_by = self._seen_by.popitem(last=False)
            self._num_seen.subtract(seen_by)

    def keep(self, replicas: set[str]) -> None:
        """Forget all other replicas, which are gone with their caches."""
        for replica in self._num_seen.keys() - replicas:
            del self._num_seen[replica]
            for page in [page for page, seen_by in self._seen_by.items() if replica in seen_by]:
                self._seen_by[page].discard(replica)
                if not self._seen_by[page]:
                    del self._seen_by[page]
