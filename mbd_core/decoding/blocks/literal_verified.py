"""Verified MultiBD on Python lists: slow and literal, the specification of `decoding/causal/verified.py`.

`draft` is the model that sees blocks: from the committed tokens and the resident blocks it returns a token and a
confidence for every mask. `judge` is the same model at block size 1, or a larger model: it says whether it accepts a
drafted token after a text, and which token it puts there otherwise. Both get the number of the forward, because noise
may depend on it. With one slot it counts the block's forwards, with several slots the answer's.

Each forward of drafts is one of Algorithm 4. Then one verification judges the first run of masks in each active block,
in order. The judge sees the text before the run, with the draft in the place of every mask. Then:

- the first block takes the tokens that are accepted before the first refusal, and the judge's token at the refusal; if
  these are fewer than `tokens_per_step`, it also takes the most confident drafts;
- after a refusal, later blocks keep the tokens that were accepted given the drafts, and take no token of the judge;
- if the answer must be exact, later blocks keep nothing: it has the tokens of block size 1, from left to right.

A verification that accepts the drafts of a block to its end has stored it, if keys are stored in order (exact). With
two models (`Verify.draft_model`) a decided block leaves the running-set at once: the next draft and the next judgement
carry its row.

If the number of drafted blocks is chosen (`Verify.slots`), `choose` gives it after each judgement, from the masks of
each block that may be drafted. A draft before the first judgement has one block.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from mbd_core.decoding.answers.slots import SlotState
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.literal_algorithms import (
    BlockTokens,
    LiteralDecoding,
    LiteralRun,
    Predictions,
    ResidentBlock,
    Weights,
)
from mbd_core.decoding.blocks.verification import first_run, number_accepted

MaskDrafts = list[dict[int, tuple[int, float]]]  # of each block, by offset of the mask: token and confidence
DraftBlocks = Callable[[list[int], list[BlockTokens], int], MaskDrafts]
JudgeToken = Callable[[list[int], int, int], tuple[bool, int]]  # text before it, drafted token, number of the forward
ChooseBlocks = Callable[[list[int]], int]


@dataclass(frozen=True)
class DraftedBlock:
    """A resident block with its draft, and whether the draft is judged."""

    block: ResidentBlock
    draft: dict[int, tuple[int, float]]
    is_judged: bool
    is_first: bool


def verified_multibd(
    prompt: list[int],
    max_tokens: int,
    config: DecodingConfig,
    draft: DraftBlocks,
    judge: JudgeToken,
    *,
    eos: tuple[int, ...] = (),
    choose: ChooseBlocks | None = None,
) -> LiteralRun:
    """Decodes one request whose `config` verifies drafts by their span, without edits, parts and carry."""
    rule = config.verify
    assert rule is not None and rule.route == "span" and not (config.t2t or config.sub_block or config.carry)
    decoding = LiteralDecoding(prompt, max_tokens, config, _no_predictions, eos)
    run, running_set = decoding.run, [decoding.masked_block(0)]
    num_uncounted = 0  # forwards that the number of a forward leaves out
    while run.finish_reason is None:
        if choose is not None and run.num_forwards:
            running_set = _chosen(decoding, running_set, choose)
        elif len(running_set) < config.buffer_size and decoding.wants_another(running_set):
            running_set.append(decoding.masked_block(len(running_set)))
            num_uncounted = run.num_forwards if config.buffer_size == 1 else 0
        drafts = draft(decoding.cached, [list(b.tokens) for b in running_set], run.num_forwards - num_uncounted)
        run.num_forwards += 1
        progress_before = [1.0, *(b.progress for b in running_set)]
        first = next((b for b in running_set if b.state is SlotState.ACTIVE), None)
        pairs = [
            DraftedBlock(b, drafted, is_judged=_take_draft(b, drafted, p, config), is_first=b is first)
            for b, drafted, p in zip(running_set, drafts, progress_before, strict=False)
        ]
        while running_set and running_set[0].state is SlotState.TO_CACHE:  # this forward stored it
            decoding.commit(running_set.pop(0))
        _settle(decoding, running_set)
        drafted_blocks = pairs[len(pairs) - len(running_set) :]
        if run.finish_reason is not None or not any(pair.is_judged for pair in drafted_blocks):
            continue
        num_whole = _judge(decoding, drafted_blocks, judge, run.num_forwards - num_uncounted)
        if rule.draft_model:
            num_whole = next((n for n, block in enumerate(running_set) if block.masks), len(running_set))
        for _ in range(num_whole if rule.exact else 0):
            decoding.commit(running_set.pop(0))
        _settle(decoding, running_set)
    return run


def _chosen(decoding: LiteralDecoding, running_set: list[ResidentBlock], choose: ChooseBlocks) -> list[ResidentBlock]:
    """The running-set with the chosen number of blocks that have masks; after the first of these, all are masks."""
    config = decoding.config
    blocks = [block for block in running_set if block.state is SlotState.TO_CACHE]
    num_final = len(blocks)
    blocks += running_set[num_final : num_final + 1]
    while len(blocks) < config.buffer_size and len(decoding.cached) + len(blocks) * config.block_size < decoding.end:
        blocks.append(decoding.masked_block(len(blocks)))
    masks = [len(block.masks) for block in blocks[num_final:]]
    return blocks[: num_final + choose(masks)] if masks else blocks


def _take_draft(
    block: ResidentBlock, drafted: dict[int, tuple[int, float]], progress_before: float, config: DecodingConfig
) -> bool:
    """Returns whether the draft of a block is judged. An active block whose draft is not judged accepts tokens of it
    by confidence (Alg. 4). `progress_before` is the progress of the block before it."""
    rule = config.verify
    assert rule is not None
    if block.state is SlotState.TO_CACHE:
        return False
    masks = block.masks
    if first_run(masks) >= rule.min_span:
        return True
    _accept_confident(block, drafted, config.tokens_per_step if progress_before >= config.tau_semi else 0, config)
    return False


def _accept_confident(
    block: ResidentBlock, drafted: dict[int, tuple[int, float]], quota: int, config: DecodingConfig
) -> None:
    """Fills the masks above the threshold; if they are fewer than `quota`, the `quota` most confident masks."""
    chosen = [i for i in block.masks if drafted[i][1] > config.tau_m2t]
    if len(chosen) < quota:
        chosen = sorted(block.masks, key=lambda i: (-drafted[i][1], i))[:quota]
    for i in chosen:
        block.tokens[i] = drafted[i][0]


def _judge(decoding: LiteralDecoding, blocks: list[DraftedBlock], judge: JudgeToken, number: int) -> int:
    """One verification, forward `number`, of the resident blocks. Returns the number of blocks, from the front, that
    it accepts to their end."""
    config, rule = decoding.config, decoding.config.verify
    assert rule is not None
    text, is_refused, num_whole = list(decoding.cached), False, 0
    for place, drafted in enumerate(blocks):
        block, draft, masks = drafted.block, drafted.draft, drafted.block.masks
        start = len(text)
        text += [
            -1 if t is None else t
            for t in (draft[i][0] if i in draft and t is None else t for i, t in enumerate(block.tokens))
        ]
        if not drafted.is_judged:
            continue
        run = masks[: first_run(masks)]
        verdicts = [judge(text[: start + i], draft[i][0], number) for i in run]
        accepted = run[: number_accepted([is_accepted for is_accepted, _ in verdicts])]
        if not (is_refused and rule.exact):
            for i in accepted:
                block.tokens[i] = draft[i][0]
        if len(accepted) < len(run) and not is_refused:
            block.tokens[run[len(accepted)]] = verdicts[len(accepted)][1]
        missing = min(config.tokens_per_step, len(masks)) - (len(masks) - len(block.masks))
        if drafted.is_first and missing > 0:
            _accept_confident(block, draft, missing, config)
        is_refused |= len(accepted) < len(run)
        num_whole += not is_refused and run[-1] == len(block.tokens) - 1 and num_whole == place
    decoding.run.num_forwards += 1
    return num_whole


def _settle(decoding: LiteralDecoding, running_set: list[ResidentBlock]) -> None:
    """Marks the leading blocks without masks. An answer that is known to its end ends here: no forward has to store
    it."""
    start = len(decoding.cached)
    for n, block in enumerate(running_set):
        known = list(
            itertools.takewhile(lambda pair: pair[0] is not None, zip(block.tokens, block.editable, strict=True))
        )
        has_eos = any(token in decoding.eos and is_free for token, is_free in known)
        if block.masks and not has_eos:
            return
        block.state = SlotState.TO_CACHE
        if has_eos or start + (n + 1) * len(block.tokens) >= decoding.end:
            for each in running_set[: n + 1]:
                decoding.commit(each)
            return


def _no_predictions(cached: list[int], blocks: list[BlockTokens], weights: list[Weights]) -> list[Predictions]:
    raise AssertionError("drafts and judgements replace predictions")
