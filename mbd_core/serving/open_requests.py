"""The API requests of a server that have not been answered, and its drain: it takes no more and finishes these."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from mbd_core.serving.fair_queue import has_room
from mbd_core.serving.openai_errors import ApiError
from mbd_core.serving.text_stream import TextStream
from mbd_core.serving.token_stream import TooManyRequests

DRAIN_SECONDS = 30.0  # that a drain may take, unless somebody says otherwise
RETRY_SECONDS = 10  # a server that shuts down is replaced or started again, which takes a while


class OpenRequest:
    """A client's request, from `OpenRequests.begin` to `end`. It is one choice until `take_choices` says more."""

    def __init__(self, requests: "OpenRequests", client: str) -> None:
        """`client` is empty for one whose choices are not counted."""
        self._requests, self.client, self.num_choices = requests, client, 1

    def take_choices(self, num_prompts: int, num_each: int, *, prompt_field: str) -> None:
        """Count the request as `num_each` choices for each of its prompts.

        Raises `ApiError` (400) for more than a client may ever have, and `TooManyRequests` for more than it may have
        beside its others.
        """
        self._requests.check_choices(self, num_prompts, num_each, prompt_field=prompt_field)
        self.num_choices = num_prompts * num_each

    def end(self) -> None:
        """The answer has ended; a second call does nothing."""
        self._requests.remove(self)


class OpenRequests:
    """Requests that have begun and not ended. All methods belong to one event loop."""

    def __init__(self, *, most_each: int | None = None) -> None:
        """`most_each`: how many choices a client may have open; `None`, and for clients without a name: any number."""
        self._most_each = most_each
        self._open: dict[OpenRequest, None] = {}
        self._draining = False
        self._drained = asyncio.Event()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    def begin(self, client: str = "", *, limited: bool = True) -> OpenRequest:
        """Count a client's new request, as one choice; where it is not `limited`, only a drain counts it.

        Raises `ApiError` (503) while draining, and `TooManyRequests` for a client that has as many choices as it may.
        """
        if self._draining:
            raise ApiError(
                503,
                "the server is shutting down and takes no more requests; try again later",
                code="shutting_down",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        request = OpenRequest(self, client if limited else "")
        self._check_room(request, 1)
        self._open[request] = None
        return request

    def check_choices(self, request: OpenRequest, num_prompts: int, num_each: int, *, prompt_field: str) -> None:
        """Raises as `OpenRequest.take_choices`."""
        most = self._most_each
        if request.client and most is not None and num_prompts * num_each > most:
            field = prompt_field if num_prompts > most else "n"
            message = f"{field}: {num_prompts * num_each} choices at once; one API key may have {most} under way here"
            raise ApiError(400, message, param=field, code="invalid_value")
        self._check_room(request, num_prompts * num_each)

    def _check_room(self, request: OpenRequest, number: int) -> None:
        """Raise `TooManyRequests` where a client's others leave no room for `number` choices of its request."""
        if not request.client or self._most_each is None:
            return
        others = sum(r.num_choices for r in self._open if r.client == request.client and r is not request)
        if others + number > self._most_each:
            raise TooManyRequests(
                f"{others} choices of this API key are under way, and {number} more are asked for; it may have "
                f"{self._most_each}; try again when some have ended"
            )

    def begin_drain(self) -> int:
        """Take no more requests; how many are open."""
        self._draining = True
        self._note_the_end()
        return len(self._open)

    async def drained(self, seconds: float) -> int:
        """Wait until no request is open, for `seconds` at most; how many still are. Call `begin_drain` first."""
        try:
            async with asyncio.timeout(seconds):
                await self._drained.wait()
        except TimeoutError:
            pass
        return len(self._open)

    def remove(self, request: OpenRequest) -> None:
        """The request has ended."""
        self._open.pop(request, None)
        self._note_the_end()

    def _note_the_end(self) -> None:
        if self._draining and not self._open:
            self._drained.set()


class OpenChoices:
    """The choices of a model that a server has opened at its engines and that have not ended, by client.

    What the engines would refuse is refused here, before any of a body's choices is sent to them.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: how many all engines together take."""
        self._capacity = capacity
        self._opening: Counter[str] = Counter()
        self._opened: dict[TextStream, str] = {}

    def check(self, client: str, number: int) -> None:
        """Raise `TooManyRequests` where a client gets no `number` choices more."""
        self._opened = {stream: owner for stream, owner in self._opened.items() if stream.unfinished}
        taken = self._opening.copy()
        for stream, owner in self._opened.items():
            taken[owner] += len(stream.unfinished)
        if not has_room(taken, client, number, capacity=self._capacity):
            raise TooManyRequests(f"{taken.total()} choices are running or waiting; try again later")

    @contextmanager
    def opening(self, client: str, number: int) -> Iterator[None]:
        """Count `number` choices as long as the block lasts, which opens them; raises as `check`."""
        self.check(client, number)
        self._opening[client] += number
        try:
            yield
        finally:
            self._opening[client] -= number
            if not self._opening[client]:
                del self._opening[client]

    def add(self, client: str, stream: TextStream) -> None:
        """Count a stream until it has ended."""
        self._opened[stream] = client
