"""Records the caches of a canvas while it is decoded: BlockBatch's KV diagnostics without storing every cache.

After every forward a cache is reduced to one short vector, its sketch. The distances in the propositions are measured
on the caches themselves at that moment, and only the numbers are stored. This takes the memory of a few lanes.

Shape legend: L positions, Q positions of one query, D numbers of one position, C numbers of a sketch, B branches.
"""

import math
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.canvas.branch import BranchStats
from mbd_core.decoding.canvas.branches import BranchedCanvas
from mbd_core.decoding.canvas.plan import CanvasPlan, Query
from mbd_core.models.decoder import Decoder
from mbd_core.plain_loops import ContiguousCache, forward_canvas
from research.block_batch.bounds import Array, BlockMovement, projected_energy, projected_norm_bound
from research.block_batch.caches import (
    BranchedRun,
    BranchSync,
    CacheEvent,
    CacheEventKind,
    CacheRun,
    dispersion,
    sync_contraction,
)

CHUNK = 8192


class Sketch:
    """A random projection of a whole cache to C numbers that preserves squared distances on average.

    The sketch is the sum over the positions p of s_p * (x_p G) / sqrt(C): x_p are the position's D numbers, G (D, C)
    is one Gaussian matrix for all positions, s_p are C random signs of the position. After a forward only the
    positions that it computed are projected again. The relative standard deviation of a squared distance lies between
    sqrt(2 / C), as for a Gaussian matrix over the whole cache, and sqrt(8 / C), if all positions move the same way.
    The same seed gives the same sketch on every device.
    """

    def __init__(self, model: Decoder, *, length: int, size: int = 256, seed: int = 1729) -> None:
        config, device = model.config, model.lm_head.weight.device
        height = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        begins = range(0, height, CHUNK)
        parts = [
            torch.randn(
                (min(CHUNK, height - begin), size), generator=torch.Generator().manual_seed(seed + 1_000_003 * number)
            )
            for number, begin in enumerate(begins)
        ]
        self._gauss_DC = (torch.cat(parts) / math.sqrt(size)).to(device)
        coin = torch.Generator().manual_seed(seed + 1_000_003 * len(begins))
        self._sign_LC = (2 * torch.randint(2, (length, size), generator=coin) - 1).float().to(device)

    def positions(self, cache: ContiguousCache, lane: int, start: int, stop: int) -> Tensor:
        """The terms (Q, C) of positions [start, stop) in the sketch of a lane."""
        pair = torch.stack((cache.k[:, lane, start:stop], cache.v[:, lane, start:stop]))
        return pair.permute(2, 0, 1, 3, 4).flatten(1).float() @ self._gauss_DC * self._sign_LC[start:stop]


def squared_difference(cache: ContiguousCache, lane: int, other_cache: ContiguousCache, other_lane: int) -> Tensor:
    """The squared distance of two lanes at each position (L,), in float64, computed layer by layer."""
    total = torch.zeros(cache.k.shape[2], dtype=torch.float64, device=cache.k.device)
    for parts, other_parts in ((cache.k, other_cache.k), (cache.v, other_cache.v)):
        for layer in range(len(parts)):
            total += (
                (parts[layer, lane].float() - other_parts[layer, other_lane].float()).double().square().sum((-1, -2))
            )
    return total


