"""BlockBatch: one request decoded with several block lengths at once, one branch for each (Algorithms 1 and 2).

    forward on all branches that have masks in their window
      -> decode the window -> does an EOS end it? -> advance full windows -> merge -> sync -> refresh if one asks

A branch's window is its first block with a mask; the keys outside the window come from the last forward that computed
them (dual cache). The first forward runs on one lane, whose cache is then copied to the other lanes. Where the paper
leaves a choice, the released code decides: a branch merges only from branches whose window ends no later than its own,
its count of decoded tokens excludes merged tokens, and a sync copies tokens and cache but not the leader's
probabilities.

Shape legend: G positions after the prompt, K remembered tokens of a position, P positions with logits, S source
branches, V vocabulary.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.sampling import log_probability
from mbd_core.decoding.canvas.branch import Branch, BranchStats, Phase, compatible, lane_changes, likeliest_tokens
from mbd_core.decoding.canvas.lane import Lane, distinct_lengths
from mbd_core.decoding.canvas.plan import CanvasPlan, CanvasTask, CanvasUpdate, Guesses, OpenLogits
from mbd_core.decoding.canvas.unmasking import (
    GuessingDecoder,
    LaneAdjustments,
    accept_best,
    accept_over_threshold,
)


class BranchedCanvas(GuessingDecoder):
    """BlockBatch on one request: a `PlannedDecoder` with one lane for each branch.

    `tokens`, `log_probs` and `steps` are empty until a branch wins. A merged token's step is the merge's; a synced
    token's step is the leader's.
    """

    def __init__(self, task: CanvasTask) -> None:
        canvas, prompt, max_tokens = task.canvas, task.prompt, task.max_tokens
        assert canvas.branches is not None
        self.canvas, self.sampling, self.settings = canvas, task.sampling, canvas.branches
        self.prompt_length, self.length = len(prompt), len(prompt) + max_tokens
        self.num_forwards = 0
        self.num_query_positions = 0
        mask_token_id = task.vocab.mask_token_id
        self._eos, self._ends, self._vocab, self._shift = task.eos_token_ids, task.ends, task.vocab, int(task.shift)
        self._adjustments = LaneAdjustments(task)
        self.branches = [
            Branch(i, n, Lane.fresh(prompt, max_tokens, mask_token_id), len(prompt), self.settings.tau_merge)
            for i, n in enumerate(distinct_lengths(self.settings, max_tokens))
        ]
        self.num_lanes = len(self.branches)
        self._phase = Phase.INIT
        self._copies: list[tuple[int, int]] = []
        self._winner: Branch | None = None

    @property
    def done(self) -> bool:
        return self._winner is not None

    def answer_from(self, number: int) -> Piece:
        if self._winner is None:
            return Piece(logprobs=(), steps=())
        return self._winner.lane.answer(self.prompt_length + number, self._ends)

    @property
    def winner(self) -> int | None:
        """Index of the branch whose tokens are returned; `None` until one wins."""
        return self._winner.index if self._winner else None

    def stats(self) -> list[BranchStats]:
        """The counts of each branch, ascending by block length."""
        return [b.stats() for b in self.branches]

    def plan(self) -> CanvasPlan:
        """The next forward of all branches that take part, their windows (or canvases) packed without padding."""
        assert not self.done
        undecided_L = self._undecided_positions()
        queries = []
        for b in self._participants():
            logits_at = self._logits_positions(b, undecided_L) - self._shift
            queries.append(b.lane.query(b.index, *self._query_range(b), logits_at))
        return CanvasPlan(self._useful_copies(), queries)

    def open_logits(self, logits: list[Tensor]) -> OpenLogits:
        logits_PV, undecided_L = torch.cat(logits), self._undecided_positions()
        if self.canvas.forbid_eos:
            logits_PV[:, list(self._eos)] = -torch.inf
        positions = [self._logits_positions(b, undecided_L) for b in self._participants()]
        positions_P = torch.from_numpy(np.concatenate(positions))
        return OpenLogits(
            logits_PV=logits_PV,
            position_P=positions_P,
            forward=self.num_forwards,
            score=self.canvas.score,
            sampling=self.sampling,
            vocab=self._vocab,
            adjust=self._adjustments.at(self.branches[0].lane, positions_P, logits_PV),
        )

    def accept(self, opened: OpenLogits, guesses: Guesses) -> CanvasUpdate:
        """One iteration of Algorithm 1: decode from a forward's logits, then choose the next forward."""
        phase, participants, undecided_L = self._phase, self._participants(), self._undecided_positions()
        self.num_query_positions += sum(stop - start for start, stop in map(self._query_range, participants))
        self._copies = []
        earlier_lanes = [b.lane.copy() for b in self.branches]
        parts = _parts([len(self._logits_positions(b, undecided_L)) for b in participants])
        if phase is Phase.INIT:  # one forward serves all branches
            self._copies = [(0, b.index) for b in self.branches[1:]]
            participants, parts = self.branches, parts * self.num_lanes
        certainty = self._decode_all(participants, parts, opened, guesses)
        self.num_forwards += 1
        self._choose_phase(phase, participants, certainty)
        return self._changes(earlier_lanes)

    def _decode_all(
        self, participants: list[Branch], parts: list[slice], opened: OpenLogits, guesses: Guesses
    ) -> dict[int, float]:
        """Decode each branch's window from its part of the logits.

        Returns the probability of the ending EOS for each branch that has one with logits here.
        """
        positions_P, logits_PV = opened.position_P, opened.logits_PV
        tokens_PK, p_PK = likeliest_tokens(logits_PV, self.settings.tau_merge)
        certainty: dict[int, float] = {}
        for branch, part in zip(participants, parts, strict=True):
            branch.forwards[self._phase] += 1
            branch.probabilities.replace(positions_P[part] - self.prompt_length, tokens_PK[part], p_PK[part])
            self._decode(branch, guesses.select(part))
            eos = branch.ending_eos(self._ends, anywhere=self._ends_anywhere)
            rows = [] if eos is None else (positions_P[part] == eos).nonzero()[:, 0].tolist()
            if rows:
                probability_V = logits_PV[part][rows[0]].float().softmax(-1)
                certainty[branch.index] = float(probability_V[branch.lane.tokens[eos]])
        return certainty

    def _choose_phase(self, phase: Phase, participants: list[Branch], certainty: dict[int, float]) -> None:
        """End the request at an EOS; otherwise coordinate the branches until one has masks in its window."""
        if phase is Phase.BLOCK or self._ends_anywhere:
            self._end_at_eos(participants, certainty)
        if phase is Phase.REFRESH:
            for branch in participants:
                branch.blocks_since_refresh, branch.wants_refresh = 0, False
            self._phase = Phase.BLOCK
            if any(len(b.open_positions) for b in self._unfinished_branches()):
                return  # full windows wait for the next block forward (Alg. 1 lines 13 to 24)
        while not self.done:
            self._coordinate(certainty)
            unfinished = self._unfinished_branches()
            if not unfinished and not self.done:
                num_filled = [int((~b.lane.masked).sum()) for b in self.branches]
                self._winner = self.branches[num_filled.index(max(num_filled))]
            self._phase = Phase.REFRESH if any(b.wants_refresh for b in unfinished) else Phase.BLOCK
            if self._phase is Phase.REFRESH or any(len(b.open_positions) for b in unfinished):
                return

    def _coordinate(self, certainty: dict[int, float]) -> None:
        """Advance, merge, sync (Alg. 2). With `_ends_anywhere` a block that they complete may end the request too."""
        for branch in self.branches:
            branch.advance(self.settings.refresh)
        self._merge()
        self._sync()
        if self._ends_anywhere:
            self._end_at_eos(self._unfinished_branches(), certainty)

    def _decode(self, branch: Branch, guesses: Guesses) -> None:
        """Fill the window's masks by threshold. Guesses outside the window are not accepted."""
        window = guesses.select(np.isin(guesses.position_P, branch.open_positions))
        if not len(window.position_P):
            return
        accepted = window.select(accept_over_threshold(window, self.canvas.tau, None) | accept_best(window.score_P, 1))
        branch.lane.fill(accepted.position_P, accepted.token_P, accepted.log_prob_P, step=self.num_forwards + 1)
        branch.num_decoded += len(accepted.position_P)

    @property
    def _ends_anywhere(self) -> bool:
        """Whether an EOS in any complete block ends the request, not only one in a window right after its forward."""
        return self.settings.eos_test == "always"

    def _end_at_eos(self, branches: list[Branch], certainty: dict[int, float]) -> None:
        """Let the branch win whose ending EOS is the most probable, if there is one (Alg. 1 lines 21 to 23).

        If the last forward gave no logits for an EOS (a merge or a sync wrote it), its probability when it was
        accepted counts.
        """
        probabilities = {}
        for branch in branches:
            eos = branch.ending_eos(self._ends, anywhere=self._ends_anywhere)
            if eos is not None:
                at_acceptance = math.exp(float(branch.lane.log_probs[eos]))
                probabilities[branch.index] = certainty.get(branch.index, at_acceptance)
        if probabilities:
            self._winner = self.branches[max(probabilities, key=lambda index: (probabilities[index], -index))]

    def _merge(self) -> None:
        """Confidence-gated merge (Alg. 2 lines 7 to 26). Later branches see earlier merges."""
        order = sorted(self._unfinished_branches(), key=lambda b: -b.stop)
        for rank, target in enumerate(order):
            sources = [s for s in order[rank + 1 :] if compatible(s.lane, target.lane)]
            if sources and self._merge_into(target, sources):
                target.advance(self.settings.refresh)

    def _merge_into(self, target: Branch, sources: list[Branch]) -> int:
        """Fills masks of `target` with tokens of `sources` whose probability under `target` exceeds tau_merge.

        Returns their number.
        """
        begin = self.prompt_length
        tokens_SG = torch.from_numpy(np.stack([s.lane.tokens[begin:] for s in sources]))
        decided_SG = torch.from_numpy(np.stack([~s.lane.masked[begin:] for s in sources]))
        p_SG = target.probabilities.probability(tokens_SG).masked_fill(~decided_SG, 0.0)
        p_G, source_G = p_SG.max(dim=0)
        in_window_G = torch.zeros_like(p_G, dtype=torch.bool)
        for s in sources:
            in_window_G[s.start - begin : s.stop - begin] = True
        masked_G = torch.from_numpy(target.lane.masked[begin:])
        accepted_G = in_window_G & masked_G & (p_G > self.settings.tau_merge)
        offsets = accepted_G.nonzero()[:, 0]
        tokens, log_probs = tokens_SG[source_G[offsets], offsets], log_probability(p_G[offsets])
        at, new = (offsets + begin).numpy(), tokens.numpy()
        target.lane.fill(at, new, log_probs.numpy(), step=self.num_forwards)
        target.num_merged += len(offsets)
        return len(offsets)

    def _sync(self) -> None:
        """Overwrite branches that are too far behind the leader with its tokens and cache (Alg. 2 lines 27 to 35)."""
        leader = max(self.branches, key=lambda b: (b.num_decoded, -b.index))
        for branch in self._unfinished_branches():
            gain = leader.num_decoded - branch.num_decoded
            if branch is leader or gain <= self.settings.tau_sync:
                continue
            branch.lane = leader.lane.copy()
            branch.align()
            branch.num_decoded = leader.num_decoded
            branch.num_copied += gain
            self._copies.append((leader.index, branch.index))

    def _unfinished_branches(self) -> list[Branch]:
        return [b for b in self.branches if not b.done]

    def _participants(self) -> list[Branch]:
        """The branches that take part in the next forward."""
        match self._phase:
            case Phase.INIT:
                return self.branches[:1]
            case Phase.BLOCK:
                return [b for b in self._unfinished_branches() if len(b.open_positions)]
            case Phase.REFRESH:
                return self._unfinished_branches()

    def _query_range(self, branch: Branch) -> tuple[int, int]:
        """The range that the branch's forward computes. With `shift` a window begins one position earlier, at the
        position that predicts its first position."""
        if self._phase is Phase.BLOCK:
            return branch.start - self._shift, branch.stop
        return 0, self.length

    def _undecided_positions(self) -> np.ndarray:
        """The positions (L,) masked in some branch. Only these can still be decoded, merged, or masked by a sync."""
        return np.logical_or.reduce([b.lane.masked for b in self.branches])

    def _logits_positions(self, branch: Branch, undecided_L: np.ndarray) -> np.ndarray:
        """The positions that this forward predicts for the branch: undecided positions, and EOS tokens that may end
        it."""
        predicted = undecided_L | np.isin(branch.lane.tokens, self._ends)
        predicted[: self.prompt_length] = False
        if self._phase is Phase.BLOCK:
            predicted[: branch.start] = False
            predicted[branch.stop :] = False
        return np.flatnonzero(predicted)

    def _useful_copies(self) -> list[tuple[int, int]]:
        """The cache copies of syncs, without copies to a finished lane or to a lane that the next forward
        recomputes."""
        recomputed = {b.index for b in self._participants()} if self._phase is Phase.REFRESH else set()
        unfinished = {b.index for b in self._unfinished_branches()}
        return [(s, t) for s, t in self._copies if t in unfinished and t not in recomputed]

    def _changes(self, earlier_lanes: list[Lane]) -> CanvasUpdate:
        accepted: dict[tuple[int, int], int] = {}
        edited: dict[tuple[int, int], int] = {}
        mask_ratio: dict[tuple[int, int], float] = {}
        for branch, earlier in zip(self.branches, earlier_lanes, strict=True):
            changes = lane_changes(branch, earlier)
            accepted |= {(branch.index, block): number for block, number in changes.accepted.items()}
            edited |= {(branch.index, block): number for block, number in changes.edited.items()}
            mask_ratio |= {(branch.index, block): share for block, share in changes.mask_ratio.items()}
        return CanvasUpdate(accepted, mask_ratio, edited)


def _parts(lengths: Sequence[int]) -> list[slice]:
    """Consecutive slices of the given lengths."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True)]
