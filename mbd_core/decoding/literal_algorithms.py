"""Algorithms 4 and 5 of the paper on Python lists: slow, literal, the specification of the tensors in `buffer.py`.

A token is an int and a mask is `None`. `predict` stands for the model: from the committed tokens and the resident
blocks before the step (their tokens, and with DMax the weights their embeddings are mixed with) it gives every
position of every block a token and a confidence.

Where the paper leaves a choice the project's rules hold: progress counts editable positions only; if no block is
active the next one is activated regardless of thresholds; a block is stored by the forward after the one that
completed it; EOS counts once its block is stored. Algorithm 4 marks a complete block TO_CACHE at once, Algorithm 5
only behind blocks that are final too; both follow Algorithm 5 here, so that they differ in the buffer alone, and share
the code of a step. With T2T a complete block that a forward leaves as it is, behind blocks that are final in that
forward, is stored by that very forward; one that goes on changing becomes final after `max_edits` more. With DMax the
block's inputs were mixed, so it is stored from its hard tokens by the next forward.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from mbd_core.decoding.decoding_config import DecodingConfig
from mbd_core.decoding.request import FinishReason

Tokens = list[int | None]
Weights = list[float]
Predict = Callable[[list[int], list[Tokens], list[Weights]], list[list[tuple[int, float]]]]


@dataclass
class Block:
    """A resident block: its tokens, which of them may be filled, and whether it is final."""

    tokens: Tokens
    editable: list[bool]
    weights: Weights
    state: str = "ACTIVE"
    steps: int = 0
    stability: float = 1.0

    @property
    def open(self) -> list[int]:
        return [i for i, (t, e) in enumerate(zip(self.tokens, self.editable, strict=True)) if e and t is None]

    @property
    def filled(self) -> list[int]:
        return [i for i, (t, e) in enumerate(zip(self.tokens, self.editable, strict=True)) if e and t is not None]

    @property
    def progress(self) -> float:
        total = sum(self.editable)
        return 1.0 - len(self.open) / total if total else 1.0


@dataclass
class Run:
    """What a reference run produced: useful tokens, why it ended, how many forwards, how many of them only stored."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_forwards: int = 0
    num_store_forwards: int = 0


def accept(
    block: Block, predictions: list[tuple[int, float]], *, gate: bool, config: DecodingConfig
) -> dict[int, int]:
    """Positions of one active block that become tokens (Alg. 5 lines 11 to 14)."""
    if config.soft:
        run = list(itertools.takewhile(lambda i: predictions[i][1] > config.tau_m2t, block.open))
        over = run or (block.open[:1] if gate else [])
    else:
        over = [i for i in block.open if predictions[i][1] > config.tau_m2t]
        if len(over) < config.tokens_per_step and gate:
            if config.fallback == "leftmost":
                over = block.open[: config.tokens_per_step]
            else:
                over = sorted(block.open, key=lambda i: (-predictions[i][1], i))[: config.tokens_per_step]
    return {i: predictions[i][0] for i in over}


def revise(block: Block, predictions: list[tuple[int, float]], config: DecodingConfig) -> dict[int, int]:
    """Tokens of one active block that are overwritten (Alg. 5 line 15; all of them with DMax)."""
    if not config.revises:
        return {}
    tau = config.t2t.tau if config.t2t else -1.0
    return {
        i: predictions[i][0] for i in block.filled if predictions[i][0] != block.tokens[i] and predictions[i][1] > tau
    }


def update(block: Block, predictions: list[tuple[int, float]], *, gate: bool, config: DecodingConfig) -> str:
    """One active block's step; whether it is "open", "verified" (nothing changed) or "settled" (final as it is)."""
    was_complete = not block.open
    writes = accept(block, predictions, gate=gate, config=config) | revise(block, predictions, config)
    again = [i for i in block.filled if predictions[i][0] == block.tokens[i]]
    block.stability = len(again) / len(block.filled) if block.filled else 1.0
    for place, token in writes.items():
        block.tokens[place] = token
    if config.soft:
        block.steps += 1
        block.weights = [
            predictions[i][1] if i in block.filled else 1.0 for i in range(len(block.tokens))
        ]  # fmt: skip
        sure = all(predictions[i][1] >= config.soft.stop_confidence for i in block.filled)
        calm = sure or not writes or block.steps >= len(block.tokens)
        return "settled" if not block.open and calm else "open"
    if config.t2t:
        block.steps += was_complete
        if was_complete and not writes:
            return "verified"
        return "settled" if was_complete and block.steps >= config.t2t.max_edits else "open"
    return "open" if block.open else "settled"


