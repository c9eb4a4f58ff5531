"""MultiTF training sequences: noisy streams of a sample over its one clean stream; short samples packed together.

The paper batches every layout as its own `[x_t; x_0]` (Eq. B.5). Here the n layouts of a sample share its clean
half, `[x_t^1; ...; x_t^n; x_0]`: the same losses and gradients, the clean half computed once
(tests/multitf/states/test_multitf.py). Native D2F has one noisy stream and no clean half (`lay_out_d2f`). Short
samples may share a sequence, one after the other.

Shape legend: S training sequences, L tokens of the longest.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mbd_core.multitf.data.example import IGNORE, Example, answer_labels
from mbd_core.multitf.states.batch import MultiTFBatch, SequenceColumns, check_columns, collate, empty_sequence
from mbd_core.multitf.states.block_warmup import in_blocks
from mbd_core.multitf.states.causal_stream import add_causal_stream, label_clean_stream
from mbd_core.multitf.states.layout import SAMPLE_MEANS, GroupLayout, StateConfig, layout_set
from mbd_core.multitf.states.noise import OF_A_STREAM, SCHEDULES, SLACK, choose_masked
from mbd_core.multitf.states.packing import Together

EPSILON = 1e-6
"""The least divisor of a label's weight (Eq. B.13)."""


@dataclass(frozen=True)
class NoisyStream:
    """One layout's corrupted blocks: `tokens`, `masked` and the sampled `ratio` of each token's block.

    With `rollout`, the model's own predictions replace the masks before it trains on the stream (Alg. 2).
    """

    tokens: list[int]
    masked: list[bool]
    ratio: list[float]
    rollout: bool = False


AnswerStreams = tuple[Example, Sequence[tuple[GroupLayout, NoisyStream]], int]
"""An answer as its own sample, its noisy streams with their layouts, and the streams' first block."""


def choose_layouts(num_blocks: int, config: StateConfig, rng: random.Random) -> list[GroupLayout]:
    """The layouts of one sample: all of `Lambda`, or `num_layouts` of it (teacher forcing repeats its only layout)."""
    layouts = layout_set(
        num_blocks,
        max_group=config.max_group,
        num_random=config.num_random,
        rng=rng,
        kind=config.layouts,
        random_sizes=config.random_sizes,
    )
    if config.num_layouts is None:
        return layouts
    if config.num_layouts <= len(layouts):
        return rng.sample(layouts, config.num_layouts)
    return rng.choices(layouts, k=config.num_layouts)


def corrupt(
    example: Example, layout: GroupLayout, *, start: int, config: StateConfig, mask_token_id: int, rng: random.Random
) -> NoisyStream:
    """Alg. 1 lines 8 to 15 on the blocks from token `start` on; only response tokens are ever masked."""
    size = config.block_size
    schedule = SCHEDULES[config.schedule]
    groups = (layout.num_blocks,) if config.schedule in OF_A_STREAM else layout.sizes
    ratios = [t for group in groups for t in schedule(group, config.bounds, rng)]
    half_life = None if config.half_life_ratio is None else config.half_life_ratio * size
    tokens = list(example.tokens[start:])
    masked = [False] * len(tokens)
    slack = SLACK if config.schedule == "fitted" else 0.0
    for block, ratio in enumerate(ratios):
        low = max(start + block * size, example.prompt_length) - start
        maskable = range(low, min((block + 1) * size, len(tokens)))
        if maskable:
            for i in choose_masked(maskable, ratio, config.rounding, rng, slack=slack, half_life=half_life):
                tokens[i] = mask_token_id
                masked[i] = True
    return NoisyStream(tokens, masked, [t for t in ratios for _ in range(size)][: len(tokens)])


def complement(noisy: NoisyStream, example: Example, *, start: int, mask_token_id: int) -> NoisyStream:
    """The stream that masks exactly the answer's tokens that `noisy` shows (Fast-dLLM v2)."""
    tokens = example.tokens[start:]
    masked = [start + i >= example.prompt_length and not m for i, m in enumerate(noisy.masked)]
    shown = [mask_token_id if m else token for m, token in zip(masked, tokens, strict=True)]
    return NoisyStream(shown, masked, [1.0 - t for t in noisy.ratio])


