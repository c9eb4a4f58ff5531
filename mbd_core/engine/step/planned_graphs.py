"""Forwards of planned rows as CUDA graphs: token by token, or drafts that are verified.

The sizes of such forwards change from step to step. So a graph has places for a number of rows and tokens, and serves
every forward that fits into them. The other places are padding: tokens in rows of one key in the null page, whose
results nothing reads.

Shape legend: K rows, T packed tokens, A positions asked for, P pages a row, D hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.engine.step.batch import Batch
from mbd_core.engine.step.decode import StepState

Capture = Callable[[Callable[[], Tensor]], tuple[Any, Tensor]]
"""Captures a function as a graph; returns the graph and the result, which each replay overwrites."""


@dataclass(frozen=True, kw_only=True)
class PlannedKind:
    """The sizes of a forward of planned rows.

    longest         tokens of the longest row
    ordered         whether a row may be causal inside
    gaps            whether a row may have hidden keys before its own (`RowLayout.gap_R`)
    adapts          whether a row may have a LoRA adapter
    by_draft_model  whether the engine's draft model computes it
    """

    num_rows: int
    num_tokens: int
    longest: int
    ordered: bool
    gaps: bool
    adapts: bool
    by_draft_model: bool

    @classmethod
    def of(cls, batch: Batch, *, by_draft_model: bool) -> "PlannedKind | None":
        """The least kind of a forward; `None` for a forward that no graph holds."""
        if batch.denoising is not None or batch.weight_T is not None or batch.split is not None:
            return None
        return cls(
            num_rows=len(batch.kv_lens_K),
            num_tokens=len(batch.input_ids_T),
            longest=batch.max_q,
            ordered=batch.causal_K is not None,
            gaps=batch.gap_K is not None,
            adapts=batch.adapter_T is not None,
            by_draft_model=by_draft_model,
        )

    @property
    def size(self) -> tuple[int, ...]:
        """Orders kinds by the work of their forward."""
        return self.num_tokens, self.longest, self.gaps, self.ordered, self.adapts, self.num_rows

    def covers(self, other: "PlannedKind") -> bool:
        """Whether a forward of kind `other` fits into one of this kind."""
        is_larger = all(getattr(self, name) >= value for name, value in vars(other).items())
        return is_larger and self.by_draft_model == other.by_draft_model


def planned_kinds(decoding: DecodingConfig, *, max_rows: int, adapters: bool) -> list[PlannedKind]:
    """The kinds worth a graph if requests decode by `decoding`: for each power of two of requests, a forward in which
    each has its most tokens, and, unless that is one token, a forward of half as many.

    The draft model's rows have no gaps and no adapters.
    """
    layout = decoding.planned
    if layout is None or decoding.renoise is not None:
        return []
    forms = [(False, False)]  # (ordered, gaps)
    if layout.longest > 1:
        forms += [(True, False), *([(True, True)] if layout.gaps else [])]
    numbers = [min(1 << n, max_rows) for n in range((max_rows - 1).bit_length() + 1)]
    has_drafts = decoding.verify is not None and decoding.verify.draft_model
    kinds = []
    for number, share in product(numbers, (1, 2) if layout.longest > 1 else (1,)):
        for ordered, gaps in forms:
            kind = PlannedKind(
                num_rows=number * layout.rows,
                num_tokens=-(-number * layout.longest // share),
                longest=min(layout.in_row or layout.longest, -(-layout.longest // share)),
                ordered=ordered,
                gaps=gaps,
                adapts=False,
                by_draft_model=False,
            )
            kinds += [kind, replace(kind, adapts=True)] if adapters else [kind]
            if has_drafts and not gaps:
                kinds.append(replace(kind, by_draft_model=True))
    return kinds


GraphMemory = dict[tuple[str, bool], Tensor]
"""The large tensors that graphs of planned rows share, by name and whether the draft model runs, flattened. One graph
runs at a time: its replay fills its inputs, and its result is read before the next replay."""


class CapturedForward:
    """A forward of planned rows as a CUDA graph."""

    def __init__(self, state: StepState, kind: PlannedKind, capture: Capture, memory: GraphMemory) -> None:
        runner = state.draft_runner if kind.by_draft_model else state.runner
        assert runner is not None, "admission refuses drafts without a draft model"
        self._runner, self._kind = runner, kind
        tables_RP = state.tables_RP
        new = partial(torch.zeros, dtype=torch.int64, device=tables_RP.device)
        # a forward's rows have a token each at least; padding fills further rows, of at most `longest` tokens each
        num_rows = kind.num_rows + -(-(kind.num_tokens - kind.num_rows) // kind.longest)
        self._ends_K = (1 + torch.arange(num_rows, device=tables_RP.device)) * kind.longest  # of rows of padding alone
        self._batch = Batch(
            input_ids_T=new(kind.num_tokens),
            positions_T=new(kind.num_tokens),
            cu_seqlens_q=F.pad(self._ends_K, (1, 0)).clamp(max=kind.num_tokens).int(),
            kv_lens_K=new(num_rows) + 1,
            pages_KP=self._shared(memory, "pages", tables_RP, num_rows),
            write_loc_T=new(kind.num_tokens),
            logits_at_A=None,
            weight_T=None,
            max_q=kind.longest,
            causal_K=new(num_rows, dtype=torch.bool) if kind.ordered else None,
            gap_K=new(num_rows) if kind.gaps else None,
            adapter_T=new(kind.num_tokens) if kind.adapts else None,
            live_T=new(kind.num_tokens, dtype=torch.bool),
        )
        self._hidden_TD = self._shared(memory, "hidden", runner.last_RD, kind.num_tokens)
        self._graph, _ = capture(lambda: self._hidden_TD.copy_(runner.forward(self._batch)[: kind.num_tokens]))

    def _shared(self, memory: GraphMemory, name: str, like: Tensor, length: int) -> Tensor:
        """`length` lines of the width of `like`, in memory that grows with the largest graph."""
        key, size = (name, self._kind.by_draft_model), length * like.shape[1]
        if key not in memory or len(memory[key]) < size:
            memory[key] = like.new_zeros(size)
        return memory[key][:size].view(length, -1)

    def replay(self, batch: Batch) -> Tensor:
        """The hidden states (A, D) of a forward that fits into the graph."""
        own, num_rows, num_tokens = self._batch, len(batch.kv_lens_K), len(batch.input_ids_T)
        assert own.live_T is not None and batch.logits_at_A is not None
        _put(own.input_ids_T, batch.input_ids_T)
        _put(own.positions_T, batch.positions_T)
        _put(own.write_loc_T, batch.write_loc_T)
        _put(own.kv_lens_K, batch.kv_lens_K, rest=1)
        own.pages_KP.zero_()[:num_rows, : batch.pages_KP.shape[1]] = batch.pages_KP
        own.cu_seqlens_q[: num_rows + 1] = batch.cu_seqlens_q
        padding_ends_K = num_tokens + self._ends_K[: len(self._ends_K) - num_rows]
        own.cu_seqlens_q[num_rows + 1 :] = padding_ends_K.clamp(max=self._kind.num_tokens)
        own.live_T.zero_()[:num_tokens] = True
        for target, values in (
            (own.causal_K, batch.causal_K),
            (own.gap_K, batch.gap_K),
            (own.adapter_T, batch.adapter_T),
        ):
            if target is not None:
                _put(target, target[:0] if values is None else values)
        self._graph.replay()
        self._runner.last_batch = batch
        return self._hidden_TD.index_select(0, batch.logits_at_A)

    def release(self) -> None:
        """Gives back the graph's memory and its communicator."""
        self._graph.reset()


def _put(target: Tensor, values: Tensor, *, rest: int = 0) -> None:
    """Writes the first values of `target`, and `rest` after them."""
    target.fill_(rest)[: len(values)] = values
