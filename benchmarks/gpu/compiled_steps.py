"""A spike: may `torch.compile` take the place of the Triton kernels of a step (`mbd_core/ops/buffer`)?

The same torch functions that an eager static step runs are compiled in two halves, before and after the forward. A
step of them must have the bits of the eager step, and cost at most `MOST_COST` times the step by kernels. If it holds
at every row of the section, the kernels are to be deleted; if not, they stay.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.step_timing import StepCase, filled_engine
from mbd_core.decoding.blocks.acceptance import Prediction
from mbd_core.decoding.blocks.block_buffer import BlockBuffer
from mbd_core.decoding.blocks.work import Work
from mbd_core.engine.batch import Batch, pack
from mbd_core.engine.graphs import capture, static_step
from mbd_core.engine.kinds import StepKind
from mbd_core.engine.report import StepView, pack_report, view_of, with_tops
from mbd_core.engine.rows import SlotLayout, StepRows, static_rows
from mbd_core.engine.step import StepState
from mbd_core.models.decoder import Decoder
from mbd_core.ops.machine import best_seconds

Row = dict[str, Any]

MOST_COST = 1.03


def _before_forward(
    buffer: BlockBuffer, tables_RP: Tensor, adapters_R: Tensor | None, layout: SlotLayout, kind: StepKind, page: int
) -> tuple[StepView, StepRows, Batch]:
    buffer.activate()
    view = view_of(buffer)
    rows = static_rows(
        buffer, tables_RP, layout, num_slots=kind.num_slots, num_asked=kind.num_asked, adapters_R=adapters_R
    )
    return view, rows, pack(rows.groups, page_size=page)


def _after_forward(buffer: BlockBuffer, prediction: Prediction, view: StepView, work: Work) -> tuple[Tensor, Tensor]:
    commit = buffer.commit(prediction, work)
    return commit.num_blocks_R, pack_report(view, commit, buffer)


@cache
def _compiled(half: Callable[..., Any]) -> Callable[..., Any]:
    """A half of the step, compiled at its first call: the compiler's import takes packages that a day may lack."""
    return torch.compile(half, fullgraph=True)


def compiled_step(state: StepState, kind: StepKind, *, num_pages: int) -> Tensor:
    """`graphs.static_step` with both halves compiled; its report (X,). The first call of a kind compiles."""
    runner, work = state.runner, kind.work
    buffer = state.buffer.head(kind.num_rows)
    tables_RP = state.tables_RP[: kind.num_rows, :num_pages]
    adapters_R = None if state.adapters_R is None or not work.adapts else state.adapters_R[: kind.num_rows]
    layout = SlotLayout(shift=runner.model.config.shift_logits, softens=work.softens)
    view, rows, batch = _compiled(_before_forward)(buffer, tables_RP, adapters_R, layout, kind, state.page_size)
    hidden_AD = runner.forward(batch)
    prediction = state.predict(rows, buffer, state.logits_of(hidden_AD, batch, work), work)
    num_blocks_R, report_X = _compiled(_after_forward)(buffer, replace(prediction, tops_A2K=None), view, work)
    runner.remember_committed(rows.slot_end_RN, num_blocks_R)
    return with_tops(report_X, prediction.tops_A2K, rows.at_A, buffer)


WORKS = {"greedy": Work(), "T2T": Work(revises=True), "DMax": Work(revises=True, softens=True)}


@torch.inference_mode()
def compiled_rows(model: Decoder, shape: str, case: StepCase) -> Iterator[Row]:
    """A row a kind of work: milliseconds of a step by kernels, compiled and eager, each as a graph where a GPU is; and
    their ratio."""
    torch.compiler.reset()  # a half may be compiled for eight kinds of steps alone
    engine = filled_engine(model, replace(case, static=True, graphs=False))
    state, buffer = engine._state, engine.buffer
    for _ in range(2):
        engine.step()
    engine.land()
    on_gpu, num_pages = buffer.tokens_RNB.is_cuda, state.tables_RP.shape[1]
    for name, work in WORKS.items():
        kind = StepKind(num_rows=case.rows, num_slots=case.buffer_size, num_asked=None, work=work)
        buffer_before, last_before = buffer.save_all(), state.runner.last_RD.clone()

        def restore(saved: list[Tensor] = buffer_before, last_RD: Tensor = last_before) -> None:
            buffer.restore_all(saved)
            state.runner.last_RD.copy_(last_RD)

        forms = {
            "compiled": lambda kind=kind: compiled_step(state, kind, num_pages=num_pages),
            "eager": lambda kind=kind: static_step(replace(state, kernels=False), kind, num_pages=num_pages),
        }
        if state.kernels:
            forms["kernels"] = lambda kind=kind: static_step(state, kind, num_pages=num_pages)
        results, milliseconds = {}, {}
        for form, run in forms.items():
            results[form] = [run().clone(), *buffer.save_all()]
            restore()
            timed: Callable[[], object] = run
            if on_gpu:
                graph, _ = capture(run, device=buffer.tokens_RNB.device, restore=restore, warm_up=1)
                timed = graph.replay
            milliseconds[form] = best_seconds(timed, buffer.tokens_RNB.device, 5, calls=case.steps) * 1e3
            restore()
        has_bits = all(torch.equal(a, b) for a, b in zip(results["compiled"], results["eager"], strict=True))
        cost = milliseconds["compiled"] / milliseconds["kernels"] if "kernels" in milliseconds else None
        yield {
            "model": shape,
            "rows": case.rows,
            "buffer_size": case.buffer_size,
            "work": name,
            **{f"{form}_ms": value for form, value in milliseconds.items()},
            "compiled_over_kernels": cost,
            "equal_bits": has_bits,
        }
    engine.close()


def kernels_stay(rows: Iterable[Row]) -> str | None:
    """Why the kernels stay, by the rows of `compiled_rows`; `None` where every row lets them go."""
    losing = [
        f"{row['model']}, {row['rows']} x {row['buffer_size']}, {row['work']}: compiled / kernels "
        f"{row['compiled_over_kernels']}, equal bits {row['equal_bits']}"
        for row in rows
        if not row["equal_bits"] or (row["compiled_over_kernels"] or 0.0) > MOST_COST
    ]
    return "; ".join(losing) or None