def build_batch(
    examples: Sequence[Example],
    states: StateConfig,
    *,
    mask_token_id: int,
    rngs: Sequence[random.Random],
    shift: bool = False,
    together: Together | None = None,
) -> MultiTFBatch:
    """Draws layouts and noise for each example, and lays out its noisy streams before the visible part of its clean
    stream, and the causal stream of an AR loss after both.

    Each example has a generator of its own in `rngs`, so its draws do not depend on its neighbours in the batch.
    `shift`: the model's logits at a position predict the next position's token. `together`: the samples that share a
    training sequence, by default none. Raises `ValueError` for an example that cannot be laid out.
    """
    rows = []
    for given, rng in zip(examples, rngs, strict=True):
        example, config = in_blocks(given, states) if states.block_warmup else (given, states)
        for answer in (*example.earlier, example):
            _check_example(answer, config, shift=shift)
        draw = partial(_draw, config=config, mask_token_id=mask_token_id, rng=rng)
        if not config.fills_masks:
            row = empty_sequence()
        else:
            row = (_draw_d2f if config.layouts == "d2f" else _draw_streams)(example, config, draw, rng, shift)
        if config.ar_weight and config.clean != "causal":
            add_causal_stream(row, example, config)
        rows.append(row)
    return collate(rows, together)


def _draw(
    example: Example, layout: GroupLayout, *, start: int, config: StateConfig, mask_token_id: int, rng: random.Random
) -> list[NoisyStream]:
    """A layout's corrupted blocks, and with `config.complementary` their complement."""
    noisy = corrupt(example, layout, start=start, config=config, mask_token_id=mask_token_id, rng=rng)
    if not config.complementary:
        return [noisy]
    return [noisy, complement(noisy, example, start=start, mask_token_id=mask_token_id)]


