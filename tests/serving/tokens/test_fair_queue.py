"""Clients take turns, and so do the requests of each one; nobody's crowd keeps another out."""

import asyncio

import pytest

from mbd_core.serving.tokens.fair_queue import FairQueue, FairTurns, Refusals, has_room
from mbd_core.serving.tokens.stream import TooManyRequests


def test_clients_take_turns_and_each_one_s_oldest_comes_first() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.push((item[0],), item)
    assert [queue.pop() for _ in range(3)] == ["a1", "b1", "c1"]
    queue.push(("d",), "d1")
    assert len(queue) == 4
    assert [queue.pop() for _ in range(4)] == ["a2", "b2", "d1", "a3"]
    with pytest.raises(IndexError):
        queue.pop()


def test_the_requests_of_a_client_take_turns_within_its_own() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("ax1", "ax2", "ax3", "ay1", "ay2", "bz1", "bz2", "bz3"):
        queue.push((item[0], item[1]), item)
    assert [queue.pop() for _ in range(len(queue))] == ["ax1", "bz1", "ay1", "bz2", "ax2", "bz3", "ay2", "ax3"]


def test_an_item_leaves_from_the_middle() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("ax1", "ax2", "ay1", "bx1"):
        queue.push((item[0], item[1]), item)
    queue.remove(("a", "x"), "ax1")
    queue.remove(("a", "y"), "ay1")
    queue.remove(("b", "x"), "bx1")
    assert [queue.pop() for _ in range(len(queue))] == ["ax2"]


def test_turns_go_round_and_a_late_one_passes_on() -> None:
    order: list[str] = []

    async def work(turns: FairTurns, name: str, seconds: float) -> None:
        async with turns.turn(name[:1]):
            order.append(name)
            await asyncio.sleep(seconds)

    async def scenario() -> None:
        turns = FairTurns(1, seconds=LONG)
        await asyncio.gather(*(work(turns, name, 0) for name in ("a1", "a2", "a3", "a4", "b1", "c1")))
        assert order == ["a1", "a2", "b1", "c1", "a3", "a4"]
        order.clear()
        turns = FairTurns(2, seconds=0.05)
        stuck = [asyncio.create_task(work(turns, name, LONG)) for name in ("a1", "a2", "a3")]
        await asyncio.wait_for(asyncio.create_task(work(turns, "b1", 0)), LONG)
        assert order[:3] == ["a1", "a2", "a3"] and order[3:] == ["b1"]
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        async with asyncio.timeout(LONG), turns.turn("c"), turns.turn("c"):
            assert len(order) == 4, "both turns are free again, and no more"

    asyncio.run(scenario())


def test_who_leaves_while_waiting_takes_no_turn_along() -> None:
    async def scenario() -> None:
        turns = FairTurns(1, seconds=LONG)
        entered = asyncio.Event()

        async def enter() -> None:
            async with turns.turn("c"):
                entered.set()

        async with turns.turn("a"):
            waiting = [asyncio.create_task(enter()) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[0].cancel()
        waiting[1].cancel()  # it was given its turn in this very moment
        await asyncio.wait_for(entered.wait(), LONG)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [isinstance(r, asyncio.CancelledError) for r in results] == [True, True, False]
        async with asyncio.timeout(LONG), turns.turn("d"):
            pass

    asyncio.run(scenario())


LONG = 30.0  # seconds, that nothing here may take


@pytest.mark.parametrize(
    ("taken", "number", "fits"),
    [
        ({}, 8, True),
        ({}, 9, False),
        ({"a": 5}, 3, True),
        ({"a": 8}, 1, False),
        ({"b": 8}, 4, True),
        ({"b": 8}, 5, False),
        ({"b": 8, "a": 4}, 1, False),
        ({"b": 8, "c": 4}, 2, True),
        ({"b": 8, "c": 4}, 3, False),
    ],
)
def test_the_share_of_a_client(taken: dict[str, int], number: int, fits: bool) -> None:
    assert has_room(taken, "a", number, capacity=8) is fits


def test_a_client_that_asks_again_at_once_is_refused_late_and_others_are_not() -> None:
    async def refused(refusals: Refusals, client: str) -> float:
        start = asyncio.get_running_loop().time()
        with pytest.raises(TooManyRequests):
            async with refusals.slow_refusals(client):
                raise TooManyRequests
        return asyncio.get_running_loop().time() - start

    async def scenario() -> None:
        refusals, pause = Refusals(seconds=0.2, most=2), 0.2
        first, again, other = [await refused(refusals, client) for client in ("a", "a", "b")]
        assert first < pause <= again and other < pause
        crowd = await asyncio.gather(*(refused(refusals, "a") for _ in range(3)))
        assert sorted(seconds < pause for seconds in crowd) == [False, False, True], "two last, the third does not"
        await asyncio.sleep(pause)
        assert await refused(refusals, "a") < pause, "it waited as it was told"
        async with asyncio.timeout(LONG), refusals.slow_refusals("a"):
            pass

    asyncio.run(scenario())
