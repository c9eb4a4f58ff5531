"""Algorithms 4 and 5 of the paper on Python lists: slow and literal, the specification of `block_buffer.py`.

A token is an int and a mask is `None`. `predict` is the model: from the committed tokens and the resident blocks
before the step (their tokens, and with DMax the weights of their embeddings) it returns a token, a confidence and a
score for every position of every block. The score ranks positions in the fallback; it is the negative entropy if
the method says so, else the confidence.

Where the paper leaves a choice, the project's rules hold: progress counts editable positions only; if no block is
active, the next block is activated regardless of thresholds; the forward after a block's completion stores the block;
an EOS counts once its block is stored. Algorithm 4 marks a complete block TO_CACHE at once, Algorithm 5 only if all
blocks before it are final. Both follow Algorithm 5 here, so that they share the code of a step and differ in the
buffer alone. With T2T a forward that does not change a complete block stores it, if all blocks before it are final in
that forward; a block that still changes is final after `max_edits` more forwards. With DMax the inputs of a block are
mixed, so the next forward stores it from its hard tokens. With `carry` the forward that stores a block predicts, at
the block's first position, the token after the block. This token fills the next block's first position if that is
still a mask. So the decoding of a prompt of whole blocks begins with the store of its last block.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from mbd_core.decoding.answers.slots import SlotState
from mbd_core.decoding.blocks.config import DecodingConfig, EntropyBound
from mbd_core.decoding.blocks.request import FinishReason

BlockTokens = list[int | None]
Weights = list[float]
BlockOutcome = Literal["open", "verified", "settled", "stored"]
Predictions = list[tuple[int, float, float]]  # token, confidence and score of each position of one block
Predict = Callable[[list[int], list[BlockTokens], list[Weights]], list[Predictions]]


@dataclass
class ResidentBlock:
    """A block in the running-set or the buffer: its tokens, which of them may be filled, and its state."""

    tokens: BlockTokens
    editable: list[bool]
    weights: Weights
    state: SlotState = SlotState.ACTIVE
    steps: int = 0
    stability: float = 1.0

    @property
    def masks(self) -> list[int]:
        """Positions that may still become tokens."""
        return [i for i, (t, e) in enumerate(zip(self.tokens, self.editable, strict=True)) if e and t is None]

    @property
    def filled(self) -> list[int]:
        """Positions of generated tokens."""
        return [i for i, (t, e) in enumerate(zip(self.tokens, self.editable, strict=True)) if e and t is not None]

    @property
    def progress(self) -> float:
        total = sum(self.editable)
        return 1.0 - len(self.masks) / total if total else 1.0


@dataclass
class LiteralRun:
    """The result of a run: useful tokens, why it ended, how many forwards it took, how many of them only stored."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_forwards: int = 0
    num_store_forwards: int = 0


