"""Traces without a model: the Block Buffer decodes requests by confidences drawn from a seed."""

import torch

from mbd_core.decoding.blocks.acceptance import Prediction
from mbd_core.decoding.blocks.block_buffer import BlockBuffer
from mbd_core.decoding.blocks.config import T2T, DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.trace.recorder import TraceRecorder

EOS, VOCAB, SIZE = 1, 40, 8


def simulate(
    buffer_size: int,
    *,
    prompts: tuple[int, ...] = (11,),
    max_tokens: int = 45,
    seed: int = 0,
    t2t: T2T | None = None,
    eos_at: int | None = None,
    detail: bool = True,
    recorder: TraceRecorder | None = None,
) -> TraceRecorder:
    """Decode requests "r0", "r1", ... with prompts of these lengths; `eos_at` is the position that becomes EOS."""
    trace = TraceRecorder(detail) if recorder is None else recorder
    config = DecodingConfig(block_size=SIZE, buffer_size=buffer_size, tau_add=0.2, tau_semi=0.9, tau_m2t=0.8, t2t=t2t)
    buffer = BlockBuffer(
        num_rows=len(prompts),
        num_slots=buffer_size,
        block_size=SIZE,
        mask_token_id=0,
        eos_token_ids=(EOS,),
        device=torch.device("cpu"),
    )
    ids = [f"r{row}" for row in range(len(prompts))]
    for row, length in enumerate(prompts):
        prompt = tuple(range(2, 2 + length))
        request = Request(request_id=ids[row], prompt=prompt, max_tokens=max_tokens, decoding=config)
        buffer.join(row, request)
    generator, running, step = torch.Generator().manual_seed(seed), list(range(len(prompts))), 0
    shape = (len(prompts), buffer_size, SIZE)
    while running:
        buffer.activate()
        states, ratios = buffer.state_RN.clone(), 1.0 - buffer.progress_RN
        first, end = buffer.settings.first_block_R.clone(), buffer.settings.end_R.clone()
        drawn = torch.randint(2, VOCAB, shape, generator=generator)
        steady = 2 + buffer.positions_RNB % (VOCAB - 2)
        token = torch.where(torch.rand(shape, generator=generator) < 0.2, drawn, steady)
        if eos_at is not None:
            token[buffer.positions_RNB == eos_at] = EOS
        confidence = torch.rand(shape, generator=generator)
        committed = buffer.commit(Prediction(token, confidence, confidence))
        tokens = committed.tokens_RNB.masked_fill(committed.masked_RNB, -1)
        trace.add(
            step,
            [ids[row] for row in running],
            [int(first[row]) for row in running],
            states[running].numpy(),
            ratios[running].numpy(),
            committed.accepted_RN[running].numpy(),
            committed.edited_RN[running].numpy(),
            tokens[running].numpy() if trace.detail else None,
            committed.confidence_RNB[running].numpy() if trace.detail else None,
        )
        step += 1
        for row in list(running):
            stored = committed.tokens_RNB[row, : int(committed.num_blocks_R[row])].flatten()
            reached = (int(first[row]) + int(committed.num_blocks_R[row])) * SIZE >= int(end[row])
            if reached or bool((stored == EOS).any()):
                buffer.leave(row)
                running.remove(row)
    return trace