class _Decoding:
    """What the two algorithms share: the prompt, the budget, and a step's accept, mark and commit."""

    def __init__(
        self, prompt: list[int], max_tokens: int, config: DecodingConfig, predict: Predict, eos: tuple[int, ...]
    ) -> None:
        self.config, self.predict, self.eos = config, predict, eos
        self.prompt, self.end = prompt, len(prompt) + max_tokens
        boundary = len(prompt) // config.block_size * config.block_size
        self.cached: list[int] = prompt[:boundary]
        self.run = Run()

    def new_block(self, number_ahead: int) -> Block:
        """The block `number_ahead` blocks behind the cached prefix, masked but for the prompt's remainder."""
        start = len(self.cached) + number_ahead * self.config.block_size
        positions = range(start, start + self.config.block_size)
        tokens: Tokens = [self.prompt[p] if p < len(self.prompt) else None for p in positions]
        editable = [len(self.prompt) <= p < self.end for p in positions]
        return Block(tokens, editable, [1.0] * len(tokens))

    def wants_another(self, resident: list[Block]) -> bool:
        """Alg. 4 line 5, Alg. 5 line 6."""
        active = [b for b in resident if b.state == "ACTIVE"]
        eos_seen = any(
            t in self.eos for b in resident for t, e in zip(b.tokens, b.editable, strict=True) if e and t is not None
        )
        in_budget = len(self.cached) + len(resident) * self.config.block_size < self.end
        tau_stable = -1.0 if self.config.tau_stable is None else self.config.tau_stable
        ready = not active or (active[-1].progress > self.config.tau_add and active[-1].stability > tau_stable)
        return in_budget and not eos_seen and ready

    def forward_and_accept(self, resident: list[Block]) -> int:
        """One forward on the resident blocks; how many of them, from the front, it stored."""
        self.run.num_forwards += 1
        self.run.num_store_forwards += all(b.state == "TO_CACHE" for b in resident)
        predictions = self.predict(
            self.cached, [list(b.tokens) for b in resident], [list(b.weights) for b in resident]
        )
        progress = [b.progress for b in resident]
        results = []
        for i, block in enumerate(resident):
            if block.state == "TO_CACHE":
                results.append("stored")
                continue
            gate = i == 0 or progress[i - 1] >= self.config.tau_semi
            results.append(update(block, predictions[i], gate=gate, config=self.config))
        for block, _ in itertools.takewhile(
            lambda pair: pair[1] in ("stored", "settled"), zip(resident, results, strict=True)
        ):
            block.state = "TO_CACHE"
            block.weights = [1.0] * len(block.tokens)
        return len(list(itertools.takewhile(lambda result: result in ("stored", "verified"), results)))

    def commit(self, block: Block) -> None:
        """The front block enters the cache: its useful tokens count, EOS or the budget ends the run."""
        start = len(self.cached)
        for place, token in enumerate(block.tokens):
            self.cached.append(-1 if token is None else token)
            if self.run.finish_reason is None and len(self.prompt) <= start + place < self.end:
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
) -> Run:
    """Algorithm 4: the running-set grows and shrinks; `cap` bounds it (`None`: as the paper has it, unbounded)."""
    decoding = _Decoding(prompt, max_tokens, config, predict, eos)
    running_set = [decoding.new_block(0)]
    while decoding.run.finish_reason is None:
        if (cap is None or len(running_set) < cap) and decoding.wants_another(running_set):
            running_set.append(decoding.new_block(len(running_set)))
        stored = decoding.forward_and_accept(running_set)
        while stored and decoding.run.finish_reason is None:
            decoding.commit(running_set.pop(0))
            stored -= 1
    return decoding.run


def block_buffer_multibd(
    prompt: list[int],
    max_tokens: int,
    config: DecodingConfig,
    predict: Predict,
    *,
    eos: tuple[int, ...] = (),
) -> Run:
    """Algorithm 5: always `buffer_size` slots, `None` for DUMMY ones, which the model does not see."""
    decoding = _Decoding(prompt, max_tokens, config, predict, eos)
    buffer: list[Block | None] = [decoding.new_block(0)] + [None] * (config.buffer_size - 1)
    while decoding.run.finish_reason is None:
        resident = [b for b in buffer if b is not None]
        if None in buffer and decoding.wants_another(resident):
            slot = buffer.index(None)
            buffer[slot] = decoding.new_block(slot)
            resident = [b for b in buffer if b is not None]
        stored = decoding.forward_and_accept(resident)
        while stored and decoding.run.finish_reason is None:
            front = buffer.pop(0)
            assert front is not None
            decoding.commit(front)
            buffer.append(None)
            stored -= 1
    return decoding.run