def accepted_tokens(
    block: ResidentBlock, predictions: Predictions, *, gate: bool, config: DecodingConfig
) -> dict[int, int]:
    """The tokens that an active block accepts, by position (Alg. 5 lines 11 to 14); `gate` allows the fallback."""
    masks = block.masks
    if config.sub_block is not None:
        masks = [i for i in masks if i // config.sub_block == masks[0] // config.sub_block]
    if config.soft:
        first_run = list(itertools.takewhile(lambda i: predictions[i][1] > config.tau_m2t, masks))
        positions = first_run or (masks[:1] if gate else [])
    elif config.entropy:
        positions = low_entropies(masks, predictions, config.entropy, gate=gate)
    else:
        positions = [i for i in masks if predictions[i][1] > config.tau_m2t]
        if len(positions) < config.tokens_per_step and gate:
            if config.fallback == "leftmost":
                positions = masks[: config.tokens_per_step]
            else:
                positions = sorted(masks, key=lambda i: (-predictions[i][2], i))[: config.tokens_per_step]
    return {i: predictions[i][0] for i in positions}


def low_entropies(masks: list[int], predictions: Predictions, bound: EntropyBound, *, gate: bool) -> list[int]:
    """The positions that the EB sampler accepts. Only with the gate may it accept one whatever the entropy there."""
    positions: list[int] = []
    total = 0.0
    for i in sorted(masks, key=lambda i: (-predictions[i][2], i)):
        earlier, total = total, total - predictions[i][2]
        free = gate and not positions
        within = total < bound.gamma if bound.rule == "jetengine" else (earlier if gate else total) <= bound.gamma
        if not (free or within):
            break
        positions.append(i)
    return positions


def revised_tokens(block: ResidentBlock, predictions: Predictions, config: DecodingConfig) -> dict[int, int]:
    """The tokens that overwrite others in an active block, by position (Alg. 5 line 15; DMax: all tokens that
    differ)."""
    if not config.revises:
        return {}
    tau = config.t2t.tau if config.t2t else -1.0
    return {
        i: predictions[i][0] for i in block.filled if predictions[i][0] != block.tokens[i] and predictions[i][1] > tau
    }


def update(block: ResidentBlock, predictions: Predictions, *, gate: bool, config: DecodingConfig) -> BlockOutcome:
    """One step of an active block. The result is "open", "settled" (final; a later forward stores it) or "verified"
    (final and unchanged, so this forward stored it)."""
    was_complete = not block.masks
    writes = accepted_tokens(block, predictions, gate=gate, config=config)
    writes |= revised_tokens(block, predictions, config)
    confirmed = [i for i in block.filled if predictions[i][0] == block.tokens[i]]
    block.stability = len(confirmed) / len(block.filled) if block.filled else 1.0
    for position, token in writes.items():
        block.tokens[position] = token
    if config.soft:
        block.steps += 1
        block.weights = [predictions[i][1] if i in block.filled else 1.0 for i in range(len(block.tokens))]
        confident = all(predictions[i][1] >= config.soft.stop_confidence for i in block.filled)
        steady = confident or not writes or block.steps >= len(block.tokens)
        return "settled" if not block.masks and steady else "open"
    if config.t2t:
        block.steps += was_complete
        if was_complete and not writes:
            return "verified"
        return "settled" if was_complete and block.steps >= config.t2t.max_edits else "open"
    return "open" if block.masks else "settled"


class LiteralDecoding:
    """The part that both algorithms share: the prompt, the budget, and a step's forward, acceptance and commit."""

    def __init__(
        self, prompt: list[int], max_tokens: int, config: DecodingConfig, predict: Predict, eos: tuple[int, ...]
    ) -> None:
        self.config, self.predict, self.eos = config, predict, eos
        self.prompt, self.end = prompt, len(prompt) + max_tokens
        boundary = max(0, len(prompt) - config.carry) // config.block_size * config.block_size
        self.cached: list[int] = prompt[:boundary]
        self.run = LiteralRun()
        self.carried: int | None = None  # the last forward's prediction after the blocks that it stored

    def masked_block(self, distance: int) -> ResidentBlock:
        """The block at `distance` blocks after the cached prefix: all masks, except the prompt's remainder."""
        start = len(self.cached) + distance * self.config.block_size
        positions = range(start, start + self.config.block_size)
        tokens: BlockTokens = [self.prompt[p] if p < len(self.prompt) else None for p in positions]
        editable = [len(self.prompt) <= p < self.end for p in positions]
        block = ResidentBlock(tokens, editable, [1.0] * len(tokens))
        if None not in tokens:
            block.state = SlotState.TO_CACHE
        if distance == 0:
            self.carry_into(block)
        return block

    def carry_into(self, block: ResidentBlock) -> None:
        """Fills the first position of the block after the blocks that the last forward stored, if it is open."""
        if self.carried is not None and block.editable[0] and block.tokens[0] is None:
            block.tokens[0] = self.carried

    def wants_another(self, resident: list[ResidentBlock]) -> bool:
        """Whether another block is activated (Alg. 4 line 5, Alg. 5 line 6)."""
        active = [b for b in resident if b.state is SlotState.ACTIVE]
        has_eos = any(
            t in self.eos for b in resident for t, e in zip(b.tokens, b.editable, strict=True) if e and t is not None
        )
        in_budget = len(self.cached) + len(resident) * self.config.block_size < self.end
        tau_stable = -1.0 if self.config.tau_stable is None else self.config.tau_stable
        ready = not active or (active[-1].progress > self.config.tau_add and active[-1].stability > tau_stable)
        return in_budget and not has_eos and ready

    def forward_and_accept(self, resident: list[ResidentBlock]) -> int:
        """Run one forward and update the resident blocks; returns how many blocks, from the front, it stored."""
        self.run.num_forwards += 1
        self.run.num_store_forwards += all(b.state is SlotState.TO_CACHE for b in resident)
        predictions = self.predict(
            self.cached, [list(b.tokens) for b in resident], [list(b.weights) for b in resident]
        )
        progress = [b.progress for b in resident]
        outcomes: list[BlockOutcome] = []
        for i, block in enumerate(resident):
            if block.state is SlotState.TO_CACHE:
                outcomes.append("stored")
                continue
            gate = i == 0 or progress[i - 1] >= self.config.tau_semi
            outcomes.append(update(block, predictions[i], gate=gate, config=self.config))
        for block, _ in itertools.takewhile(
            lambda pair: pair[1] in ("stored", "settled"), zip(resident, outcomes, strict=True)
        ):
            block.state = SlotState.TO_CACHE
            block.weights = [1.0] * len(block.tokens)
        num_stored = len(list(itertools.takewhile(lambda outcome: outcome in ("stored", "verified"), outcomes)))
        self.carried = predictions[num_stored - 1][0][0] if self.config.carry and num_stored else None
        if self.carried is not None and num_stored < len(resident):
            front = resident[num_stored]
            self.carry_into(front)
            if not front.masks:
                front.state = SlotState.TO_CACHE
        return num_stored

    def commit(self, block: ResidentBlock) -> None:
        """Move the front block into the cache: its useful tokens count, and an EOS or the budget ends the run."""
        start = len(self.cached)
        for offset, token in enumerate(block.tokens):
            self.cached.append(-1 if token is None else token)
            if self.run.finish_reason is None and len(self.prompt) <= start + offset < self.end:
                assert token is not None
                if token in self.eos:
                    self.run.finish_reason = "stop"
                else:
                    self.run.tokens.append(token)
        if self.run.finish_reason is None and len(self.cached) >= self.end:
            self.run.finish_reason = "length"


def naive_multibd(
    prompt: list[int],
    max_tokens: int,
    config: DecodingConfig,
    predict: Predict,
    *,
    eos: tuple[int, ...] = (),
    cap: int | None = None,
) -> LiteralRun:
    """Algorithm 4: the running-set grows and shrinks; `cap` bounds it (`None`: unbounded, as in the paper)."""
    decoding = LiteralDecoding(prompt, max_tokens, config, predict, eos)
    running_set = [decoding.masked_block(0)]
    while decoding.run.finish_reason is None:
        if (cap is None or len(running_set) < cap) and decoding.wants_another(running_set):
            running_set.append(decoding.masked_block(len(running_set)))
        num_stored = decoding.forward_and_accept(running_set)
        while num_stored and decoding.run.finish_reason is None:
            decoding.commit(running_set.pop(0))
            num_stored -= 1
    return decoding.run


def block_buffer_multibd(
    prompt: list[int],
    max_tokens: int,
    config: DecodingConfig,
    predict: Predict,
    *,
    eos: tuple[int, ...] = (),
    limits: Iterator[int] | None = None,
) -> LiteralRun:
    """Algorithm 5: always `buffer_size` slots; a DUMMY slot is `None`, and the model does not see it.

    `limits` gives for each forward the number of resident blocks below which another is activated (a busy engine's
    block budget); at least 1.
    """
    decoding = LiteralDecoding(prompt, max_tokens, config, predict, eos)
    buffer: list[ResidentBlock | None] = [decoding.masked_block(0)] + [None] * (config.buffer_size - 1)
    while decoding.run.finish_reason is None:
        resident = [b for b in buffer if b is not None]
        room = limits is None or len(resident) < next(limits)
        if None in buffer and room and decoding.wants_another(resident):
            slot = buffer.index(None)
            buffer[slot] = decoding.masked_block(slot)
            resident = [b for b in buffer if b is not None]
        num_stored = decoding.forward_and_accept(resident)
        while num_stored and decoding.run.finish_reason is None:
            front = buffer.pop(0)
            assert front is not None
            decoding.commit(front)
            buffer.append(None)
            num_stored -= 1
    return decoding.run
