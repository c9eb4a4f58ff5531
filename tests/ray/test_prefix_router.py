"""The prefix router between Serve's calls and replicas, without a cluster: replicas that say how busy they are."""

import asyncio
from dataclasses import dataclass, field

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from actors.serving.routing import PrefixRouter
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request

APP = DeploymentID("tiny", "mbd")
SECONDS = 60  # for what takes no time, however busy the machine is


@dataclass(eq=False)
class Replica:
    """As Serve shows it to routers."""

    name: str
    load: int | None = 0
    max_ongoing_requests: int = 4
    multiplexed_model_ids: set[str] = field(default_factory=set)

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, APP)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        if self.load is None:
            await asyncio.sleep(2 * deadline_s)
        return self.load or 0


def router(*replicas: Replica) -> PrefixRouter:
    made = PrefixRouter(APP, DeploymentHandleSource.UNKNOWN, use_replica_queue_len_cache=True)
    made.initialize_state(page_size=4, balance=1)
    made.update_replicas(list(replicas))
    return made


def call(*prompt: int, http_request: str = "r") -> PendingRequest:
    """A call to generate; `http_request` is the id that all calls of one HTTP request share."""
    request = Request(request_id="g", prompt=prompt, max_tokens=4, decoding=DecodingConfig(block_size=4))
    metadata = RequestMetadata(request_id=http_request, internal_request_id=http_request)
    return PendingRequest(args=[request, "key"], kwargs={}, metadata=metadata)


async def route(routed: PrefixRouter, pending: PendingRequest) -> str:
    """The replica that the call goes to, and takes it."""
    async with asyncio.timeout(SECONDS):
        replica = await routed._choose_replica_for_request(pending)
    routed.on_send_request(replica.replica_id)
    routed.on_request_routed(pending, replica.replica_id, None)
    name: str = replica.replica_id.unique_id
    return name


def test_calls_of_one_http_request_are_all_routed() -> None:
    """Serve looks for a call by the id that they share, and finds the first one only."""

    async def run() -> list[str]:
        routed = router(Replica("a"), Replica("b"))
        return await asyncio.gather(*(route(routed, call(n, n, n, n, n)) for n in range(6)))

    assert sorted(asyncio.run(run())) == ["a", "a", "a", "b", "b", "b"]


def test_a_known_prefix_finds_its_replica_until_that_one_is_busier_or_gone() -> None:
    async def run() -> list[str]:
        a, b = Replica("a"), Replica("b")
        routed, prompt = router(a, b), (1, 2, 3, 4, 5, 6, 7, 8)
        homes = [await route(routed, call(*prompt))]
        routed.on_new_queue_len_info(ReplicaID(homes[0], APP), 1)
        homes.append(await route(routed, call(*prompt, 9)))
        homes.append(await route(routed, call(*prompt, 10)))
        first = ReplicaID(homes[0], APP)
        routed.on_replica_actor_died(first)
        homes.append(await route(routed, call(*prompt, 11)))
        return homes

    first, second, third, fourth = asyncio.run(run())
    assert second == first, "one request more is not clearly busier"
    assert third != first and fourth == third


def test_calls_that_come_together_are_spread_although_no_replica_has_them_yet() -> None:
    """A replica that accepts the first of them says that it has one."""

    async def run() -> tuple[list[str], list[str]]:
        a, b = Replica("a", max_ongoing_requests=20), Replica("b", max_ongoing_requests=20)
        routed, prompt = router(a, b), (1, 2, 3, 4, 5, 6, 7, 8)
        calls = [call(*prompt, n) for n in range(8)]
        chosen = await asyncio.gather(*(routed._choose_replica_for_request(one) for one in calls))
        for replica in chosen:
            routed.on_send_request(replica.replica_id)
        for one, replica in zip(calls[:2], chosen, strict=False):
            routed.on_new_queue_len_info(replica.replica_id, 1)
            routed.on_request_routed(one, replica.replica_id, None)
        later = await asyncio.gather(*(routed._choose_replica_for_request(call(*prompt, n)) for n in range(8)))
        return [r.replica_id.unique_id for r in chosen], [r.replica_id.unique_id for r in later]

    for names in asyncio.run(run()):
        assert 3 <= names.count("a") <= 5, names


def test_a_full_replica_and_one_that_does_not_answer_are_passed_over() -> None:
    async def run() -> list[str]:
        a, b, silent = Replica("a"), Replica("b"), Replica("silent", load=None)
        routed, homes = router(a, b), []
        homes.append(await route(routed, call(1, 2, 3, 4)))
        full, other = (a, b) if homes[0] == "a" else (b, a)
        full.load = full.max_ongoing_requests
        routed.on_new_queue_len_info(full.replica_id, full.load)
        other.load = other.max_ongoing_requests - 1
        routed.on_new_queue_len_info(other.replica_id, other.load)
        homes.append(await route(routed, call(1, 2, 3, 4)))
        routed.update_replicas([a, b, silent])
        other.load = 0
        routed.on_new_queue_len_info(other.replica_id, 0)
        homes.append(await route(routed, call(90, 91, 92, 93)))
        return homes

    first, second, third = asyncio.run(run())
    assert second != first and third == second


def test_an_idle_replica_on_a_busy_machine_has_time_to_say_so() -> None:
    """The other one's load is known; this one takes three times what Serve waits for."""

    @dataclass(eq=False)
    class Late(Replica):
        async def get_queue_len(self, *, deadline_s: float) -> int:
            await asyncio.sleep(0.3)
            return 0

    async def run() -> str:
        busy = Replica("busy")
        routed = router(Late("idle"), busy)
        routed.on_new_queue_len_info(busy.replica_id, 3)
        return await route(routed, call(1, 2, 3, 4))

    assert asyncio.run(run()) == "idle"


def test_a_call_without_a_request_goes_to_any_replica() -> None:
    async def run() -> str:
        metadata = RequestMetadata(request_id="r", internal_request_id="r")
        return await route(router(Replica("a")), PendingRequest(args=[], kwargs={}, metadata=metadata))

    assert asyncio.run(run()) == "a"
