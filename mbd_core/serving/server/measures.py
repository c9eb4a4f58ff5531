"""Measures from the clients' side: how long they wait for tokens, and how their requests end.

A choice is one engine request; an API request has one or more choices. The tokens of one commit share their arrival: a
client gets a block at once. Four times follow from the arrivals of a choice's tokens:

    arrival of the API request
       |--- time to first token ---| commit |-- inter-token latency --| commit |--- ... ---| commit
       |------------------------------------- end to end ----------------------------------------|

Each gap between two commits is one inter-token latency, however many tokens a commit has. The time per output token
spreads the time from the first commit to the last over all tokens but the first, as the field's tools do. A choice
whose tokens all come in one commit has a time per output token of 0; a choice of a single token has none.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from mbd_core.decoding.blocks.request import FinishReason, Request
from mbd_core.engine.measures import RecentValues
from mbd_core.serving.api.errors import api_error
from mbd_core.serving.server.text_stream import TextStep, TextStream

NO_MODEL = ""  # the model of requests that name no served model
MeasureClock = Callable[[], float]


@dataclass
class RequestMeasures:
    """The requests of one model since the server started; times in seconds.

    prompt_tokens, generation_tokens  tokens of accepted prompts, and generated tokens
    finished        choices that ended by themselves, by finish reason
    aborted         choices that ended because their client left or an administrator aborted them
    errors          API requests that were refused or failed, by HTTP status; a stream that fails later counts under
                    the status of its error, not the status sent
    lost_replicas   how often a choice lost its replica and then continued at another replica or failed
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    aborted: int = 0
    errors: Counter[int] = field(default_factory=Counter)
    lost_replicas: int = 0
    time_to_first_token: RecentValues = field(default_factory=RecentValues)
    inter_token_latency: RecentValues = field(default_factory=RecentValues)
    time_per_output_token: RecentValues = field(default_factory=RecentValues)
    end_to_end: RecentValues = field(default_factory=RecentValues)

    def on_loss(self) -> None:
        """A choice has lost its replica."""
        self.lost_replicas += 1


class ServerMeasures:
    """The requests of one server, by model; `NO_MODEL` counts requests that name no served model."""

    def __init__(self, models: Iterable[str], *, clock: MeasureClock = time.perf_counter) -> None:
        self.by_model = {name: RequestMeasures() for name in (*models, NO_MODEL)}
        self._clock = clock

    def add(self, model: str) -> None:
        """Count requests of `model` from now on."""
        self.by_model = {model: RequestMeasures(), **self.by_model}

    def on_arrival(self) -> "RequestWatch":
        """An API request has come; the watch follows it to its end."""
        return RequestWatch(self.by_model, self._clock)


@dataclass
class _Choice:
    """An unfinished choice: its tokens so far, and the arrival times of the first and the last."""

    num_tokens: int = 0
    first: float = 0.0
    last: float = 0.0


class RequestWatch:
    """One API request:

        on_arrival -> on_body -> on_model -> on_accepted -> on_tokens, on_end of each choice -> on_close

    `on_error` may come at any time, and later calls then count nothing; `on_close` may come twice.
    """

    def __init__(self, by_model: Mapping[str, RequestMeasures], clock: MeasureClock) -> None:
        self._by_model, self._clock = by_model, clock
        self._measures = by_model[NO_MODEL]
        self._arrival = clock()
        self._choices: dict[str, _Choice] = {}
        self._accepted = self._ended = False

    def on_body(self) -> None:
        """The whole body has arrived. Latencies start here, because sending the body is the client's time."""
        self._arrival = self._clock()

    def on_model(self, name: str) -> None:
        """Counts the request for this served model."""
        self._measures = self._by_model[name]

    def on_accepted(self, requests: Sequence[Request]) -> None:
        """The engines have accepted the request's choices."""
        self._accepted = True
        self._choices = {r.request_id: _Choice() for r in requests}
        self._measures.prompt_tokens += sum(len(r.prompt) for r in requests)

    def on_tokens(self, request_id: str, count: int) -> None:
        """`count` tokens of a choice came, all at once."""
        if not count:
            return
        choice, time_now = self._choices[request_id], self._clock()
        if choice.num_tokens:
            self._measures.inter_token_latency.add(time_now - choice.last)
        else:
            choice.first = time_now
            self._measures.time_to_first_token.add(time_now - self._arrival)
        choice.num_tokens += count
        choice.last = time_now
        self._measures.generation_tokens += count

    def on_end(self, request_id: str, reason: FinishReason) -> None:
        """A choice has ended. With the reason `abort` an administrator has ended it."""
        choice = self._choices.pop(request_id)
        if reason == "abort":
            self._measures.aborted += 1
            return
        self._measures.finished[reason] += 1
        self._measures.end_to_end.add(self._clock() - self._arrival)
        if choice.num_tokens > 1:
            self._measures.time_per_output_token.add((choice.last - choice.first) / (choice.num_tokens - 1))

    def on_error(self, error: BaseException) -> None:
        """The request was refused or failed; if its client left, it counts as aborted instead."""
        if self._ended:
            return
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self.on_close()
        elif isinstance(error, Exception):
            self._ended = True
            self._measures.errors[api_error(error).status] += 1

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Report exceptions of the block to `on_error`, and raise them again."""
        try:
            yield
        except BaseException as error:
            self.on_error(error)
            raise

    def on_close(self) -> None:
        """Nobody waits for the request any more: count its unfinished choices as aborted."""
        if not self._ended:
            self._ended = True
            self._measures.aborted += len(self._choices) if self._accepted else 1

    async def steps(self, stream: TextStream) -> AsyncIterator[TextStep]:
        """The steps of the accepted choices; each is measured before the reader gets it."""
        with self.errors():
            async for step in stream:
                self.on_tokens(step.request_id, len(step.piece))
                if step.output is not None:
                    self.on_end(step.request_id, step.output.finish_reason)
                yield step
