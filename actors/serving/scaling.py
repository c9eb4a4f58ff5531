"""How many replicas a model's load asks for: requests under way, and the KV memory that they take or wait for.

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
    """Replicas at which each has `target_requests` under way and its KV memory is loaded to `target_kv_load`, on
    average: the larger of both numbers."""
    by_requests = num_requests / target_requests
    return by_requests if target_kv_load is None else max(by_requests, sum(kv_loads) / target_kv_load)


class TokenPolicy:
    """A number of replicas that is to be had; Serve applies delays and bounds, and starts the first of none itself.

    Requests are the engines' requests and the requests that wait in gateways. Serve's own count holds every call,
    so that whoever asks `/health` each second keeps the last replica from being removed: it counts only until the
    replicas have reported.
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
