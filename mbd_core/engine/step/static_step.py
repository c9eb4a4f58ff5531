"""The static step: every slot of the batch rows in use, resident or not (Alg. 5), in shapes that repeat.

`decode.decode_step` is the same step of packed rows. Here the work on the Block Buffer is two functions of tensors
alone, one before and one after the forward. `torch.compile` makes few kernels of each, with the bits of the eager
functions. A step is compiled where it is captured as a CUDA graph (`graphs.py`), and nowhere else: a step that no
capture foresaw must not wait for a compiler.

Shape legend: R batch rows, N slots, A positions with logits, D hidden, X elements of a report.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mbd_core.decoding.blocks.acceptance import Prediction
from mbd_core.decoding.blocks.block_buffer import BlockBuffer
from mbd_core.decoding.blocks.work import StepWork
from mbd_core.engine.step.batch import Batch, pack
from mbd_core.engine.step.decode import StepState
from mbd_core.engine.step.kinds import StepKind
from mbd_core.engine.step.report import StepView, pack_report, view_of, with_tops
from mbd_core.engine.step.rows import SlotLayout, StepRows, static_rows


def static_step(state: StepState, kind: StepKind, *, num_pages: int, compiled: bool = False) -> Tensor:
    """Runs one static step without a graph. Returns its report (X,). No batch row has more than `num_pages` pages."""
    runner, work = state.runner, kind.work
    prepare = _compiled(_before_forward) if compiled else _before_forward
    finish = _compiled(_after_forward) if compiled else _after_forward
    buffer = state.buffer.head(kind.num_rows)
    tables_RP = state.tables_RP[: kind.num_rows, :num_pages]
    adapters_R = None if state.adapters_R is None or not work.adapts else state.adapters_R[: kind.num_rows]
    layout = SlotLayout(shift=runner.model.config.shift_logits, softens=work.softens)
    view, rows, batch = prepare(
        buffer, tables_RP, adapters_R, layout, kind, page_size=state.page_size, apart=state.batch_invariant
    )
    hidden_AD = runner.forward(batch)
    prediction = state.predict(rows, buffer, state.logits_of(hidden_AD, batch, work), work)
    num_blocks_R, report_X = finish(buffer, replace(prediction, tops_A2K=None), view, work)
    runner.remember_committed(rows.slot_end_RN, num_blocks_R)
    return with_tops(report_X, prediction.tops_A2K, rows.at_A, buffer)


def _before_forward(
    buffer: BlockBuffer,
    tables_RP: Tensor,
    adapters_R: Tensor | None,
    layout: SlotLayout,
    kind: StepKind,
    *,
    page_size: int,
    apart: bool,
) -> tuple[StepView, StepRows, Batch]:
    buffer.activate()
    view = view_of(buffer)
    rows = static_rows(
        buffer, tables_RP, layout, num_slots=kind.num_slots, num_asked=kind.num_asked, adapters_R=adapters_R
    )
    return view, rows, pack(rows.groups, page_size=page_size, batch_invariant=apart)


def _after_forward(
    buffer: BlockBuffer, prediction: Prediction, view: StepView, work: StepWork
) -> tuple[Tensor, Tensor]:
    commit = buffer.commit(prediction, work)
    return commit.num_blocks_R, pack_report(view, commit, buffer)


_MOST_COMPILED = 64
"""The most forms of a half that are compiled: one for each set of work, and for one, two or more batch rows."""


@cache
def _compiled(half: Callable[..., Any]) -> Callable[..., Any]:
    """A half of the step, compiled at its first call of a form. Raises if it cannot be compiled: it never runs
    eagerly."""
    run = torch.compile(half, fullgraph=True)

    def run_compiled(*args: Any, **options: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED):
            return run(*args, **options)

    return run_compiled
