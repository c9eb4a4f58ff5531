"""Clients take turns."""

import pytest

from mbd_core.serving.fair_queue import FairQueue


def test_clients_take_turns_and_each_one_s_oldest_comes_first() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.push(item[0], item)
    assert [queue.pop() for _ in range(3)] == ["a1", "b1", "c1"]
    queue.push("d", "d1")
    assert len(queue) == 4
    assert [queue.pop() for _ in range(4)] == ["a2", "b2", "d1", "a3"]
    with pytest.raises(IndexError):
        queue.pop()


def test_an_item_leaves_from_the_middle() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "b1"):
        queue.push(item[0], item)
    queue.remove("a", "a1")
    queue.remove("b", "b1")
    assert [queue.pop() for _ in range(len(queue))] == ["a2"]
