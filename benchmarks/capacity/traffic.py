"""Random arrivals of sessions, single or in bursts. A session has one or more turns, one after the other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from benchmarks.capacity.counted_blocks import FILLER, request_of
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.fields import DATA, LOAD, Flag, Ge, Gt, Le, configuration

Routing = Literal["prefix", "load"]
DIGITS = 100  # tokens that number sessions; any vocabulary has 100


@configuration(panel=DATA)
class Traffic:
    """Sessions that arrive at random, each with one or more turns; the same for the same seed."""

    rate: Annotated[float, Gt(0), Flag(panel=LOAD)] = 1.0
    """Sessions that begin in a second, on all replicas together."""
    sessions: Annotated[int | None, Ge(1), Flag(panel=LOAD)] = None
    """Sessions in all (default: 20 a replica)."""
    burst: Annotated[float, Ge(1), Flag(panel=LOAD)] = 1.0
    """Sessions that begin together, on average; 1: Poisson arrivals."""
    prompt: Annotated[int, Ge(1)] = 1024
    """Tokens of a session's first prompt, on average."""
    output: Annotated[int, Ge(1)] = 256
    """Tokens of an answer, on average."""
    vary: Annotated[float, Ge(0), Le(1)] = 0.5
    """Spread of lengths: they are drawn evenly from mean x (1 - spread) to mean x (1 + spread)."""
    turns: Annotated[int, Ge(1)] = 1
    """Turns of a session."""
    turn_tokens: Annotated[int, Ge(1)] = 512
    """New tokens of each later turn, on average."""
    think: Annotated[float, Ge(0)] = 5.0
    """Seconds from an answer to the session's next turn, on average."""
    long_every: Annotated[int, Ge(0)] = 0
    """Every N-th session begins with a long prompt; 0: none."""
    long_prompt: Annotated[int, Ge(1)] = 131072
    """Tokens of a long prompt, on average."""
    shared: Annotated[int, Ge(0)] = 0
    """Leading tokens that all sessions share."""

    def __post_init__(self) -> None:
        unused = [] if self.turns > 1 else [("turn_tokens", "turns=1"), ("think", "turns=1")]
        unused += [] if self.long_every else [("long_prompt", "long_every=0")]
        for name, where in unused:
            if (value := getattr(self, name)) != getattr(Traffic, name):
                raise ValueError(f"{name}={value} has no meaning with {where}; leave it out")

    @property
    def longest(self) -> int:
        """Tokens of the longest session, its last answer included."""
        most = 1 + self.vary
        turns = self.turn_tokens * (self.turns - 1) + self.output * self.turns
        prompt = max(self.prompt, self.long_prompt) if self.long_every else self.prompt
        return self.shared + SESSION_TOKENS + int(most * (prompt + turns)) + 1

    def is_long(self, number: int) -> bool:
        """Whether the session with this number begins with a long prompt."""
        return self.long_every > 0 and number % self.long_every == self.long_every - 1


SESSION_TOKENS = 4  # that tell a session's prompt from other sessions' prompts


@dataclass
class SimulatedSession:
    """A conversation so far, and the random generator that draws its lengths."""

    number: int
    rng: random.Random
    tokens: tuple[int, ...] = ()
    turn: int = 0


@dataclass
class TimedTurn:
    """One request's times, in seconds of the virtual clock, and counts."""

    session: SimulatedSession
    request: Request
    due: float
    first_token: float = 0.0
    end: float = 0.0
    tokens: int = 0
    cached: int = 0
    forwards: int = 0
    preemptions: int = 0

    @property
    def ttft(self) -> float:
        return self.first_token - self.due

    @property
    def speed(self) -> float:
        """Tokens a second, from the request's arrival to its end."""
        return self.tokens / (self.end - self.due)


def arrivals(traffic: Traffic, number: int, *, rng: random.Random) -> Iterator[float]:
    """When `number` sessions begin: bursts of a geometric size, with exponential gaps between them."""
    at, left = 0.0, 0
    for _ in range(number):
        if not left:
            at += rng.expovariate(traffic.rate / traffic.burst)
            left = 1
            while rng.random() >= 1 / traffic.burst:
                left += 1
        left -= 1
        yield at


class Clients:
    """The sessions of a traffic: their turns, one after the other."""

    def __init__(self, traffic: Traffic, decoding: DecodingConfig, *, seed: int) -> None:
        self._traffic, self._decoding, self._seed = traffic, decoding, seed

    def begin(self, number: int, due: float) -> TimedTurn:
        """The first turn of a session."""
        digits = (number // DIGITS**place % DIGITS for place in range(SESSION_TOKENS))
        session = SimulatedSession(number, random.Random(f"{self._seed} {number}"))
        session.tokens = (*(FILLER,) * self._traffic.shared, *digits)
        traffic = self._traffic
        return self._turn(session, traffic.long_prompt if traffic.is_long(number) else traffic.prompt, due)

    def next(self, turn: TimedTurn, answer: tuple[int, ...]) -> TimedTurn | None:
        """The session's turn after `turn`, which has ended; `None` after the last."""
        session = turn.session
        if session.turn == self._traffic.turns:
            return None
        session.tokens = (*turn.request.prompt, *answer)
        think = session.rng.expovariate(1 / self._traffic.think) if self._traffic.think else 0.0
        return self._turn(session, self._traffic.turn_tokens, turn.end + think)

    def _turn(self, session: SimulatedSession, new_tokens: int, due: float) -> TimedTurn:
        traffic, session.turn = self._traffic, session.turn + 1

        def drawn(mean: int) -> int:
            return max(1, round(mean * session.rng.uniform(1 - traffic.vary, 1 + traffic.vary)))

        prompt = (*session.tokens, *(session.turn % DIGITS,) * drawn(new_tokens))
        name = f"{session.number}.{session.turn}"
        return TimedTurn(session, request_of(name, prompt, drawn(traffic.output), self._decoding), due)
