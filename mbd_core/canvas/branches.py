"""BlockBatch: one request decoded with several block lengths at once, a branch each (Algorithms 1 and 2).

    forward on all branches that have masks in their window
      -> decode the window -> does an EOS end it? -> advance full windows -> merge -> sync -> refresh when one asks

A branch's window is its block with the first mask; the keys of all else on its lane are as old as their last forward
(dual cache). The first forward runs on one lane, whose cache is then copied to the others. What the paper leaves open
is as released: a branch merges only from branches whose window ends no later than its own, its count of decoded
tokens leaves out merged ones, and a sync copies tokens and cache but not the leader's probabilities.

Shape legend: G positions behind the prompt, K tokens remembered a position, P positions with logits, V vocabulary.
"""

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from mbd_core.canvas.plan import CanvasPlan, CanvasTask, CanvasUpdate, Lane, query
from mbd_core.canvas.unmasking import Guess, best, guess, over_threshold
from mbd_core.decoding.canvas_config import Branches
from mbd_core.decoding.sampling import log_probability


class Phase(Enum):
    """Which forward comes next: the first, on one lane; the windows; or whole canvases."""

    INIT = "init"
    BLOCK = "block"
    REFRESH = "refresh"


@dataclass(frozen=True)
class BranchStats:
    """What one branch did: forwards it took part in by kind, tokens by origin, and its decided positions.

    num_decoded is Algorithm 2's progress: own tokens, or the leader's count where a sync set it; num_copied adds up
    what syncs set it forward by.
    """

    block_length: int
    num_init: int
    num_block: int
    num_refresh: int
    num_decoded: int
    num_merged: int
    num_copied: int
    num_filled: int


def likeliest(logits_PV: Tensor, tau_merge: float) -> tuple[Tensor, Tensor]:
    """The K likeliest tokens of each position and their probabilities (P, K), in one copy to the host.

    Fewer than 1 / tau_merge tokens can be over tau_merge, so K = ceil(1 / tau_merge) hold all that may be merged.
    """
    count = min(math.ceil(1 / tau_merge), logits_PV.shape[1])
    top = logits_PV.float().softmax(-1).topk(count, dim=-1)
    host = torch.stack((top.indices.double(), top.values.double())).cpu()
    return host[0].long(), host[1]


class Likely:
    """A branch's probability map: the likeliest tokens at each position, by the last forward that showed it."""

    def __init__(self, num_positions: int, tau_merge: float) -> None:
        count = math.ceil(1 / tau_merge)
        self._tokens_GK = torch.full((num_positions, count), -1)
        self._p_GK = torch.zeros(num_positions, count, dtype=torch.float64)

    def see(self, offsets_P: Tensor, tokens_PK: Tensor, p_PK: Tensor) -> None:
        """Replace what was known of some positions by their `likeliest` tokens."""
        self._tokens_GK[offsets_P, : tokens_PK.shape[1]] = tokens_PK
        self._p_GK[offsets_P, : p_PK.shape[1]] = p_PK

    def of(self, tokens_SG: Tensor) -> Tensor:
        """Probability of each of S proposals a position (S, G); 0 for what is not remembered."""
        return ((self._tokens_GK == tokens_SG[..., None]) * self._p_GK).sum(-1)


class Branch:
    """One block length: its lane, its window, and what it has done."""

    def __init__(self, index: int, block_length: int, lane: Lane, prompt_length: int, tau_merge: float) -> None:
        self.index, self.block_length, self.lane = index, block_length, lane
        self.begin, self.length = prompt_length, len(lane.tokens)
        self.likely = Likely(self.length - prompt_length, tau_merge)
        self.done = False
        self.num_decoded = self.num_merged = self.num_copied = 0
        self.blocks_since_refresh = 0
        self.wants_refresh = False
        self.forwards = dict.fromkeys(Phase, 0)
        self.start = self.stop = prompt_length
        self.align()

    @property
    def open(self) -> Tensor:
        return self.lane.open(self.start, self.stop)

    def align(self) -> None:
        """Move the window to the block with the first mask; without one the branch is done."""
        first = self.lane.first_mask(self.begin)
        if first == self.length:
            self.done = True
            return
        block = (first - self.begin) // self.block_length
        self.start = self.begin + block * self.block_length
        self.stop = min(self.start + self.block_length, self.length)

    def advance(self, refresh: int) -> None:
        """Leave a full window behind; it counts towards the refresh."""
        if self.done or len(self.open):
            return
        self.blocks_since_refresh += 1
        self.wants_refresh |= self.blocks_since_refresh * self.block_length >= refresh
        self.align()

    def stats(self) -> BranchStats:
        return BranchStats(
            block_length=self.block_length,
            num_init=self.forwards[Phase.INIT],
            num_block=self.forwards[Phase.BLOCK],
            num_refresh=self.forwards[Phase.REFRESH],
            num_decoded=self.num_decoded,
            num_merged=self.num_merged,
            num_copied=self.num_copied,
            num_filled=int((~self.lane.masked[self.begin :]).sum()),
        )


