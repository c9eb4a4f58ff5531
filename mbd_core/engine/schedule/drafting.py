"""Whether drafts pay: drafts and single tokens give the same tokens, so the mode with more tokens a second is chosen.

Drafts turn many positions into tokens in few forwards. That pays while positions cost little, as with few requests at
once, and while the drafts agree. Neither is known beforehand. So measured steps give the cost of a step by its rows
and positions, and verified rows give the yield of drafts. The other mode is tried now and then, and so rarely that its
expected loss is a small share of the time.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from mbd_core.engine.schedule.forward_seconds import ForwardSeconds, StepLoad

KEPT_STEPS = 128
"""Steps with drafts after which their yield has lost most of its weight (a factor of e)."""
LEAST_VERIFIED = 32
"""Requests draft until this number of rows was verified. Old rows are forgotten only beyond this number. With many
requests a few steps show the yield of drafts. A single request needs many steps, in several passages of its text."""
KEPT_YIELD = 1024
"""The same of steps without drafts."""
TRIED_SHARE = 0.005
"""The share of the time that tries of the other mode may lose."""
LEAST_STEPS = 16
"""The steps between two tries, at least."""
STEPS_OF_A_DRAFT = 2
"""A draft is verified by the step after it."""


@dataclass(frozen=True, kw_only=True)
class DraftChoices:
    """The next forward in both modes: drafts, or single tokens; and the number of requests that may draft."""

    drafts: StepLoad
    single: StepLoad
    number: int


@dataclass(frozen=True, kw_only=True)
class DraftedStep:
    """A step's work for the requests that may draft.

    load      the load of its forward
    single    rows of single tokens
    drafts    draft rows and verify rows
    verified  verify rows
    tokens    tokens that the verify rows gave
    """

    load: StepLoad
    single: int
    drafts: int
    verified: int
    tokens: int


class SeenModes:
    """How long ago each mode was measured, at similar numbers of rows."""

    def __init__(self) -> None:
        self._unseen_steps = {True: LEAST_STEPS, False: LEAST_STEPS}
        self._unseen_seconds = {True: math.inf, False: math.inf}

    def observe(self, load: StepLoad, seconds: float, *, drafts: bool) -> None:
        for mode in (True, False):
            self._unseen_steps[mode] += 1
            self._unseen_seconds[mode] += seconds
        self._unseen_steps[drafts] = 0
        if load.prompt_tokens <= load.positions or math.isfinite(self._unseen_seconds[drafts]):
            self._unseen_seconds[drafts] = 0.0  # steps that mostly store prompts are no first measure of a mode

    def may_try(self, mode: bool, loss: float) -> bool:
        """Whether a try of `mode` is due, if the try is expected to lose `loss` seconds."""
        return self._unseen_steps[mode] >= LEAST_STEPS and loss <= TRIED_SHARE * self._unseen_seconds[mode]


class Drafting:
    """Learns from measured steps, and says whether requests draft in the next one."""

    def __init__(self) -> None:
        self._seconds = ForwardSeconds()
        self._seen: defaultdict[int, SeenModes] = defaultdict(SeenModes)  # by the power of two of the rows
        self._verified = self._tokens = 0.0  # verify rows, and their tokens; older rows count less
        self._leader_drafts: bool | None = None
        self._chosen_rows: int | None = None  # of the last choice; a step is seen there, though rows join in it

    def observe(self, step: DraftedStep, seconds: float) -> None:
        """Records that a step took `seconds`."""
        if not step.single + step.drafts or seconds <= 0:
            return
        self._seconds.observe(step.load, seconds)
        rows = step.load.rows if self._chosen_rows is None else self._chosen_rows
        self._seen[rows.bit_length()].observe(step.load, seconds, drafts=step.drafts > step.single)
        decay = 1 - 1 / (KEPT_STEPS if step.drafts else KEPT_YIELD)
        if decay * self._verified < LEAST_VERIFIED:
            decay = 1.0
        self._verified = decay * self._verified + step.verified
        self._tokens = decay * self._tokens + step.tokens

    def choose(self, choices: DraftChoices) -> bool:
        """Whether the requests that may draft do so in the next step. The answer changes only after a step."""
        self._chosen_rows = None
        if self._leader_drafts is not None:
            return self._leader_drafts
        if not choices.number or self._verified < LEAST_VERIFIED:
            return True
        rows = self._chosen_rows = choices.single.rows
        number = choices.number
        others = rows - number  # each counts as a token
        seconds = {True: self._seconds.of(choices.drafts), False: self._seconds.of(choices.single)}
        drafted = self._tokens / self._verified / STEPS_OF_A_DRAFT
        tokens = {True: others + number * drafted, False: others + number}
        rate = {mode: tokens[mode] / seconds[mode] for mode in (True, False)}
        best = rate[True] >= rate[False]
        loss = STEPS_OF_A_DRAFT * (seconds[not best] - tokens[not best] / rate[best])
        return not best if self._seen[rows.bit_length()].may_try(not best, loss) else best

    def follow(self, drafts: bool) -> None:
        """The next steps draft if rank 0's do."""
        self._leader_drafts = drafts
