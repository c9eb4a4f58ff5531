"""Steps in which the host decides tokens of some rows: answers under a grammar, templates with fixed text, and blocks
in which tokens come and go.

Before the forward, certain tokens take their places: a template's fixed tokens, and tokens that a grammar forces.
After it, a guide decides the tokens of its row, from left to right, on the host. Such a step runs packed and eagerly;
the rows of other requests decode in it as in any step. Of several ranks rank 0 has the guides and decides; the other
ranks take over its decisions.

The rows of a step share one bound on the work of guides. At the bound a row keeps its state and decides nothing in
this step; in the next step the rows that have waited longest come first.

Shape legend: R rows, N slots, B block size, A positions with logits, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.blocks.acceptance import Prediction
from mbd_core.decoding.blocks.block_buffer import BlockBuffer, Chosen, Rewritten
from mbd_core.decoding.blocks.levenshtein import EditTokens, edited_block
from mbd_core.decoding.blocks.sampling import FORBIDDEN, Draw, Vocab, allowed_alone, choose
from mbd_core.decoding.grammar.closings import Search
from mbd_core.decoding.grammar.guide import AllowedToken, Guide, GuideState, Pick
from mbd_core.engine.sequences.sequence import SequenceState, TextScores

T = TypeVar("T")

LogitsOf = Callable[[slice], Tensor]


@dataclass
class _Row:
    """A row in which a guide may decide in this step.

    places  the flat places of the row's open positions, in order
    logits  the logits (V,) at the first positions, by their index in `places`
    """

    guide: GuideState | TextScores
    tau: float
    quota: int
    draws: bool
    adjusts: bool
    places: list[int]
    logits: dict[int, Tensor] = field(default_factory=dict)

    @property
    def wait_steps(self) -> int:
        """Steps that its guide has waited for its turn to look for a closing."""
        return self.guide.waited if isinstance(self.guide, Guide) else 0


class _EditedRow:
    """A batch row whose only block the host edits: its open and filled positions, and the logits (V,) at each."""

    def __init__(self, number: int, sequence: SequenceState, buffer: BlockBuffer) -> None:
        self.number, self.sequence = number, sequence
        self.asked_B = buffer.asked_RNB[number, 0]
        self.logits: dict[int, Tensor] = {}


@dataclass(frozen=True)
class Decision:
    """A step's decision for one row: tokens and their probabilities for the first of its open positions, and its
    guide's state afterwards."""

    tokens: list[tuple[int, float]]
    pending: list[int] = field(default_factory=list)
    ended: bool = False


class SharedWork(Protocol):
    """Calls the deciding function, or takes the decisions of the rank that called it."""

    def __call__(self, decide: Callable[[], list[T]], /) -> list[T]: ...


