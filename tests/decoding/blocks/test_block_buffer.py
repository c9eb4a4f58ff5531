"""The Block Buffer's tensors against the literal algorithms, for random confidences, thresholds and shapes."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mbd_core.decoding.blocks.acceptance import Prediction
from mbd_core.decoding.blocks.block_buffer import BlockBuffer
from mbd_core.decoding.blocks.config import T2T, DecodingConfig, EntropyBound, Soft
from mbd_core.decoding.blocks.literal_algorithms import (
    BlockTokens,
    Predictions,
    Weights,
    block_buffer_multibd,
    naive_multibd,
)
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.blocks.work import ALL_WORK, WORK_NAMES, StepWork, work_of

MASK, EOS, VOCAB = 0, 1, 12


def oracle(
    seed: int, prefix: list[int], blocks: list[BlockTokens], weights: list[Weights], by_entropy: bool
) -> list[Predictions]:
    """A model made of a hash: a block's predictions depend on the prefix and on the blocks up to itself. Often it says
    a token again, else revision would never end."""
    out = []
    for i in range(len(blocks)):
        key = repr((seed, prefix, blocks[: i + 1], weights[: i + 1])).encode()
        rng = random.Random(hashlib.sha256(key).digest())
        slot = []
        for token in blocks[i]:
            again = token if token and rng.random() < 0.8 else rng.randrange(1, VOCAB)
            slot.append((again, rng.choice((0.1, 0.5, 0.9, rng.random()))))
        rounded = [(t, float(torch.tensor(c, dtype=torch.float64).float())) for t, c in slot]
        # an entropy that falls with the confidence, in eighths: sums of these are exact in any order
        out.append([(t, c, -round(8 - 8 * c) / 8 if by_entropy else c) for t, c in rounded])
    return out


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, DecodingConfig, int, bool]:
    size = draw(st.sampled_from([1, 2, 4, 5]))
    kind = draw(st.sampled_from(["m2t", "t2t", "soft", "entropy"]))
    revision: dict[str, Any] = {
        "m2t": {
            "tokens_per_step": draw(st.integers(1, size)),
            "fallback": draw(st.sampled_from(["confidence", "leftmost"])),
        },
        "t2t": {"t2t": T2T(tau=draw(st.sampled_from([0.0, 0.4, 0.8])), max_edits=draw(st.integers(1, 4)))},
        "soft": {"soft": Soft(stop_confidence=draw(st.sampled_from([0.1, 0.5, 0.9])))},
        "entropy": {
            "entropy": EntropyBound(
                gamma=draw(st.sampled_from([0.0, 0.125, 0.5, 1.5])), rule=draw(st.sampled_from(["paper", "jetengine"]))
            ),
            "t2t": draw(st.sampled_from([None, T2T(tau=0.4, max_edits=2)])),
        },
    }[kind]
    if kind in ("t2t", "soft"):
        revision["tau_stable"] = draw(st.sampled_from([None, 0.0, 0.5, 0.9]))
    config = DecodingConfig(
        block_size=size,
        buffer_size=draw(st.integers(1, 4)),
        sub_block=draw(st.sampled_from([None, *(n for n in (1, 2, 5) if size % n == 0)])),
        carry=draw(st.booleans()) and not {"t2t", "soft"} & {n for n, part in revision.items() if part},
        tau_add=draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])),
        tau_semi=draw(st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])),
        **({} if kind == "entropy" else {"tau_m2t": draw(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]))}),
        **revision,
    )
    # MASK (0) may stand in a prompt: there it is data
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3 * size + 2))
    return prompt, draw(st.integers(1, 5 * size + 3)), config, draw(st.integers(0, 10**6)), draw(st.booleans())


def run_buffer(
    batch: list[tuple[list[int], int, DecodingConfig, int, bool]],
    size: int,
    limits: Iterator[int] | None = None,
    *,
    all_work: bool = False,
) -> list[tuple[list[int], str, int, int]]:
    """Decode a batch with BlockBuffer alone, the oracle in the model's place; `all_work`: its steps do more than its
    rows need."""
    buffer = BlockBuffer(
        num_rows=len(batch),
        num_slots=4,
        block_size=size,
        mask_token_id=MASK,
        eos_token_ids=(EOS,),
        device=torch.device("cpu"),
    )
    cached, emitted, counts, ends = [], [[] for _ in batch], [[0, 0] for _ in batch], [""] * len(batch)
    for row, (prompt, max_tokens, config, _, stops) in enumerate(batch):
        request = Request(
            request_id=str(row), prompt=tuple(prompt), max_tokens=max_tokens, decoding=config, ignore_eos=not stops
        )
        buffer.join(row, request)
        cached.append(prompt[: request.first_block_start(len(prompt))])
    while not all(ends):
        if limits is not None:
            buffer.hold_to(next(limits))
        buffer.activate()
        token = torch.zeros((len(batch), 4, size), dtype=torch.int64)
        confidence, score = torch.zeros((len(batch), 4, size)), torch.zeros((len(batch), 4, size))
        for row, (_, _, config, seed, _) in enumerate(batch):
            if ends[row]:
                continue
            resident = int(buffer.resident_RN[row].sum())
            masked = buffer.masked_RNB[row]
            blocks: list[BlockTokens] = [
                [None if m else t for t, m in zip(ts, ms, strict=True)]
                for ts, ms in zip(buffer.tokens_RNB[row].tolist(), masked.tolist(), strict=True)
            ][:resident]
            counts[row][0] += 1
            counts[row][1] += not bool(buffer.active_RN[row].any())
            weights = buffer.weight_RNB[row, :resident].tolist()
            for n, slot in enumerate(oracle(seed, cached[row], blocks, weights, config.entropy is not None)):
                token[row, n] = torch.tensor([t for t, _, _ in slot])
                confidence[row, n] = torch.tensor([c for _, c, _ in slot])
                score[row, n] = torch.tensor([s for _, _, s in slot])
        works = [work_of(config, Sampling()) for _, _, config, _, _ in batch]
        least = StepWork(**{name: any(getattr(work, name) for work in works) for name in WORK_NAMES})
        done = buffer.commit(Prediction(token, confidence, score), ALL_WORK if all_work else least)
        for row, (prompt, max_tokens, _, _, stops) in enumerate(batch):
            for block in done.tokens_RNB[row, : int(done.num_blocks_R[row])].tolist():
                for t in block:
                    position = len(cached[row])
                    inside = len(prompt) <= position < len(prompt) + max_tokens
                    cached[row].append(t if inside or position < len(prompt) else -1)
                    if inside and not ends[row]:
                        if stops and t == EOS:
                            ends[row] = "stop"
                        else:
                            emitted[row].append(t)
                if not ends[row] and len(cached[row]) >= len(prompt) + max_tokens:
                    ends[row] = "length"
                if ends[row]:
                    buffer.leave(row)
                    break
    return [(e, r, c[0], c[1]) for e, r, c in zip(emitted, ends, counts, strict=True)]


def reference(
    problem: tuple[list[int], int, DecodingConfig, int, bool], *, naive: bool, limits: Iterator[int] | None = None
) -> tuple:
    prompt, max_tokens, config, seed, stops = problem

    def model(prefix: list[int], blocks: list[BlockTokens], weights: list[Weights]) -> list[Predictions]:
        return oracle(seed, prefix, blocks, weights, config.entropy is not None)

    eos = (EOS,) if stops else ()
    if naive:
        run = naive_multibd(prompt, max_tokens, config, model, eos=eos, cap=config.buffer_size)
    else:
        run = block_buffer_multibd(prompt, max_tokens, config, model, eos=eos, limits=limits)
    return run.tokens, run.finish_reason, run.num_forwards, run.num_store_forwards


@settings(max_examples=300, derandomize=True)
@given(problems(), st.booleans())
def test_buffer_follows_algorithm_5(problem, all_work: bool) -> None:
    assert run_buffer([problem], problem[2].block_size, all_work=all_work)[0] == reference(problem, naive=False)


def load(seed: int) -> Iterator[int]:
    """How many blocks a busy engine leaves a row, forward by forward."""
    rng = random.Random(seed)
    while True:
        yield from [rng.randint(1, 4)] * rng.randint(1, 5)


@settings(max_examples=150, derandomize=True)
@given(problems(), st.integers(0, 10**6))
def test_a_row_held_to_fewer_blocks_follows_algorithm_5_held_alike(problem, seed: int) -> None:
    held = run_buffer([problem], problem[2].block_size, load(seed))[0]
    assert held == reference(problem, naive=False, limits=load(seed))
    free = (*problem[:2], replace(problem[2], adaptive=False), *problem[3:])
    assert run_buffer([free], problem[2].block_size, load(seed))[0] == reference(problem, naive=False)


@settings(max_examples=300, derandomize=True)
@given(problems())
def test_algorithm_5_is_algorithm_4_capped_at_buffer_size_and_what_leaves_is_exact(problem) -> None:
    tokens, reason, forwards, stores = found = reference(problem, naive=False)
    assert found == reference(problem, naive=True)
    _, max_tokens, config, _, stops = problem
    assert len(tokens) <= max_tokens and (reason == "stop" or len(tokens) == max_tokens)
    assert not stops or EOS not in tokens
    # every decoding forward of the front block yields something: at most one per token and one store per block
    assert forwards - stores <= max_tokens + 1 or config.buffer_size > 1 or config.revises


@settings(max_examples=60, derandomize=True)
@given(st.lists(problems(), min_size=2, max_size=5))
def test_rows_with_their_own_settings_do_not_touch_each_other(batch) -> None:
    size = batch[0][2].block_size
    batch = [p for p in batch if p[2].block_size == size]
    assert run_buffer(batch, size) == [run_buffer([p], size)[0] for p in batch]