def _draw_streams(
    example: Example, config: StateConfig, draw: Callable[..., list[NoisyStream]], rng: random.Random, shift: bool
) -> SequenceColumns:
    size = config.block_size
    answers = []
    for answer in (*example.earlier, example):
        first_block = answer.prompt_length // size if config.span == "response" else 0
        layouts = choose_layouts(len(answer.tokens) // size - first_block, config, rng)
        streams_by_layout = [
            (layout, noisy) for layout in layouts for noisy in draw(answer, layout, start=first_block * size)
        ]
        answers.append((answer, self_denoised(streams_by_layout, config, rng), first_block))
    row = lay_out_answers(answers, config, shift=shift)
    if config.ar_weight and config.clean == "causal":
        label_clean_stream(row, example, config)
    return without_unseen(row)


def _draw_d2f(
    example: Example, config: StateConfig, draw: Callable[..., list[NoisyStream]], rng: random.Random, shift: bool
) -> SequenceColumns:
    num_blocks = -(-(len(example.tokens) - example.prompt_length) // config.block_size)
    (layout,) = choose_layouts(num_blocks, config, rng)
    (noisy,) = draw(example, layout, start=example.prompt_length)
    return lay_out_d2f(example, noisy, config, shift=shift)


def self_denoised(
    streams: Sequence[tuple[GroupLayout, NoisyStream]], config: StateConfig, rng: random.Random
) -> list[tuple[GroupLayout, NoisyStream]]:
    """The streams in the branches of Alg. 2 that `config.self_denoising` asks for."""
    if config.self_denoising == "both":
        return [(lay, replace(noisy, rollout=rollout)) for lay, noisy in streams for rollout in (False, True)]
    if config.self_denoising == "half":
        return [(layout, replace(noisy, rollout=rng.random() < 0.5)) for layout, noisy in streams]
    return list(streams)


def lay_out(
    example: Example,
    streams: Sequence[tuple[GroupLayout, NoisyStream]],
    config: StateConfig,
    *,
    first_block: int,
    shift: bool = False,
) -> SequenceColumns:
    """One training sequence: the noisy streams, which begin at block `first_block`, before the clean stream.

    With `shift` a token's logits come from the token before it in its stream. A noise-group's first token takes them
    from the clean stream, as decoding takes them from the last committed position.
    """
    return lay_out_answers([(example, streams, first_block)], config, shift=shift)


def lay_out_answers(answers: Sequence[AnswerStreams], config: StateConfig, *, shift: bool = False) -> SequenceColumns:
    """One training sequence of a conversation: the noisy streams of each answer before the last answer's clean stream.

    A noisy stream of an answer is the stream of the answer as its own sample, with its own EOS and fill. It sees clean
    blocks before its EOS's block, and there all samples are the same conversation. So the losses equal a sample's for
    each answer. Under weights that are means, the conversation's loss is their mean.
    """
    size, (last_answer, _, _) = config.block_size, answers[-1]
    clean_at = sum(len(streams) * (len(answer.tokens) - first * size) for answer, streams, first in answers)
    row = empty_sequence()
    for answer, streams, first_block in answers:
        _add_noisy(row, answer, streams, config, first_block=first_block, clean_at=clean_at if shift else None)
    if len(answers) > 1 and config.weighting in SAMPLE_MEANS:
        row["weights"] = [weight / len(answers) for weight in row["weights"]]
    _add_clean(row, last_answer, size, causal=config.clean == "causal")
    length = len(row["input_ids"])
    row["source"] = [max(0, s) for s in row["source"]] + list(range(len(row["source"]), length))
    check_columns(row)
    return row


def _add_noisy(
    row: SequenceColumns,
    example: Example,
    streams: Sequence[tuple[GroupLayout, NoisyStream]],
    config: StateConfig,
    *,
    first_block: int,
    clean_at: int | None,
) -> None:
    """Adds an answer's noisy streams. `clean_at` is the clean stream's first place, for shifted logits."""
    size, length = config.block_size, len(example.tokens)
    num_blocks, start = length // size, first_block * size
    # the step of block numbers: with causal clean tokens, each clean token is a block
    unit = size if config.clean == "causal" else 1
    for number, (layout, noisy) in enumerate(streams, start=max(row["stream"], default=0) + 1):
        start_of_row = len(row["input_ids"])
        starts = layout.first_blocks()
        labels = _labels(example, noisy, config, start=start)
        weights = _weights(
            labels,
            noisy,
            config,
            num_blocks=num_blocks - first_block,
            num_streams=len(streams),
            num_tokens=length - max(start, example.prompt_length),
        )
        row["input_ids"] += noisy.tokens
        row["positions"] += range(start, length)
        row["stream"] += [number] * len(noisy.tokens)
        row["block"] += [b * unit for b in range(first_block, num_blocks) for _ in range(size)]
        row["first"] += [(first_block + a) * unit for a in starts for _ in range(size)]
        row["labels"] += labels
        row["weights"] += weights
        row["rollout"] += [m and noisy.rollout for m in noisy.masked]
        row["slot"] += [b - a for b, a in enumerate(starts) for _ in range(size)]
        row["ratio"] += noisy.ratio
        if clean_at is not None:
            heads = {a * size for a in starts}
            row["source"] += [
                clean_at + start + i - 1 if i in heads else start_of_row + i - 1 for i in range(length - start)
            ]


def without_unseen(row: SequenceColumns) -> SequenceColumns:
    """The sequence without the clean blocks at its end that no noisy token sees: neither loss nor gradient needs them.

    These are the blocks from the first block of the last noise-group on, in all layouts, and after the clean stream's
    last label. They see no noisy token.
    """
    noisy = sum(1 for stream in row["stream"] if stream > 0)
    last_group = max(row["first"][:noisy])
    length = noisy + sum(1 for block in row["block"][noisy:] if block < last_group)
    length = max(length, 1 + max((i for i, label in enumerate(row["labels"]) if label != IGNORE), default=-1))
    return {name: column[:length] for name, column in row.items()}


def lay_out_d2f(example: Example, noisy: NoisyStream, config: StateConfig, *, shift: bool = False) -> SequenceColumns:
    """Native D2F's one sequence: the prompt, whose tokens see each other, then the response in blocks of its own.

    With `shift` a token's logits come from the token before it.
    """
    prompt, length = example.prompt_length, len(example.tokens)
    head = NoisyStream(list(example.tokens[:prompt]), [False] * prompt, [1.0] * prompt)
    sequence = NoisyStream(head.tokens + noisy.tokens, head.masked + noisy.masked, head.ratio + noisy.ratio)
    labels = _labels(example, sequence, config, start=0)
    blocks = [0] * prompt + [1 + i // config.block_size for i in range(length - prompt)]
    row: SequenceColumns = {
        "input_ids": sequence.tokens,
        "positions": list(range(length)),
        "stream": [1] * length,
        "block": blocks,
        "first": [0] * length,
        "labels": labels,
        "weights": _weights(
            labels, sequence, config, num_blocks=blocks[-1], num_streams=1, num_tokens=length - prompt
        ),
        "source": [max(0, i - shift) for i in range(length)],
        "rollout": [False] * length,
        "slot": [max(0, b - 1) for b in blocks],
        "ratio": sequence.ratio,
    }
    check_columns(row)
    return row


def _add_clean(row: SequenceColumns, example: Example, size: int, *, causal: bool) -> None:
    length = len(example.tokens)
    blocks = [place if causal else place // size for place in range(length)]
    row["input_ids"] += example.tokens
    row["positions"] += range(length)
    row["stream"] += [0] * length
    row["block"] += blocks
    row["first"] += [block + 1 for block in blocks]
    row["labels"] += [IGNORE] * length
    row["weights"] += [0.0] * length
    row["rollout"] += [False] * length
    row["slot"] += [0] * length
    row["ratio"] += [0.0] * length


def _labels(example: Example, noisy: NoisyStream, config: StateConfig, *, start: int) -> list[int]:
    if config.labels == "answer":
        return answer_labels(example.tokens, example.prompt_length)[start:]
    return [t if m else IGNORE for t, m in zip(example.tokens[start:], noisy.masked, strict=True)]


def _weights(
    labels: Sequence[int],
    noisy: NoisyStream,
    config: StateConfig,
    *,
    num_blocks: int,
    num_streams: int,
    num_tokens: int,
) -> list[float]:
    """Each label's part of the loss's numerator; `loss.denominator` is the other part of the definition.

    The weights of `SAMPLE_MEANS` are means over a sample's streams, each with `num_tokens` tokens of the answer. Other
    weights pool the labels of all streams.
    """
    has_label = [label != IGNORE for label in labels]
    if config.weighting == "masked_mean":
        count = max(1, sum(has_label))
        return [1.0 / count / num_streams if labelled else 0.0 for labelled in has_label]
    if config.weighting == "label_mean":
        return [1.0 if labelled else 0.0 for labelled in has_label]
    scale = {"block_ratio": num_blocks * num_streams, "nelbo": num_tokens * num_streams}.get(config.weighting, 1)
    inverse = [1.0 / max(t, EPSILON) for t in noisy.ratio]
    return [t / scale if labelled else 0.0 for labelled, t in zip(has_label, inverse, strict=True)]


def _check_example(example: Example, config: StateConfig, *, shift: bool) -> None:
    if config.layouts == "d2f" and example.earlier:
        raise ValueError("D2F's sequences have no clean stream that answers could share: give each answer as a sample")
    if config.layouts not in ("d2f", "none") and len(example.tokens) % config.block_size:
        raise ValueError(
            f"a sample of {len(example.tokens)} tokens is no whole number of blocks of {config.block_size}; "
            "fill it with EOS (encode_example)"
        )
    if shift and config.fills_masks and not example.prompt_length:
        raise ValueError("a sample without a prompt cannot be trained with shifted logits: nothing predicts its start")
