"""How many blocks a round drafts: as many as promise the most tokens a second (`Verify.slots`).

A round is a draft and its judgement. A further block costs positions in both forwards, and its tokens count only if
all drafts before them are confirmed. So it pays after a block that is nearly full, and with drafts that agree. Judged
drafts give the chance that a token is confirmed, by slot; measured steps give the seconds of a forward by its
positions. Where a draft model drafts, they give the seconds of both models.
"""

from collections.abc import Collection, Sequence
from itertools import zip_longest

from mbd_core.decoding.answers.slots import PlannedSlot
from mbd_core.decoding.causal.verified import DraftRound
from mbd_core.engine.schedule.forward_seconds import ForwardSeconds, StepLoad

START = 0.8
"""The chance that the first slot's tokens are confirmed, before any are judged."""
PRIOR = 8.0
"""An answer's own judged tokens weigh as much as those of all answers once there are this many."""
KEPT_ROUNDS = 32
"""Rounds of an answer after which a count has lost most of its weight (a factor of e)."""
KEPT_OF_ALL = 1024
"""The same for the counts of all answers."""
LEAST_STEPS = 16
"""Rounds draft one block until this number of steps were measured."""


class ConfirmedRates:
    """The chance that a drafted token is confirmed after confirmed tokens, by slot; older rounds count less.

    A slot with few such tokens is expected to do as in `others`, and without them as the slot before it.
    """

    def __init__(self, kept: int, others: "ConfirmedRates | None" = None) -> None:
        self._decay, self._others = 1 - 1 / kept, others
        self._confirmed: list[float] = []
        self._refused: list[float] = []

    def observe(self, slots: Sequence[PlannedSlot], ends: Collection[int]) -> None:
        """Counts a judgement, by the blocks that its forward held. A confirmed token of `ends` counts as a refusal,
        because the answer does not have the tokens after it either."""
        confirmed, refused, has_end = list[int](), list[int](), False
        for slot in slots:
            verdict = slot.frame.verdict
            if verdict is None or not verdict.judged:
                continue
            tokens = [] if has_end else [slot.frame.tokens[offset] for offset in verdict.confirmed]
            end = next((n for n, token in enumerate(tokens) if token in ends), len(tokens))
            confirmed.append(end)
            refused.append(int(end < len(tokens) or (bool(verdict.refused) and not has_end)))
            has_end |= end < len(tokens)
        self._confirmed = self._counted(self._confirmed, confirmed)
        self._refused = self._counted(self._refused, refused)

    def _counted(self, counts: list[float], new: list[int]) -> list[float]:
        return [self._decay * old + number for old, number in zip_longest(counts, new, fillvalue=0)]

    def of(self, number: int) -> list[float]:
        """The chances of the first `number` slots."""
        others = [] if self._others is None else self._others.of(number)
        rates: list[float] = []
        for slot in range(number):
            expected = others[slot] if others else rates[-1] if rates else START
            is_known = slot < len(self._confirmed)
            confirmed, refused = (self._confirmed[slot], self._refused[slot]) if is_known else (0.0, 0.0)
            rates.append((confirmed + PRIOR * expected) / (confirmed + refused + PRIOR))
        return rates


class DraftLengths:
    """Learns from measured forwards and judged drafts, and chooses the blocks of the next draft."""

    def __init__(self) -> None:
        self.seconds, self.rates = ForwardSeconds(), ConfirmedRates(KEPT_OF_ALL)

    def rates_of_answer(self) -> ConfirmedRates:
        return ConfirmedRates(KEPT_ROUNDS, self.rates)

    def choose(self, rounds: Sequence[DraftRound], rates: ConfirmedRates, *, num_running: int) -> int:
        """The number of drafted blocks, as if all `num_running` requests chose alike. `rounds` are the choices: one
        block, two, ..."""
        if self.seconds.num_measured < LEAST_STEPS:
            return 1
        chances = rates.of(len(rounds))
        speeds = []
        for each in rounds:
            positions = num_running * each.num_drafted
            of_draft_model = positions if each.by_draft_model else 0
            draft = StepLoad(num_running, positions - of_draft_model, draft_positions=of_draft_model)
            judgement = StepLoad(num_running, num_running * each.num_judged)
            seconds = self.seconds.of(draft) + self.seconds.of(judgement)
            speeds.append(expected_tokens(each.masks, chances) / seconds)
        return 1 + speeds.index(max(speeds))


def expected_tokens(masks: Sequence[int], chances: Sequence[float]) -> float:
    """The tokens that a judgement decides: the confirmed tokens before the first refusal, and the refused one's."""
    tokens, reached = 0.0, 1.0
    for number, chance in zip(masks, chances, strict=False):
        whole = chance**number
        tokens += reached * (1 - whole) / (1 - chance)
        reached *= whole
    return tokens
