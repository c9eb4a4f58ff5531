"""The device's part of a decode step as one repeatable call: forward, acceptance, slot transitions, report.

It reads and writes buffers that are never reallocated, and looks at nothing on the host; so on a GPU it is captured
once per `ProgramKind` as a CUDA graph and replayed. Elsewhere the same call is made again.

Shape legend: R rows (sequences), N slots, B block size, X numbers of a report.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mbd_core.decoding.acceptance import predict
from mbd_core.decoding.block_buffer import BlockBuffer
from mbd_core.decoding.sampling import Vocab
from mbd_core.engine.batch import pack
from mbd_core.engine.rows import all_slots
from mbd_core.engine.runner import EagerRunner
from mbd_core.engine.step_report import before, pack_report


@dataclass(frozen=True)
class ProgramKind:
    """What a step's program depends on beside its buffers: the number of rows, at how many positions there are logits
    (`None`: all), and which work some row asks for."""

    num_rows: int
    num_asked: int | None
    draws: bool
    scores: bool
    softens: bool
    revises: bool
    quotas: bool


class DecodePrograms:
    """Programs for the first `num_rows` rows of a buffer (powers of two, so that few are made), made when needed."""

    def __init__(
        self,
        runner: EagerRunner,
        buffer: BlockBuffer,
        tables_RP: Tensor,
        vocab: Vocab,
        *,
        page_size: int,
        batch_invariant: bool,
        graphs: bool | None,
        logits_chunk: int,
    ) -> None:
        self._runner, self._buffer, self._tables_RP, self._vocab = runner, buffer, tables_RP, vocab
        self._page_size, self._batch_invariant, self._logits_chunk = page_size, batch_invariant, logits_chunk
        self.records = graphs is not False and self._obstacle is None
        if graphs and self._obstacle is not None:
            raise ValueError(f"graphs=True cannot be honoured: {self._obstacle}")
        self._recorded: dict[ProgramKind, Recording] = {}
        # all graphs share their temporary memory: one runs at a time, and a report is read before the next replay
        self._pool = torch.cuda.graph_pool_handle() if self.records else None

    @property
    def _obstacle(self) -> str | None:
        """Why a step cannot be recorded."""
        if self._tables_RP.device.type != "cuda":
            return f"CUDA graphs need a GPU, this is {self._tables_RP.device.type}"
        if self._batch_invariant:
            return "with batch_invariant=True rows' lengths are read on the host"
        if self._runner.attention.name == "reference":
            return "the reference attention reads rows' lengths on the host"
        return None

    def run(self, kind: ProgramKind, *, num_pages: int) -> Tensor:
        """One step; its report (X,), on the device, good until the next. No row has more than `num_pages` pages."""
        if not self.records:
            return self._program(kind, num_pages)()
        self.record(kind)
        return self._recorded[kind].replay()

    def record(self, kind: ProgramKind) -> None:
        """Capture a step as a graph, if it is not yet."""
        if kind not in self._recorded:
            program = self._program(kind, self._tables_RP.shape[1])
            self._recorded[kind] = Recording(program, self._buffer, self._runner, self._pool)

    def kinds(self, num_slots: int, work: Mapping[str, bool]) -> list[ProgramKind]:
        """The kinds of all steps whose rows have up to `num_slots` slots and ask for `work`."""
        found = []
        for rows in sorted({self.bucket(rows) for rows in range(1, len(self._tables_RP) + 1)}):
            most = rows * num_slots * self._buffer.block_size
            asked = {self.portion(rows, 1 + at) for at in range(0, most, self._quarter(rows))}
            found += [ProgramKind(num_rows=rows, num_asked=n, **work) for n in asked]
        return found

    def bucket(self, num_rows: int) -> int:
        """The least power of two that holds `num_rows` rows, at most all."""
        return min(1 << (num_rows - 1).bit_length(), len(self._tables_RP))

    def portion(self, num_rows: int, num_asked: int) -> int | None:
        """The least quarter of the buffer's positions that holds `num_asked`; `None` for all of them."""
        quarters = max(1, -(-num_asked // self._quarter(num_rows)))
        return None if quarters > 3 or self._batch_invariant else quarters * self._quarter(num_rows)

    def _quarter(self, num_rows: int) -> int:
        return -(-num_rows * self._buffer.num_slots * self._buffer.block_size // 4)

    def _program(self, kind: ProgramKind, num_pages: int) -> Callable[[], Tensor]:
        buffer = self._buffer.head(kind.num_rows)
        tables_RP = self._tables_RP[: kind.num_rows, :num_pages]
        shift = self._runner.model.config.shift_logits

        def step() -> Tensor:
            buffer.activate()
            seen = before(buffer)
            slots = all_slots(buffer, tables_RP, shift=shift, softens=kind.softens, num_asked=kind.num_asked)
            batch = pack(
                [slots.rows],
                page_size=self._page_size,
                batch_invariant=self._batch_invariant,
            )
            hidden_AD = self._runner.forward(batch)
            prediction = predict(
                self._runner.blockwise_logits(hidden_AD, batch, block_size=buffer.block_size),
                len(hidden_AD),
                slots.at_A,
                self._vocab,
                shape=buffer.masked_RNB.shape,
                chunk=self._logits_chunk,
                draw=buffer.draw(slots.at_A) if kind.draws else None,
                fallback_P=buffer.fallback_at(slots.at_A) if kind.scores else None,
            )
            commit = buffer.commit(prediction, revises=kind.revises, quotas=kind.quotas)
            if shift:
                self._runner.remember_committed(slots.slot_end_RN, commit.num_blocks_R)
            return pack_report(seen, commit, buffer)

        return step


class Recording:
    """A step captured as a CUDA graph. Warming up runs it, so what it moved on is put back afterwards; the keys it
    wrote are those that the step itself will write."""

    def __init__(self, step: Callable[[], Tensor], buffer: BlockBuffer, runner: EagerRunner, pool: Any) -> None:
        saved, remembered = buffer.save_all(), runner.last_RD.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
                buffer.restore_all(saved)
                runner.last_RD.copy_(remembered)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local": what other threads ask of the device meanwhile does not concern this capture
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._report_X = step()
        self._runner, self._batch = runner, runner.last_batch

    def replay(self) -> Tensor:
        """Run the captured step; its report, overwritten by the next replay."""
        self._graph.replay()
        self._runner.last_batch = self._batch
        return self._report_X
