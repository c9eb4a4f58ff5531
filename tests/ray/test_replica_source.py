"""What goes wrong at a replica, in our own errors."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError, RequestCancelledError

from actors.serving.replica_source import our_errors
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.serving.tokens.stream import EngineFailed, ReplicaLost, TooManyRequests


def raised_by_replica(cause: Exception) -> RayTaskError:
    return RayTaskError("generate", "traceback", cause)


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (RequestCancelledError("its client left"), asyncio.CancelledError),
        (raised_by_replica(RequestCancelledError("its client left")), asyncio.CancelledError),
        (ActorDiedError(), ReplicaLost),
        (raised_by_replica(ReplicaLost("its engine failed")), ReplicaLost),
        (raised_by_replica(RequestRefused("prompt", "too long")), RequestRefused),
        (raised_by_replica(KeyError("ours")), EngineFailed),
        (BackPressureError(num_queued_requests=3, max_queued_requests=3), TooManyRequests),
    ],
)
def test_an_error_of_ray_is_one_of_ours(error: Exception, ours: type[BaseException]) -> None:
    with pytest.raises(ours), our_errors():
        raise error
