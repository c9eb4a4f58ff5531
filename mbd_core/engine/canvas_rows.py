"""The requests of an engine that decode a canvas: their decoders, their lanes' pages, their rows of a forward.

Shape legend: K rows, T packed tokens, P pages a row, A positions asked for, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mbd_core.canvas.canvas_decoder import canvas_decoder
from mbd_core.canvas.plan import CanvasDecoder, CanvasPlan, CanvasUpdate
from mbd_core.decoding.rollout import Rollout
from mbd_core.decoding.sampling import Vocab
from mbd_core.engine.batch import Rows
from mbd_core.engine.kv_cache import PagedKVCache
from mbd_core.engine.sequence import SequenceState
from mbd_core.models.model_config import ModelConfig


@dataclass
class CanvasRun:
    """One running canvas: its decoder and the pages of each lane (lanes, P)."""

    sequence: SequenceState
    decoder: CanvasDecoder
    lanes_LP: Tensor
    plan: CanvasPlan = field(default_factory=lambda: CanvasPlan([], []))

    def rollout(self, start: int, number: int) -> Rollout:
        """Of `number` tokens from `start` on: when they were accepted."""
        part = slice(start, start + number)
        return Rollout(steps=tuple(self.decoder.steps[part]), logprobs=tuple(self.decoder.log_probs[part]))


class CanvasRuns:
    """All canvases that hold a batch row."""

    def __init__(self, config: ModelConfig, cache: PagedKVCache, vocab: Vocab) -> None:
        self._config, self._cache = config, cache
        self._vocab = vocab
        self._runs: dict[int, CanvasRun] = {}

    def join(self, sequence: SequenceState) -> None:
        """Begin a canvas in its sequence's row; after a preemption it begins anew, because its keys are gone."""
        request, config = sequence.request, self._config
        assert request.decoding.canvas is not None
        decoder = canvas_decoder(
            request.prompt,
            request.max_tokens,
            request.decoding.canvas,
            request.sampling,
            eos_token_ids=() if request.ignore_eos else config.eos_token_ids,
            vocab=self._vocab,
            shift=config.shift_logits,
        )
        pages = torch.tensor(sequence.pages, device=self._cache.k.device).view(decoder.num_lanes, -1)
        self._runs[sequence.row] = CanvasRun(sequence, decoder, pages)
        sequence.seated = True

    def leave(self, row: int) -> None:
        self._runs.pop(row, None)

    def rows(self, *, num_before: int, adapters_R: Tensor | None = None) -> Rows | None:
        """The next forward of every canvas, behind `num_before` packed tokens of others; copies between lanes that it
        needs are made at once. `None` without canvases. `adapters_R`: the slot of each batch row's LoRA adapter."""
        if not self._runs:
            return None
        device = self._cache.k.device
        tokens, positions, lengths, kv_lens, pages, at, rows = [], [], [], [], [], [], []
        for run in self._runs.values():
            run.plan = run.decoder.plan()
            for source, target in run.plan.copies:
                self._cache.copy_pages(run.lanes_LP[source], run.lanes_LP[target])
            for q in run.plan.queries:
                tokens.append(q.tokens)
                positions.append(torch.arange(q.start, q.stop))
                lengths.append(q.stop - q.start)
                kv_lens.append(run.decoder.length)
                pages.append(run.lanes_LP[q.lane])
                rows.append(run.sequence.row)
                at.append(q.logits_at - q.start + num_before)
                num_before += lengths[-1]
        width = max(len(p) for p in pages)
        return Rows(
            tokens_T=torch.cat(tokens).to(device),
            positions_T=torch.cat(positions).to(device),
            lengths_K=lengths,
            kv_lens_K=torch.tensor(kv_lens, device=device),
            pages_KP=torch.stack([torch.nn.functional.pad(p, (0, width - len(p))) for p in pages]),
            stored_K=torch.ones(len(lengths), dtype=torch.bool, device=device),
            logits_at_A=torch.cat(at).to(device),
            adapter_K=None if adapters_R is None else adapters_R[torch.tensor(rows, device=device)],
        )

    def update(self, logits_AV: Tensor) -> list[tuple[CanvasRun, CanvasUpdate]]:
        """Hand every canvas its part of the logits of `rows()`; what each made of it."""
        parts = iter(logits_AV.split(self.num_asked))
        return [(run, run.decoder.update([next(parts) for _ in run.plan.queries])) for run in self._runs.values()]

    @property
    def num_asked(self) -> list[int]:
        """Positions asked for in each row of the forward."""
        return [len(q.logits_at) for run in self._runs.values() for q in run.plan.queries]

    @property
    def running(self) -> Sequence[CanvasRun]:
        return list(self._runs.values())
