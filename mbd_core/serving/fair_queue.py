"""Waiting items of several clients: the clients take turns, each one's oldest item first."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by key. A key whose turn is over goes behind all others that wait; an empty one loses its place."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(items) for items in self._waiting.values())

    def push(self, key: str, item: T) -> None:
        """Add an item behind those of its key."""
        self._waiting.setdefault(key, deque()).append(item)

    def pop(self) -> T:
        """The oldest item of the key whose turn it is; `IndexError` if none waits."""
        if not self._waiting:
            raise IndexError("pop from an empty queue")
        key, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[key] = items
        return item

    def remove(self, key: str, item: T) -> None:
        """Take a waiting item out of the middle."""
        items = self._waiting[key]
        items.remove(item)
        if not items:
            del self._waiting[key]

    def clear(self) -> None:
        self._waiting.clear()
