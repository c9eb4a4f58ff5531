"""The replicas behind a Serve handle as a source of tokens; Ray's errors become our own."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from mbd_core.decoding.blocks.request import Request, StepOutput
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.serving.api.orders import Standing
from mbd_core.serving.tokens.stream import Asleep, EngineFailed, ReplicaLost, TokenStream, TooManyRequests


class ReplicaSource:
    """A source of tokens: Serve's router chooses a replica for each request.

    A replica that started after an order of weights adopts these weights before its first request.
    """

    def __init__(self, handle: DeploymentHandle, standing: Standing | None = None) -> None:
        self._handle = handle.options(stream=True, method_name="generate")
        self._standing = standing or Standing()

    async def open(self, request: Request, *, key: str = "") -> TokenStream:
        """The stream of a request that a replica accepted; waits while there is no replica. Also raises `Asleep`."""
        self._standing.check_awake()
        response = self._handle.remote(request, key, self._standing.weights)
        stream = TokenStream(_steps(response), partial(_cancel, response))
        try:
            with our_errors():
                await anext(response)  # the `None` that the replica sends first
        except BaseException:
            stream.close()
            raise
        return stream


async def _steps(response: DeploymentResponseGenerator) -> AsyncIterator[StepOutput]:
    with our_errors():
        async for step in response:
            yield step


def _cancel(response: DeploymentResponseGenerator) -> None:
    """Cancel the call, which aborts the request."""
    with suppress(RayError, RayServeException):  # the call has failed already
        response.cancel()


@contextmanager
def our_errors() -> Iterator[None]:
    """Translates errors: a replica's own exception is raised unchanged; the loss of its process or node is
    `ReplicaLost`.

    If a client leaves, Serve cancels the calls of its request. This raises `CancelledError`, not `ReplicaLost`, after
    which the request would continue elsewhere without a reader.
    """
    try:
        yield
    except TaskCancelledError as error:  # Serve's `RequestCancelledError` is one
        raise asyncio.CancelledError from error
    except BackPressureError as error:
        raise TooManyRequests("the queue of requests is full; try again later") from error
    except RayTaskError as error:
        if isinstance(error.cause, TaskCancelledError):
            raise asyncio.CancelledError from error
        if isinstance(error.cause, RequestRefused | TooManyRequests | ReplicaLost | Asleep):
            raise error.cause from None
        if isinstance(error.cause, RayError):  # the replica itself lost its own call
            raise ReplicaLost(str(error.cause)) from error
        raise EngineFailed(f"a replica failed: {type(error.cause).__name__}: {error.cause}") from error
    except DeploymentUnavailableError as error:
        raise EngineFailed("the model could not be deployed; see the replicas' logs") from error
    except (RayError, RayServeException) as error:
        raise ReplicaLost(f"{type(error).__name__}: {error}") from error
