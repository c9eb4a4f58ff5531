"""The real engine without a model: its steps take a step model's seconds, and blocks fill at a given rate.

Admission, scheduler, pages, seating, ledger and collector are the engine's own. Its tensors lie on torch's meta
device, which has shapes and no memory, so a thousand engines take little. Instead of a forward, it counts the open
positions of each resident block (`counted_blocks.py`).
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch

from benchmarks.capacity.counted_blocks import ACTIVE, FILLER, TO_CACHE, CountedRow, FillRate
from benchmarks.capacity.step_model import Bound, StepModel, Work, prompt_work
from mbd_core.decoding.blocks.request import StepOutput
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.sequence import SequenceState
from mbd_core.engine.step.report import HostCopy, report_width, unpack_report
from mbd_core.engine.step_ahead import LaunchedStep, StepPlan
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig


def weightless(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """A model of this shape on the meta device, for any number of simulated engines."""
    with torch.device("meta"):
        return Decoder(config).to(dtype).eval()


class SimulatedEngine(Engine):
    """An engine whose forwards only count. Its clock moves by their seconds: its pacer sees no other time.

    page_seconds  seconds to copy a page to the host's memory or back, for which steps wait
    seconds       seconds of all collected steps, copies included
    bounds        seconds of all launched steps without copies, by the longest term of each step
    log           the load of each step's forwards, if `keeps`
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        steps: StepModel,
        rate: FillRate,
        page_seconds: float = 0.0,
        seed: int = 0,
        keeps: bool = False,
    ) -> None:
        super().__init__(model, replace(config, graphs=False), clock=lambda: self.seconds)
        self._steps, self._rate, self._rng = steps, rate, random.Random(seed)
        self._page_seconds, self._num_copies = page_seconds, 0
        self._rows: dict[str, CountedRow] = {}
        self._unread_seconds: dict[int, float] = {}
        self.seconds, self.bounds, self.num_steps = 0.0, dict[Bound, float](), 0
        self.log: list[list[Work]] | None = [] if keeps else None

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Count the load of the plan's forwards, and their effect on the buffer."""
        chunks = [prompt_work(c.start, c.stop, block_size=self.block_size) for c in plan.chunks]
        forwards = [sum(chunks[1:], chunks[0])] if chunks else []
        report = None
        if plan.decoding:
            report_X, decoded = self._decode(plan)
            report = HostCopy(torch.from_numpy(report_X))
            if forwards and self.static_shapes:
                forwards = [replace(forwards[0], launched=True), decoded]
            else:
                forwards = [sum(forwards, decoded)]
        elif self.static_shapes:
            forwards = [replace(work, launched=True) for work in forwards]
        step = self._steps.step(forwards)
        self._unread_seconds[plan.number] = step.seconds + self._copy_seconds()
        self.bounds[step.bound] = self.bounds.get(step.bound, 0.0) + step.seconds
        self.num_steps += 1
        if self.log is not None:
            self.log.append(forwards)
        return LaunchedStep(plan=plan, report=report)

    def _copy_seconds(self) -> float:
        """Seconds of copying the pages that went to the host's memory or came back since the last step."""
        host = self.scheduler.pool.host
        if host is None:
            return 0.0
        before, self._num_copies = self._num_copies, host.num_kept + host.num_restored
        return (self._num_copies - before) * self._page_seconds

    def collect(self, step: LaunchedStep) -> list[StepOutput]:
        self.seconds += self._unread_seconds.pop(step.plan.number)
        outputs = super().collect(step)
        for output in outputs:
            if output.output is not None:
                del self._rows[output.request_id]
        return outputs

    def _decode(self, plan: StepPlan) -> tuple[np.ndarray, Work]:
        """The report (X,) of a forward over the rows that decode, and the forward's load."""
        size, num_slots, num_rows = self.block_size, self.buffer.num_slots, plan.kind.num_rows
        report_X = np.zeros(num_rows * report_width(num_slots, size))
        report = unpack_report(report_X, num_slots=num_slots, block_size=size)
        report.storing_only_R[:] = 1  # as in a row without blocks
        num_blocks = num_open = scores = kv_tokens = 0
        for row, sequence in plan.decoding.items():
            name, decoding = sequence.request.request_id, sequence.request.decoding
            if not self.scheduler.is_running(sequence):
                continue
            counted = self._rows.get(name)
            if counted is None:
                counted = self._rows[name] = CountedRow.of(sequence, size)
            counted.activate(decoding, max_blocks=plan.max_blocks)
            blocks, stored = counted.blocks, counted.leading(TO_CACHE)
            if blocks:
                stop = counted.start + len(blocks) * size
                scores += size * sum(counted.start + (n + 1) * size for n in range(len(blocks)))
                kv_tokens += stop
                num_blocks += len(blocks)
            for slot, block in enumerate(blocks):
                report.states_RN[row, slot] = block.state
                report.mask_ratio_RN[row, slot] = 1.0 - block.progress
                if block.state == ACTIVE:
                    num_open += block.open
                    report.storing_only_R[row] = 0
            report.accepted_RN[row, : len(blocks)] = counted.fill(decoding, self._rate, self._rng)
            if stored:
                self._store(report.tokens_RNB[row], sequence, counted.start, stored)
                report.num_blocks_R[row] = stored
                counted.slide(stored)
            report.num_resident_R[row] = len(counted.blocks)
            report.num_asked_R[row] = sum(block.open for block in counted.blocks if block.state == ACTIVE)
        live = num_blocks * size
        if not self._is_static(plan):
            return report_X, Work(
                tokens=live, live_tokens=live, scores=scores, kv_tokens=kv_tokens, logit_tokens=num_open
            )
        tokens = num_rows * plan.kind.num_slots * size
        return report_X, Work(
            tokens=tokens,
            live_tokens=live,
            scores=scores + tokens - live,
            kv_tokens=kv_tokens,
            logit_tokens=tokens if plan.kind.num_asked is None else plan.kind.num_asked,
        )

    def _store(self, tokens_NB: np.ndarray, sequence: SequenceState, start: int, num_blocks: int) -> None:
        """The tokens of the blocks that this forward stores: the prompt's remainder, and filled tokens."""
        tokens_NB[:num_blocks] = FILLER
        known = sequence.tokens[start : start + num_blocks * self.block_size]
        tokens_NB.reshape(-1)[: len(known)] = known
