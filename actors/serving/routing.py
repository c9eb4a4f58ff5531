"""Serve's router for a model's replicas: each request goes to the replica with the longest stored prefix of its
prompt.

Ray's own `PrefixCacheAffinityRouter` does not fit: it needs vLLM or SGLang, and it reads prompts as text. Prompts of
token ids are empty for it, and it divides by their length. `PrefixAffinity` decides here, in each gateway, by the
requests that this gateway has sent; this file passes Serve's knowledge of replicas and loads to it.
"""

import asyncio
from collections import Counter
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from mbd_core.decoding.blocks.request import Request
from mbd_core.serving.tokens.prefix_affinity import PrefixAffinity, leading_pages

NUM_CHAINS = 64  # requests between choice and acceptance whose hash chains are kept; others compute them twice


class PrefixRouter(RequestRouter):
    """`RequestRouterConfig(request_router_class=..., request_router_kwargs={"page_size": ..., "balance": ...})`."""

    # Serve waits 0.1 s. On a busy machine an idle replica needs longer, and known replicas would get all requests.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self, *, page_size: int, balance: int) -> None:
        """Called by Serve with the config's `request_router_kwargs`."""
        self._affinity = PrefixAffinity(balance=balance)
        self._leading_pages = lru_cache(NUM_CHAINS)(partial(leading_pages, page_size=page_size))
        self._chosen: WeakKeyDictionary[asyncio.Future[Any], str] = WeakKeyDictionary()  # of calls not yet accepted

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The preferred replica, then all others, because a full replica refuses."""
        if not candidate_replicas:
            return []
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = await self._loads(candidate_replicas)
        pages = [] if pending_request is None else self._pages(pending_request)
        replica_id = self._affinity.choose(pages, loads)
        # Before the replica accepts, so that the next of several simultaneous calls takes this one into account.
        self._affinity.note(pages, replica_id)
        if pending_request is not None:
            self._chosen[pending_request.future] = replica_id
        return [[by_name.pop(replica_id)], list(by_name.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """A replica has accepted the request. If the preferred replica was full, it is another replica."""
        self._chosen.pop(pending_request.future, None)
        self._affinity.note(self._pages(pending_request), replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._affinity.keep({replica.replica_id.unique_id for replica in replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._affinity.keep({replica.unique_id for replica in self.curr_replicas})

    async def _loads(self, replicas: list[RunningReplica]) -> dict[str, int]:
        """Open requests at each replica and on their way to it. A replica that does not answer counts as full.

        A replica reports its calls when it accepts one, without the calls still on their way.
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
        """The prefixes of the call's request; empty for other calls, which any replica can answer."""
        first = pending_request.args[0] if pending_request.args else None
        return self._leading_pages(first) if isinstance(first, Request) else []

    def _get_pending_request_matching_internal_request_id(self, request_metadata: Any = None) -> PendingRequest | None:
        """The call for which a replica was chosen.

        Serve's version finds it by the id of the HTTP request, which all calls for its prompts and choices share, so
        all calls but the first would never be sent. Each call has its own metadata object.
        """
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                return pending
        return None
