"""One answer from several engine requests: each goes on after the tokens of the requests before it."""

from dataclasses import replace

from mbd_core.decoding.answers.counts import Counts
from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.request import Request, StepOutput


class JoinedAnswer:
    """The steps of several engine requests as the steps of one request.

    piece  the tokens so far, after the request's `committed`
    """

    def __init__(self, request: Request) -> None:
        self.request, self.piece = request, request.nothing
        self._closing: tuple[int, ...] = request.closing
        self._earlier: Counts | None = None  # of the requests that have ended
        self._last: Counts | None = None
        self._weights: tuple[int, int] | None = None

    def add(self, step: StepOutput) -> StepOutput:
        """A step of the request that runs now, as a part of the whole answer."""
        self.piece += step.piece
        if step.commits:  # the next request decodes uncommitted tokens again
            self._last, self._closing = step.counts, step.closing
        counts, output, request_id = _sum(self._earlier, step.counts), step.output, self.request.request_id
        if output is not None:
            committed = self.request.committed
            output = replace(output, request_id=request_id, piece=self.piece, committed=committed, counts=counts)
        self._weights = (self._weights[0] if self._weights else step.weights[0], step.weights[1])
        return replace(step, request_id=request_id, counts=counts, output=output, weights=self._weights)

    def put_in(self, tokens: tuple[int, ...]) -> StepOutput:
        """A step with tokens that no forward decided. Their log-probability is 0."""
        number, counts = len(tokens), self._last or Counts()
        piece = Piece(tokens=tokens, logprobs=(0.0,) * number, tops=((),) * number, steps=(0,) * number)
        step = StepOutput(
            request_id=self.request.request_id,
            output=None,
            counts=replace(counts, num_tokens=counts.num_tokens + number),
            piece=self.request.asked(piece),
        )
        return self.add(step if self._weights is None else replace(step, weights=self._weights))

    def next_request(self, *, from_the_start: bool = False) -> Request:
        """The request for the rest, or for the whole answer again, once the current request has ended."""
        if self._last is not None:
            self._earlier, self._last = _sum(self._earlier, self._last), None
        if from_the_start:
            return self.request
        num_forwards = self.request.first_forward + (self._earlier.num_forwards if self._earlier else 0)
        committed = self.request.committed + self.piece.tokens
        return replace(self.request, committed=committed, first_forward=num_forwards, closing=self._closing)


def _sum(earlier: Counts | None, last: Counts) -> Counts:
    """Counts over all requests: forwards and seconds add up; the prompt and the tokens count once."""
    if earlier is None:
        return last
    return replace(
        earlier + last,
        num_prompt_tokens=last.num_prompt_tokens,
        num_tokens=last.num_tokens,
        num_cached_tokens=earlier.num_cached_tokens,
    )