class Steering:
    """One step's host decisions for the sequences of these batch rows."""

    def __init__(
        self,
        sequences: Mapping[int, SequenceState],
        forwards: Mapping[int, int],
        share: SharedWork,
        *,
        tries: float,
        ids: EditTokens | None = None,
    ) -> None:
        """`forwards` counts each sequence's forwards before this step; `tries` bounds the work of all guides together;
        `ids` are the model's edit tokens."""
        self._ids = ids
        self._sequences, self._forwards, self._share, self._tries = sequences, forwards, share, tries
        self._rows: list[_Row] = []
        self._edited_rows: list[_EditedRow] = []

    def fill(self, buffer: BlockBuffer) -> None:
        """Puts certain tokens into ACTIVE slots; the following forward stores the leading complete blocks."""
        for row, sequence in self._sequences.items():
            certain = self._certain(sequence, buffer.open_RNB[row], buffer.positions_RNB[row])
            for (slot, offset), token in certain.items():
                buffer.set_token(row, slot, offset, token)
                if sequence.step_map is not None:
                    sequence.step_map.mark(slot, offset, 0 if sequence.request.template else self._forwards[row])
            if certain:
                buffer.close_complete(row)

    def _certain(self, sequence: SequenceState, open_NB: Tensor, positions_NB: Tensor) -> dict[tuple[int, int], int]:
        """Tokens for open positions, by slot and offset."""
        places = [(int(slot), int(offset)) for slot, offset in open_NB.nonzero().tolist()]
        request, guide = sequence.request, sequence.guide
        if request.template and not request.scored:
            positions, start = positions_NB.tolist(), len(request.prompt)
            tokens = {(n, b): request.template[positions[n][b] - start] for n, b in places}
            return {place: token for place, token in tokens.items() if token is not None}
        if guide is None or not guide.pending:
            return {}
        number = min(len(places), len(guide.pending))
        certain = dict(zip(places, guide.pending[:number], strict=False))
        guide.pending = guide.pending[number:]
        if guide.ended and not guide.pending:  # the rest of the last block has no meaning
            (last_slot, _), eos = places[number - 1], certain[places[number - 1]]
            certain |= {place: eos for place in places[number:] if place[0] == last_slot}
        return certain

    def watch(self, logits_of: LogitsOf, at_A: Tensor, buffer: BlockBuffer) -> LogitsOf:
        """`logits_of`, which also keeps the logits at each row's first changeable positions, a block's at most."""
        row_at: dict[int, tuple[_Row | _EditedRow, int]] = {}
        size = buffer.num_slots * buffer.block_size
        index_of = {place: index for index, place in enumerate(at_A.tolist())}
        for number, sequence in self._sequences.items():
            if sequence.request.decoding.edit is not None:
                edited_row = _EditedRow(number, sequence, buffer)
                self._edited_rows.append(edited_row)
                places = (edited_row.asked_B.nonzero()[:, 0] + number * size).tolist()
                row_at |= {index_of[place]: (edited_row, place - number * size) for place in places}
                continue
            guide = sequence.text_scores or sequence.guide
            if guide is None or (isinstance(guide, GuideState) and guide.ended):
                continue
            places = (buffer.open_RNB[number].flatten().nonzero()[:, 0] + number * size).tolist()
            request, decoding = sequence.request, sequence.request.decoding
            draws, adjusts = request.sampling.draws, request.adjusts
            row = _Row(guide, decoding.tau_m2t, decoding.tokens_per_step, draws, adjusts, places)
            self._rows.append(row)
            for i, place in enumerate(places[: buffer.block_size if isinstance(guide, GuideState) else 1]):
                row_at[index_of[place]] = (row, i)

        def copy_logits(part: slice) -> Tensor:
            logits_PV = logits_of(part)
            for index, (row, i) in row_at.items():
                if part.start <= index < part.stop:
                    row.logits[i] = logits_PV[index - part.start].to(torch.float32, copy=True)
            return logits_PV

        return copy_logits

    def choose(self, prediction: Prediction, buffer: BlockBuffer, vocab: Vocab) -> Chosen:
        """Write the guides' decisions into `prediction`. Returns which positions of their rows become tokens."""
        accepted_RNB = torch.zeros_like(buffer.masked_RNB)
        guided_R = torch.zeros(len(accepted_RNB), dtype=torch.bool, device=accepted_RNB.device)
        token, confidence = prediction.token_RNB.view(-1), prediction.confidence_RNB.view(-1)
        for row, picks in zip(self._rows, self._decisions(buffer, vocab), strict=True):
            places = torch.tensor(row.places[: len(picks)], dtype=torch.int64, device=accepted_RNB.device)
            token[places] = torch.tensor([t for t, _ in picks], dtype=token.dtype, device=token.device)
            confidence[places] = torch.tensor([p for _, p in picks], dtype=confidence.dtype, device=token.device)
            accepted_RNB.view(-1)[places] = True
        for number, sequence in self._sequences.items():
            edits = sequence.request.decoding.edit is not None
            if edits or sequence.guide is not None or sequence.text_scores is not None:
                guided_R[number] = True
        return Chosen(guided_R, accepted_RNB, self._rewritten(buffer, vocab) if self._edited_rows else None)

    def _rewritten(self, buffer: BlockBuffer, vocab: Vocab) -> Rewritten:
        """The new content of the edited blocks. Every rank computes it from the same logits."""
        blocks = Rewritten(
            torch.zeros(len(buffer.state_RN), dtype=torch.bool, device=buffer.state_RN.device),
            buffer.tokens_RNB.clone(),
            buffer.masked_RNB.clone(),
            buffer.confidence_RNB.clone(),
            torch.zeros_like(buffer.resident_RN),
        )
        for row in self._edited_rows:
            sequence, number = row.sequence, row.number
            if sequence.block is None:
                tokens, is_fixed_B = buffer.tokens_RNB[number, 0], ~row.asked_B
                decoding = sequence.request.decoding
                assert self._ids is not None
                sequence.block = edited_block(tokens.tolist(), int(is_fixed_B.sum()), decoding, self._ids)
            block = sequence.block
            some_V = next(iter(row.logits.values()))
            rows = [row.logits.get(offset, some_V) for offset in range(buffer.block_size)]
            block.advance(torch.stack(rows)[:, : vocab.size], self._forwards[number] + 1)
            blocks.rows_R[number] = True
            blocks.tokens_RNB[number, 0] = torch.tensor(block.tokens)
            blocks.masked_RNB[number, 0] = torch.tensor([i in block.masks for i in range(buffer.block_size)])
            blocks.confidence_RNB[number, 0] = torch.tensor([cell.confidence for cell in block.cells])
            blocks.stored_RN[number, 0] = block.done
            if block.done:
                sequence.block = None
        return blocks

    def _decisions(self, buffer: BlockBuffer, vocab: Vocab) -> list[list[tuple[int, float]]]:
        """Decide tokens, with their probabilities, for the first open positions of each row, and update its guide."""
        if not self._rows:
            return []
        decisions = self._share(lambda: self._decide(buffer, vocab))
        for row, decision in zip(self._rows, decisions, strict=True):
            if isinstance(row.guide, GuideState):
                row.guide.pending, row.guide.ended = decision.pending, decision.ended
        return [decision.tokens for decision in decisions]

    def _decide(self, buffer: BlockBuffer, vocab: Vocab) -> list[Decision]:
        search, decisions = Search(self._tries), dict[int, Decision]()
        for number in sorted(range(len(self._rows)), key=lambda number: -self._rows[number].wait_steps):
            decisions[number] = _decide_row(self._rows[number], buffer, vocab, search)
        return [decisions[number] for number in range(len(self._rows))]


