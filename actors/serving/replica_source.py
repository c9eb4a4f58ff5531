"""The replicas behind a Serve handle as a source of tokens, with our own errors for Ray's."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from mbd_core.decoding.blocks.request import Request, StepOutput
from mbd_core.engine.admission import RequestRefused
from mbd_core.serving.api.other_requests import Standing
from mbd_core.serving.tokens.stream import Asleep, EngineFailed, ReplicaLost, TooManyRequests


class ReplicaSource:
    """Whichever replica Serve's router chooses for each request.

    A replica that started after other weights were ordered takes them over before it takes a request.
    """

    def __init__(self, handle: DeploymentHandle, standing: Standing | None = None) -> None:
        self._handle = handle.options(stream=True, method_name="generate")
        self._standing = standing or Standing()

    async def open(self, request: Request, *, key: str = "") -> "ReplicaStream":
        """The stream of a request that a replica has taken; waits while there is no replica. Raises `Asleep` too."""
        self._standing.check_awake()
        stream = ReplicaStream(self._handle.remote(request, key, self._standing.weights))
        try:
            await stream.taken()
        except BaseException:
            stream.close()
            raise
        return stream


class ReplicaStream:
    """One call of `EngineReplica.generate`."""

    def __init__(self, response: DeploymentResponseGenerator) -> None:
        self._response, self._ended = response, False

    async def taken(self) -> None:
        """Wait for the `None` that the replica sends first."""
        with our_errors():
            await anext(self._response)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepOutput:
        with our_errors():
            step: StepOutput = await anext(self._response)
        self._ended = step.output is not None
        return step

    def close(self) -> None:
        """Cancel the call, which aborts the request."""
        if not self._ended:
            self._ended = True
            with suppress(RayError, RayServeException):  # the call has failed already
                self._response.cancel()


@contextmanager
def our_errors() -> Iterator[None]:
    """Raise what a replica raised as itself, the loss of its process or node as `ReplicaLost`.

    Where a client leaves, Serve cancels the calls that its request made: that is a cancellation here too, and no loss,
    after which the request would go on elsewhere for nobody.
    """
    try:
        yield
    except TaskCancelledError as error:  # Serve's `RequestCancelledError` is one
        raise asyncio.CancelledError from error
    except BackPressureError as error:
        raise TooManyRequests("as many requests wait as may wait; try again later") from error
    except RayTaskError as error:
        if isinstance(error.cause, TaskCancelledError):
            raise asyncio.CancelledError from error
        if isinstance(error.cause, RequestRefused | TooManyRequests | ReplicaLost | Asleep):
            raise error.cause from None
        if isinstance(error.cause, RayError):  # what the replica itself waited for is gone
            raise ReplicaLost(str(error.cause)) from error
        raise EngineFailed(f"a replica failed: {type(error.cause).__name__}: {error.cause}") from error
    except DeploymentUnavailableError as error:
        raise EngineFailed("the model could not be deployed; see the replicas' logs") from error
    except (RayError, RayServeException) as error:
        raise ReplicaLost(f"{type(error).__name__}: {error}") from error
