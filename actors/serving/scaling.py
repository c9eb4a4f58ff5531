"""The number of replicas for a model's load: its open requests, and the KV memory that they need.

Serve's controller runs `TokenPolicy`. It gets this file's code with the deployment's configuration, but may not have
the project on its path: nothing of the project is imported here, and nothing but `AutoscalingContext` of Ray.
"""

from collections.abc import Collection
from typing import Any

from ray.serve.config import AutoscalingContext

REQUESTS, KV_LOAD = "requests", "kv_load"  # the loads that a replica reports


def replicas_wanted(
    *, num_requests: float, target_requests: float, kv_loads: Collection[float], target_kv_load: float | None
) -> float:
    """The number of replicas that keeps both means at their targets: `target_requests` open requests a replica, and
    the KV load `target_kv_load`. So it is the larger of the numbers that the two targets ask for."""
    by_requests = num_requests / target_requests
    return by_requests if target_kv_load is None else max(by_requests, sum(kv_loads) / target_kv_load)


class TokenPolicy:
    """Computes the wanted number of replicas. Serve applies delays and bounds, and starts the first replica itself.

    The open requests are the requests at the engines and the requests that wait in gateways. Serve's own count
    includes every call, so a client that asks `/health` each second would keep the last replica alive. So Serve's
    count is used only until the replicas have reported.
    """

    def __init__(self, *, target_kv_load: float | None = None) -> None:
        self._target_kv_load = target_kv_load

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        reported = context.aggregated_metrics or {}
        num_requests = context.total_num_requests
        if reported.get(REQUESTS):
            num_requests = (context.total_queued_requests or 0.0) + sum(reported[REQUESTS].values())
        num_replicas = replicas_wanted(
            num_requests=num_requests,
            target_requests=context.config.get_target_ongoing_requests(),
            kv_loads=reported.get(KV_LOAD, {}).values(),
            target_kv_load=self._target_kv_load,
        )
        return num_replicas, {}
