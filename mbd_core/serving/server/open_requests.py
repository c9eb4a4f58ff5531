"""The open API requests of a server, and its drain: the server refuses new requests and finishes the open ones."""

import asyncio

from mbd_core.serving.api.errors import ApiError, FieldError
from mbd_core.serving.tokens.stream import TooManyRequests

DRAIN_SECONDS = 30.0  # the default time limit of a drain
RETRY_SECONDS = 10  # the time after which a new server may have replaced the old one


class OpenRequest:
    """A client's request, from `OpenRequests.begin` to `end`. It counts as one choice until `take_choices`."""

    def __init__(self, requests: "OpenRequests", client: str) -> None:
        """With an empty `client`, the request's choices are not counted."""
        self._requests, self.client, self.num_choices = requests, client, 1

    def take_choices(self, num_prompts: int, num_each: int, *, prompt_field: str) -> None:
        """Count the request as `num_each` choices for each of its prompts.

        Raises `FieldError` if the number exceeds a client's limit, and `TooManyRequests` if the client's other
        requests leave too little of the limit.
        """
        self._requests.check_choices(self, num_prompts, num_each, prompt_field=prompt_field)
        self.num_choices = num_prompts * num_each

    def end(self) -> None:
        """Close the request; a second call does nothing."""
        self._requests.remove(self)


class OpenRequests:
    """Requests that have begun and not ended. All methods belong to one event loop."""

    def __init__(self, *, most_each: int | None = None) -> None:
        """`most_each` limits the open choices of each named client; `None` sets no limit."""
        self._most_each = most_each
        self._open: dict[OpenRequest, None] = {}
        self._draining = False
        self._drained = asyncio.Event()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    def begin(self, client: str = "", *, limited: bool = True) -> OpenRequest:
        """Open a client's request, as one choice. Unless `limited`, its choices do not count against the client's
        limit.

        Raises `ApiError` (503) while draining, and `TooManyRequests` if the client is at its limit.
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
        """Raises the errors of `OpenRequest.take_choices`."""
        most = self._most_each
        if request.client and most is not None and num_prompts * num_each > most:
            field = prompt_field if num_prompts > most else "n"
            number = num_prompts * num_each
            raise FieldError(field, f"{number} choices at once; one API key may have {most} under way here")
        self._check_room(request, num_prompts * num_each)

    def _check_room(self, request: OpenRequest, number: int) -> None:
        """Raise `TooManyRequests` if the client's other requests leave no room for `number` choices."""
        if not request.client or self._most_each is None:
            return
        other_choices = sum(r.num_choices for r in self._open if r.client == request.client and r is not request)
        if other_choices + number > self._most_each:
            raise TooManyRequests(
                f"{other_choices} choices of this API key are under way, and {number} more are asked for; it may have "
                f"{self._most_each}; try again when some have ended"
            )

    def begin_drain(self) -> int:
        """Refuse new requests from now on. Returns the number of open requests."""
        self._draining = True
        self._note_the_end()
        return len(self._open)

    async def wait_until_drained(self, seconds: float) -> int:
        """Wait until no request is open, at most `seconds`.

        Returns the number of open requests. Call `begin_drain` first.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._drained.wait()
        except TimeoutError:
            pass
        return len(self._open)

    def remove(self, request: OpenRequest) -> None:
        """Remove a request that has ended."""
        self._open.pop(request, None)
        self._note_the_end()

    def _note_the_end(self) -> None:
        if self._draining and not self._open:
            self._drained.set()