class SingleWatch:
    """The `Watch` of one trajectory with a dual cache; `run` gets events, errors (Prop. 2) and updates (Prop. 1).

    After every forward it runs a full forward on the same tokens. After forwards 1, 4, 16, ... it copies the cache;
    once the next forward gives the tokens of the next step, it updates the copy by each block of the response in turn.
    Prop. 1's sums run over the response's complete blocks only.
    """

    def __init__(
        self, model: Decoder, sketch: Sketch, *, prompt_length: int, max_tokens: int, block_length: int
    ) -> None:
        self._model, self._sketch, self._device = model, sketch, model.lm_head.weight.device
        self._length, self._size = prompt_length + max_tokens, block_length
        self._region = (prompt_length, prompt_length + max_tokens // block_length * block_length)
        self._tokens = torch.zeros(self._length, dtype=torch.int64)
        self._fresh = ContiguousCache(model, num_lanes=1, length=self._length)
        self._copy: ContiguousCache | None = None
        self._part_LC = torch.empty(0)
        self.run = CacheRun()

    def __call__(self, plan: CanvasPlan, cache: ContiguousCache) -> None:
        (query,) = plan.queries
        step, is_full = len(self.run.events), query.stop - query.start == self._length
        part = self._sketch.positions(cache, 0, query.start, query.stop)
        if is_full:
            self._part_LC = part
        self._part_LC[query.start : query.stop] = part
        self._tokens[query.start : query.stop] = query.tokens
        self._forward(self._fresh, 0, self._length)
        error_L = squared_difference(cache, 0, self._fresh, 0)
        norm = math.hypot(_norm(cache.k[:, 0]), _norm(cache.v[:, 0]))
        self.run.events.append(
            CacheEvent(
                branch=self._size,
                step=step,
                kind="initial" if step == 0 else "refresh" if is_full else "block",
                sketch=_total(self._part_LC),
                error=float(error_L.sum().sqrt()),
                norm=norm,
            )
        )
        if self._copy is not None:
            self._probe(self._copy)
            self._copy = None
        if round(math.log(step + 1, 4), 9).is_integer():
            self._copy = ContiguousCache(self._model, num_lanes=1, length=self._length)
            self._copy.k.copy_(cache.k)
            self._copy.v.copy_(cache.v)

    def _probe(self, cache: ContiguousCache) -> None:
        """Measure Prop. 1 from `cache`, the current tokens, and `_fresh`, the cache of their full forward."""
        start, stop = self._region
        full_L = squared_difference(self._fresh, 0, cache, 0)[start:stop]
        if float(full_L.sum()) == 0:
            return
        work = ContiguousCache(self._model, num_lanes=1, length=self._length)
        movements, residual = [], []
        for begin in range(start, stop, self._size):
            end = begin + self._size
            work.k.copy_(cache.k)
            work.v.copy_(cache.v)
            self._forward(work, begin, end)
            movements.append(float(squared_difference(work, 0, cache, 0).sum().sqrt()))
            # outside its block a block forward changes nothing, and P_B d_full is zero there
            residual.append(float(squared_difference(work, 0, self._fresh, 0)[begin:end].sum().sqrt()))
        norms_L1 = full_L.sqrt().cpu().numpy()[:, None]
        self.run.energies.append(projected_energy(norms_L1, self._size))
        self.run.projections.append(projected_norm_bound(norms_L1, self._size))
        self.run.movements.append(
            BlockMovement(
                share=self._size / (stop - start),
                full=float(full_L.sum().sqrt()),
                moved=float(np.mean(movements)),
                residual=float(np.mean(residual)),
            )
        )

    def _forward(self, cache: ContiguousCache, start: int, stop: int) -> None:
        query = Query(0, start, stop, self._tokens[start:stop], torch.tensor([start]))
        forward_canvas(self._model, cache, [query], self._device)


class BranchWatch:
    """The `Watch` of a BlockBatch run; `run` gets its measurements.

    A synchronisation (Algorithm 2) is recognised by the branches' counts, not by copies: the decoder does not copy to
    a lane that is complete, nor to a lane that the next forward recomputes as a whole. Distances are taken between the
    branches that still have masks.
    """

    def __init__(self, sketch: Sketch, decoder: BranchedCanvas) -> None:
        self._sketch, self._decoder = sketch, decoder
        self._parts: list[Tensor] = []
        self._last_stats = decoder.stats()
        self._running_lanes: list[int] = []
        self._squared_BB = np.zeros((decoder.num_lanes,) * 2)
        self._step = 0
        self.run = BranchedRun()

    def __call__(self, plan: CanvasPlan, cache: ContiguousCache) -> None:
        stats, length = self._decoder.stats(), self._decoder.length
        if self._step == 0:
            part_LC = self._sketch.positions(cache, 0, 0, length)
            self._parts = [part_LC.clone() for _ in stats]
            for lane in range(len(stats)):
                self._add(lane, "initial")
        else:
            self._find_sync(stats)
            for q in plan.queries:
                self._parts[q.lane][q.start : q.stop] = self._sketch.positions(cache, q.lane, q.start, q.stop)
                self._add(q.lane, "refresh" if q.stop - q.start == length else "block")
        room = length - self._decoder.prompt_length
        self._running_lanes = [lane for lane, b in enumerate(stats) if b.num_filled < room]
        if self._step > 0:
            self._measure(cache)
        if len(self._running_lanes) > 1:
            squared = self._squared_BB[np.ix_(self._running_lanes, self._running_lanes)]
            self.run.dispersions.append((self._step, dispersion(squared)))
        self._last_stats = stats
        self._step += 1

    def _find_sync(self, stats: list[BranchStats]) -> None:
        targets = [i for i, b in enumerate(stats) if b.num_copied > self._last_stats[i].num_copied]
        if not targets:
            return
        leader = max((i for i in range(len(stats)) if i not in targets), key=lambda i: (stats[i].num_decoded, -i))
        lanes = sorted({leader, *self._running_lanes})
        squared = self._squared_BB[np.ix_(lanes, lanes)]
        copies = [(lanes.index(leader), lanes.index(target)) for target in targets]
        lengths = [b.block_length for b in stats]
        self.run.syncs.append(
            BranchSync(
                step=self._step,
                leader=lengths[leader],
                overwritten=tuple(lengths[target] for target in targets),
                contraction=sync_contraction(squared, copies),
            )
        )
        for target in targets:
            self._parts[target] = self._parts[leader].clone()
            self._add(target, "sync")

    def _measure(self, cache: ContiguousCache) -> None:
        for i, j in combinations(range(len(self._parts)), 2):
            squared = float(squared_difference(cache, i, cache, j).sum())
            self._squared_BB[i, j] = self._squared_BB[j, i] = squared
            if squared > 0 and i in self._running_lanes and j in self._running_lanes:
                sketch_distance = np.linalg.norm(_total(self._parts[i] - self._parts[j]))
                self.run.ratios.append(float(sketch_distance) / math.sqrt(squared))

    def _add(self, lane: int, kind: CacheEventKind) -> None:
        length = self._last_stats[lane].block_length
        self.run.events.append(CacheEvent(branch=length, step=self._step, kind=kind, sketch=_total(self._parts[lane])))


def _total(part_LC: Tensor) -> Array:
    return np.asarray(part_LC.double().sum(0).cpu().numpy(), dtype=np.float64)


def _norm(values: Tensor) -> float:
    return math.sqrt(sum(float(layer.float().double().square().sum()) for layer in values))