class BranchedCanvas:
    """BlockBatch on one request: a `CanvasDecoder` with a lane a branch.

    `tokens` and `log_probs` stay empty until it is done: before, no branch is known to win.
    """

    def __init__(self, task: CanvasTask) -> None:
        canvas, prompt, max_tokens = task.canvas, task.prompt, task.max_tokens
        assert canvas.branches is not None
        self.canvas, self.sampling, self.settings = canvas, task.sampling, canvas.branches
        self.prompt_length, self.length = len(prompt), len(prompt) + max_tokens
        self.num_forwards = 0
        self.num_query_positions = 0
        mask_token_id = task.vocab.mask_token_id
        self._eos, self._vocab, self._shift = task.eos_token_ids, task.vocab, int(task.shift)
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

    @property
    def tokens(self) -> list[int]:
        return self._winner.lane.tokens[self._decided(self._winner)].tolist() if self._winner else []

    @property
    def log_probs(self) -> list[float]:
        return self._winner.lane.log_probs[self._decided(self._winner)].tolist() if self._winner else []

    @property
    def winner(self) -> int | None:
        """Index of the branch whose tokens are returned; `None` while it is open."""
        return self._winner.index if self._winner else None

    def stats(self) -> list[BranchStats]:
        """A record a branch, ascending by block length."""
        return [b.stats() for b in self.branches]

    def plan(self) -> CanvasPlan:
        """The next forward of all branches that take part, their windows (or canvases) packed without padding."""
        assert not self.done
        wanted = self._wanted()
        queries = [
            query(b.index, b.lane, *self._range(b), self._shown(b, wanted) - self._shift) for b in self._taking_part()
        ]
        return CanvasPlan(self._useful_copies(), queries)

    def update(self, logits: list[Tensor]) -> CanvasUpdate:
        """One turn of Algorithm 1's loop, from a forward's logits to the question which forward comes next."""
        phase, wanted, taking_part = self._phase, self._wanted(), self._taking_part()
        self.num_query_positions += sum(stop - start for start, stop in map(self._range, taking_part))
        self._copies = []
        before = [b.lane.copy() for b in self.branches]
        positions_P, logits_PV = torch.cat([self._shown(b, wanted) for b in taking_part]), torch.cat(logits)
        if self.canvas.forbid_eos:
            logits_PV[:, list(self._eos)] = -torch.inf
        g = guess(logits_PV, positions_P, self.num_forwards, self.canvas, self.sampling, self._vocab)
        tokens_PK, p_PK = likeliest(logits_PV, self.settings.tau_merge)
        ends = torch.tensor([len(rows) for rows in logits]).cumsum(0).tolist()
        parts = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        if phase is Phase.INIT:  # one forward serves all
            self._copies = [(0, b.index) for b in self.branches[1:]]
            taking_part, parts = self.branches, parts * self.num_lanes
        certainty: dict[int, float] = {}
        for branch, part in zip(taking_part, parts, strict=True):
            branch.forwards[phase] += 1
            branch.likely.see(positions_P[part] - self.prompt_length, tokens_PK[part], p_PK[part])
            self._decode(branch, g.at(part))
            eos = self._ending_eos(branch)
            at = [] if eos is None else (positions_P[part] == eos).nonzero()[:, 0].tolist()
            if at:
                certainty[branch.index] = float(logits_PV[part][at[0]].float().softmax(-1)[branch.lane.tokens[eos]])
        self.num_forwards += 1
        self._after(phase, taking_part, certainty)
        return self._difference(before)

    def _after(self, phase: Phase, taking_part: list[Branch], certainty: dict[int, float]) -> None:
        if phase is Phase.BLOCK or self.settings.eos_test == "always":
            self._end_at_eos(taking_part, certainty)
        if phase is Phase.REFRESH:
            for branch in taking_part:
                branch.blocks_since_refresh, branch.wants_refresh = 0, False
            self._phase = Phase.BLOCK
            if any(len(b.open) for b in self._running()):
                return  # full windows wait for the others' forward (Alg. 1 lines 13 to 24)
        while not self.done:
            self._coordinate(certainty)
            running = self._running()
            if not running and not self.done:
                filled = [int((~b.lane.masked).sum()) for b in self.branches]
                self._winner = self.branches[filled.index(max(filled))]
            self._phase = Phase.REFRESH if any(b.wants_refresh for b in running) else Phase.BLOCK
            if self._phase is Phase.REFRESH or any(len(b.open) for b in running):
                return

    def _coordinate(self, certainty: dict[int, float]) -> None:
        """Advance, merge, sync (Alg. 2); what a merge or a sync completes may end the request too."""
        for branch in self.branches:
            branch.advance(self.settings.refresh)
        self._merge()
        self._sync()
        if self.settings.eos_test == "always":
            self._end_at_eos(self._running(), certainty)

    def _decode(self, branch: Branch, seen: Guess) -> None:
        """Fill the window by threshold; what was seen beyond its masks was for the probability map alone."""
        g = seen.at(torch.isin(seen.position_P, branch.open))
        if not len(g.position_P):
            return
        chosen = over_threshold(g, self.canvas.tau, None) | best(g.score_P, 1)
        branch.lane.fill(g.position_P[chosen], g.token_P[chosen], log_probability(g.confidence_P[chosen]))
        branch.num_decoded += int(chosen.sum())

    def _ending_eos(self, branch: Branch) -> int | None:
        """The first EOS of the window if that is full; with `eos_test` "always" of any block, if all up to it are."""
        begin = branch.begin if self.settings.eos_test == "always" else branch.start
        eos = branch.lane.find(self._eos, begin, branch.lane.first_mask(begin))
        if eos is None:
            return None
        block_end = eos + branch.block_length - (eos - branch.begin) % branch.block_length
        return eos if branch.lane.first_mask(begin) >= min(block_end, self.length) else None

    def _end_at_eos(self, branches: list[Branch], certainty: dict[int, float]) -> None:
        """Among branches with an ending EOS the one surest of it wins (Alg. 1 lines 21 to 23).

        Where the last forward did not look at that EOS (a merge or a sync brought it), its probability when it was
        accepted counts.
        """
        sure = {}
        for branch in branches:
            eos = self._ending_eos(branch)
            if eos is not None:
                sure[branch.index] = certainty.get(branch.index, math.exp(float(branch.lane.log_probs[eos])))
        if sure:
            self._winner = self.branches[max(sure, key=lambda index: (sure[index], -index))]

    def _merge(self) -> None:
        """Confidence-gated merge (Alg. 2 lines 7 to 26); later branches see earlier merges."""
        order = sorted(self._running(), key=lambda b: -b.stop)
        for rank, target in enumerate(order):
            sources = [s for s in order[rank + 1 :] if compatible(s.lane, target.lane)]
            if sources and self._take(target, sources):
                target.advance(self.settings.refresh)

    def _take(self, target: Branch, sources: list[Branch]) -> int:
        begin = self.prompt_length
        tokens_SG = torch.stack([s.lane.tokens[begin:] for s in sources])
        decided_SG = torch.stack([~s.lane.masked[begin:] for s in sources])
        p_SG = target.likely.of(tokens_SG).masked_fill(~decided_SG, 0.0)
        p_G, source_G = p_SG.max(dim=0)
        scanned_G = torch.zeros_like(p_G, dtype=torch.bool)
        for s in sources:
            scanned_G[s.start - begin : s.stop - begin] = True
        taken_G = scanned_G & target.lane.masked[begin:] & (p_G > self.settings.tau_merge)
        where = taken_G.nonzero()[:, 0]
        target.lane.fill(where + begin, tokens_SG[source_G[where], where], log_probability(p_G[where]))
        target.num_merged += len(where)
        return len(where)

    def _sync(self) -> None:
        """Overwrite branches that are too far behind the leader with its tokens and cache (Alg. 2 lines 27 to 35)."""
        leader = max(self.branches, key=lambda b: (b.num_decoded, -b.index))
        for branch in self._running():
            gain = leader.num_decoded - branch.num_decoded
            if branch is leader or gain <= self.settings.tau_sync:
                continue
            branch.lane = leader.lane.copy()
            branch.align()
            branch.num_decoded = leader.num_decoded
            branch.num_copied += gain
            self._copies.append((leader.index, branch.index))

    def _running(self) -> list[Branch]:
        return [b for b in self.branches if not b.done]

    def _taking_part(self) -> list[Branch]:
        match self._phase:
            case Phase.INIT:
                return self.branches[:1]
            case Phase.BLOCK:
                return [b for b in self._running() if len(b.open)]
            case Phase.REFRESH:
                return self._running()

    def _range(self, branch: Branch) -> tuple[int, int]:
        """Positions the branch's forward computes; a shifted model's window begins one earlier, where its row is."""
        if self._phase is Phase.BLOCK:
            return branch.start - self._shift, branch.stop
        return 0, self.length

    def _wanted(self) -> Tensor:
        """Positions masked in any branch (L,): nothing else can still be decoded, merged, or unmasked by a sync."""
        return torch.stack([b.lane.masked for b in self.branches]).any(0)

    def _shown(self, branch: Branch, wanted: Tensor) -> Tensor:
        """Positions whose predictions this forward gives the branch: masks, and EOS tokens that may end it."""
        eos = torch.isin(branch.lane.tokens, torch.tensor(self._eos, dtype=torch.int64))
        shown = wanted | eos
        shown[: self.prompt_length] = False
        if self._phase is Phase.BLOCK:
            shown[: branch.start] = False
            shown[branch.stop :] = False
        return shown.nonzero()[:, 0]

    def _useful_copies(self) -> list[tuple[int, int]]:
        """Syncs' cache copies, less those that nothing would read: a lane done, or computed anew as a whole."""
        fresh = {b.index for b in self._taking_part()} if self._phase is Phase.REFRESH else set()
        running = {b.index for b in self._running()}
        return [(s, t) for s, t in self._copies if t in running and t not in fresh]

    def _decided(self, branch: Branch) -> slice:
        return branch.lane.decided(self.prompt_length, self._eos)

    def _difference(self, before: list[Lane]) -> CanvasUpdate:
        accepted: dict[tuple[int, int], int] = {}
        edited: dict[tuple[int, int], int] = {}
        mask_ratio: dict[tuple[int, int], float] = {}
        for branch, old in zip(self.branches, before, strict=True):
            new = branch.lane
            for counts, where in (
                (accepted, old.masked & ~new.masked),
                (edited, ~old.masked & ((new.tokens != old.tokens) | new.masked)),
            ):
                blocks = (where.nonzero()[:, 0] - self.prompt_length) // branch.block_length
                for block, count in zip(*blocks.unique(return_counts=True), strict=True):
                    counts[branch.index, int(block)] = int(count)
            for lane, block in [key for key in accepted if key[0] == branch.index]:
                start = self.prompt_length + block * branch.block_length
                seen = old.masked[start : start + branch.block_length]
                mask_ratio[lane, block] = float(seen.float().mean())
        return CanvasUpdate(accepted, mask_ratio, edited)


def compatible(one: Lane, other: Lane) -> bool:
    """Whether two lanes hold the same token wherever both are decided."""
    both = ~one.masked & ~other.masked
    return bool((one.tokens == other.tokens)[both].all())


def distinct_lengths(settings: Branches, max_tokens: int) -> list[int]:
    """The block lengths that differ on this canvas: all that fit it, and one that covers it whole."""
    lengths = settings.block_lengths
    return [n for i, n in enumerate(lengths) if i == 0 or lengths[i - 1] < max_tokens]