def _decide_row(row: _Row, buffer: BlockBuffer, vocab: Vocab, search: Search) -> Decision:
    guide, pick = row.guide, _picker(row, buffer, vocab)
    if isinstance(guide, TextScores):
        return Decision([guide.decide(row.logits[0], pick, vocab)] if row.places else [])
    assert isinstance(guide, Guide), "only the rank that has the guides decides"
    if not row.places:
        return Decision([], guide.pending, guide.ended)
    tokens = guide.extend(len(row.places), len(row.logits), pick, tau=row.tau, quota=row.quota, search=search)
    if guide.ended and not guide.pending and tokens:  # the rest of its block has no meaning
        last_place = row.places[len(tokens) - 1]
        rest_places = [
            p for p in row.places[len(tokens) :] if p // buffer.block_size == last_place // buffer.block_size
        ]
        tokens += [(tokens[-1][0], 1.0)] * len(rest_places)
    return Decision(tokens, guide.pending, guide.ended)


def _picker(row: _Row, buffer: BlockBuffer, vocab: Vocab) -> Pick:
    """Chooses among allowed tokens as a plain request chooses among all tokens, after its own changes of logits: the
    likeliest token, or a token drawn with its noise. Forwards in which its guide waited do not count for the noise."""
    at_A = torch.tensor(row.places, dtype=torch.int64, device=buffer.masked_RNB.device)
    adjust = buffer.adjust(at_A) if row.adjusts else None
    draw: Draw | None = None
    if row.draws:
        draw = buffer.draw(at_A)
        if isinstance(row.guide, Guide):
            draw = replace(draw, forward_P=draw.forward_P - row.guide.num_waits)

    def pick(i: int, allowed_V: np.ndarray) -> AllowedToken:
        logits_V = row.logits[i]
        masked_V = allowed_alone(logits_V, allowed_V)
        position = slice(i, i + 1)
        token_P, probability_P = choose(
            masked_V[None],
            vocab,
            None if draw is None else draw.select(position),
            None if adjust is None else adjust.select(position),
        )
        likeliest = vocab.exclude_(logits_V.clone(), FORBIDDEN).max()
        return AllowedToken(int(token_P[0]), float(probability_P[0]), bool(masked_V.max() < likeliest))

    return pick
