"""Serve's router before a model's replicas: each request goes where the longest part of its prompt has been stored.

Ray's own `PrefixCacheAffinityRouter` does not fit: it is imported with vLLM or SGLang only, and it reads prompts as
text. Those of token ids are empty to it, and it divides by their length. The decision is `PrefixAffinity`'s, made in
each gateway with what that gateway has sent; this file tells it what Serve knows.
"""

import asyncio
from collections import Counter
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from mbd_core.decoding.blocks.request import Request
from mbd_core.serving.tokens.prefix_affinity import PrefixAffinity, leading_pages

NUM_CHAINS = 64  # of requests between their choice and their acceptance; more are computed twice


class PrefixRouter(RequestRouter):
    """`RequestRouterConfig(request_router_class=..., request_router_kwargs={"page_size": ..., "balance": ...})`."""

    # Serve's 0.1 s is too short for an idle replica on a busy machine, and the busy replicas would get everything.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self, *, page_size: int, balance: int) -> None:
        """Called by Serve with the config's `request_router_kwargs`."""
        self._affinity = PrefixAffinity(balance=balance)
        self._leading_pages = lru_cache(NUM_CHAINS)(partial(leading_pages, page_size=page_size))
        self._chosen: WeakKeyDictionary[asyncio.Future[Any], str] = WeakKeyDictionary()  # of calls not yet accepted

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The preferred replica, then all others, for a replica that is full refuses."""
        if not candidate_replicas:
            return []
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = await self._loads(candidate_replicas)
        pages = [] if pending_request is None else self._pages(pending_request)
        replica_id = self._affinity.choose(pages, loads)
        # At once: of calls that come together each must know of those before it.
        self._affinity.note(pages, replica_id)
        if pending_request is not None:
            self._chosen[pending_request.future] = replica_id
        return [[by_name.pop(replica_id)], list(by_name.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """A replica has taken the request; not the preferred one, where that was full."""
        self._chosen.pop(pending_request.future, None)
        self._affinity.note(self._pages(pending_request), replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._affinity.keep({replica.replica_id.unique_id for replica in replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._affinity.keep({replica.unique_id for replica in self.curr_replicas})

    async def _loads(self, replicas: list[RunningReplica]) -> dict[str, int]:
        """Requests under way at each replica and to it. One that does not say counts as full, and is asked again.

        A replica that accepts a call says how many calls it has, without the calls still on their way to it.
        """
        loads = {replica: self.replica_queue_len_cache.get(replica.replica_id) for replica in replicas}
        silent = [replica for replica, load in loads.items() if load is None]
        loads.update(await self._probe_queue_lens(silent, 0))
        coming = Counter(self._chosen.values())
        return {
            r.replica_id.unique_id: (r.max_ongoing_requests if load is None else load) + coming[r.replica_id.unique_id]
            for r, load in loads.items()
        }

    def _pages(self, pending_request: PendingRequest) -> list[bytes]:
        """The prefixes of the call's request; none for a call without one, which any replica can answer."""
        first = pending_request.args[0] if pending_request.args else None
        return self._leading_pages(first) if isinstance(first, Request) else []

    def _get_pending_request_matching_internal_request_id(self, request_metadata: Any = None) -> PendingRequest | None:
        """The call that a replica was chosen for.

        Serve looks it up by the id of the HTTP request, which all calls for its prompts and choices share: all but the
        first would never be sent. Each call has metadata of its own.
        """
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                return pending
        return None
