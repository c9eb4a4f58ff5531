"""A static step by kernels is the step in torch's operations, to the bit, the kernels being interpreted.

Both run side by side for many steps, over sequences that grow, slide, end and are replaced, for every kind of work.
"""

import pytest
from triton_interpreter import run_interpreted

STEPS = """
import random
from dataclasses import replace
import torch
from stub_steps import MASK, VOCAB, StubRunner
from mbd_core.decoding.blocks.adjustments import Adjustments
from mbd_core.decoding.blocks.block_buffer import BlockBuffer
from mbd_core.decoding.blocks.config import T2T, DecodingConfig, EntropyBound, Soft
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.graphs import static_step
from mbd_core.engine.step import StepState
from mbd_core.decoding.blocks.work import ALL_WORK, Work, work_of
from mbd_core.engine.kinds import StepKind

def groups(size, slots, shift):
    plain = DecodingConfig(block_size=size, buffer_size=slots, tau_m2t=0.5, tau_add=0.3, tau_semi=0.4)
    t2t = replace(plain, t2t=T2T(tau=0.4, max_edits=2), tau_stable=0.1)
    soft = replace(plain, soft=Soft(stop_confidence=0.6))
    several = replace(plain, tokens_per_step=3, tau_m2t=0.7)
    leftmost = replace(several, fallback="leftmost")
    bound = DecodingConfig(block_size=size, buffer_size=slots, tau_semi=0.4, entropy=EntropyBound(gamma=4.0))
    strict = replace(bound, entropy=EntropyBound(gamma=6.0, rule="jetengine"))
    part = next(n for n in (2, size) if size % n == 0)
    parts = replace(plain, sub_block=part)
    if shift:
        carry = replace(parts, carry=True)
        soft, bound = replace(soft, sub_block=part), replace(bound, carry=True)
        plain, strict = carry, replace(strict, sub_block=part, carry=True)
    short = [[plain, replace(plain, buffer_size=1)], [soft, t2t, leftmost, bound, parts]]
    return [*short, [bound, strict], [leftmost, several, plain], [t2t, plain], [soft, t2t, several]] if LONG else short

def compare(size, slots, num_slots, methods, *, asked, shift, all_work):
    rng, rows = random.Random(0), 3 if LONG else 2
    states = []
    for kernels in (False, True):
        buffer = BlockBuffer(
            num_rows=4, num_slots=slots, block_size=size, mask_token_id=MASK, eos_token_ids=(3, 5),
            device=torch.device("cpu"),
            adjustments=Adjustments(4, length=300, vocab_size=VOCAB, num_eos=2, device=torch.device("cpu")),
        )
        tables = torch.arange(4 * 40).view(4, 40) % 37
        states.append(StepState(
            runner=StubRunner(shift=shift, num_rows=rows), buffer=buffer, tables_RP=tables, vocab=Vocab(MASK, VOCAB),
            shared_vocab=Vocab(MASK, VOCAB), page_size=5, batch_invariant=False, logits_chunk=1000, kernels=kernels,
        ))
    changed = dict(min_p=0.01, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias=((4, 1.0),))
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=3, **changed) if all_work else Sampling()
    work = replace(ALL_WORK, adapts=False) if all_work else Work()
    if not all_work:
        of = [work_of(each, sampling) for each in methods]
        work = Work(*(any(values) for values in zip(*(vars(w).values() for w in of))))
    kind = StepKind(
        num_rows=rows, num_slots=num_slots, num_asked=rows * num_slots * size if asked else None,
        work=work,
    )
    slid = edited = 0
    for step in range(12 if LONG else 6):
        for row in range(rows):
            if not states[0].buffer.resident_RN[row].any() and rng.random() < 0.8:
                request = Request(
                    request_id=str(step), prompt=tuple(rng.randrange(3) for _ in range(rng.randint(1, 30))),
                    max_tokens=rng.randint(3, 4 * size), decoding=methods[(row + step) % len(methods)],
                    sampling=sampling,
                    ignore_eos=rng.random() < 0.5, min_tokens=2 if all_work else 0,
                )
                for state in states:
                    state.buffer.join(row, request)
        wanted, found = (static_step(state, kind, num_pages=33) for state in states)
        plain, kernel = (state.buffer for state in states)
        names = [n for n, t in vars(plain).items() if isinstance(t, torch.Tensor)]
        for name in names:
            assert torch.equal(getattr(plain, name), getattr(kernel, name)), (step, name)
        for mine, theirs in zip(kernel.settings.columns, plain.settings.columns, strict=True):
            assert torch.equal(mine, theirs), step
        assert torch.equal(found, wanted), step
        for mine, theirs in zip(kernel.adjustments.state, plain.adjustments.state, strict=True):
            assert torch.equal(mine, theirs), step
        batch, theirs = (state.runner.batch for state in states[::-1])
        for name in ("input_ids_T", "positions_T", "write_loc_T", "live_T", "weight_T"):
            mine, other = getattr(batch, name), getattr(theirs, name)
            assert (mine is None) == (other is None) and (mine is None or torch.equal(mine, other)), name
        for name in ("cu_seqlens_q", "kv_lens_K", "pages_KP"):
            mine, other = getattr(batch, name), getattr(theirs, name)
            assert mine.dtype == torch.int32 and torch.equal(mine, other.int()), name
        assert torch.equal(states[0].runner.last_RD, states[1].runner.last_RD)
        slid += int(wanted[:rows].sum())
        edited += int(wanted[4 * rows + 3 * rows * slots :][: rows * slots].sum())
        for row in range(rows):
            done = states[0].buffer.settings.first_block_R[row] * size > 40
            if done and states[0].buffer.resident_RN[row].any():
                for state in states:
                    state.buffer.leave(row)
    assert slid > 0, "no block left the buffer"
    return edited

size, slots, num_slots, asked, shift, all_work = CASE
edited = sum(
    compare(size, slots, num_slots, methods, asked=asked, shift=shift, all_work=all_work)
    for methods in groups(size, num_slots, shift)
)
assert edited > 0, "no token was edited"
print("all held")
"""

CASES = {
    "all slots": "4, 2, 2, False, False, False",
    "listed positions, an odd size": "5, 2, 2, True, False, False",
    "fewer slots": "4, 3, 2, False, False, False",
    "shifted logits, all work": "4, 3, 2, True, True, True",
}


def run(case: str, *, long: bool) -> None:
    run_interpreted(STEPS.replace("CASE", CASES[case]).replace("LONG", str(long)), seconds=1200 if long else 120)


@pytest.mark.parametrize("case", ["listed positions, an odd size", "shifted logits, all work"])
def test_a_step_by_kernels_is_the_step(case: str) -> None:
    run(case, long=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_many_steps_by_kernels_are_the_steps(case: str) -> None:
    run(case, long=True)
