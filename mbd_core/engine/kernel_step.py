"""The static decode step whose work on the Block Buffer is done by Triton kernels: `step.decode_step`, to the bit.

    open_step: activate, lay out rows | forward, logits, prediction | close_step: accept, slide, report

Shape legend: R rows, T packed tokens, X numbers of a report.
"""

from torch import Tensor

from mbd_core.decoding.acceptance import LEFTMOST, predicted
from mbd_core.decoding.block_buffer import BlockBuffer
from mbd_core.engine.batch import Batch
from mbd_core.engine.step import StepState
from mbd_core.engine.step_kind import StepKind
from mbd_core.ops.buffer_close import close_step
from mbd_core.ops.buffer_open import OpenStep, open_step


def kernel_step(state: StepState, kind: StepKind, tables_RP: Tensor, adapters_R: Tensor | None) -> Tensor:
    """One static step; its report (X,). `tables_RP` and `adapters_R` are those of its batch rows."""
    runner, work = state.runner, kind.work
    buffer = state.buffer.head(kind.num_rows)
    memory, shift = buffer.memory, runner.model.config.shift_logits
    opened = open_step(
        memory,
        tables_RP,
        num_slots=kind.num_slots,
        num_asked=kind.num_asked,
        page_size=state.page_size,
        shift=shift,
    )
    batch = batch_of(opened, buffer, kind, adapters_R)
    hidden_AD = runner.forward(batch)
    values = predicted(
        state.logits_of(hidden_AD, batch, work),
        len(hidden_AD),
        state.shared_vocab,
        chunk=state.logits_chunk,
        draw=buffer.draw(opened.at_A, truncates=work.truncates) if work.draws else None,
        fallback_P=buffer.fallback_at(opened.at_A) if work.scores else None,
    )
    num_blocks_R = close_step(
        memory,
        opened,
        *values,
        num_slots=kind.num_slots,
        leftmost=LEFTMOST,
        revises=work.revises,
        quotas=work.quotas,
    )
    ends_RN = None
    if shift:
        ends_RN = (opened.cu_seqlens_q[1:] - 1).long().view(kind.num_rows, kind.num_slots)
    runner.remember_committed(ends_RN, num_blocks_R)
    return opened.report_X


def batch_of(opened: OpenStep, buffer: BlockBuffer, kind: StepKind, adapters_R: Tensor | None) -> Batch:
    """The forward of a step's rows."""
    slots, size = kind.num_slots, buffer.block_size
    adapter_T = None
    if adapters_R is not None:
        adapter_T = adapters_R.repeat_interleave(slots * size, output_size=len(opened.tokens_T))
    return Batch(
        input_ids_T=opened.tokens_T,
        positions_T=opened.positions_T,
        cu_seqlens_q=opened.cu_seqlens_q,
        kv_lens_K=opened.kv_lens_K,
        pages_KP=opened.pages_KP,
        write_loc_T=opened.write_loc_T,
        logits_at_A=opened.logits_at_A,
        weight_T=buffer.weight_RNB[:, :slots].flatten() if kind.work.softens else None,
        max_q=size,
        adapter_T=adapter_T,
        rows_each=slots,
        live_T=opened.live_T,
    )
