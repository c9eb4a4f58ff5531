"""Which kind of step a batch needs: how many batch rows, how many logits, which work. A CUDA graph serves one kind.
And the most that a batch row has in any step.

Static steps come in few kinds, so that few graphs are captured: a power of two of batch rows, all slots of these rows
or (with a block budget) a power of two of them, and logits for a quarter, a half, three quarters or all of their
positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mbd_core.decoding.blocks.causal_config import Renoise
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.decoding.blocks.work import ALL_WORK, StepWork, work_of
from mbd_core.engine.config import EngineConfig
from mbd_core.models.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class StepKind:
    """The sizes and work of a step: it depends on nothing else beside the values in its buffers.

    num_slots  leading slots of each row that go through the model; the slots after them are empty
    num_asked  positions with logits; `None`: all positions of these slots
    """

    num_rows: int
    num_slots: int
    num_asked: int | None
    work: StepWork

    def covers(self, other: "StepKind") -> bool:
        """Whether a step of this kind can stand in for a step of kind `other`."""
        has_logits = self.num_asked is None or (other.num_asked is not None and self.num_asked >= other.num_asked)
        has_slots = self.num_rows == other.num_rows and self.num_slots >= other.num_slots
        return has_slots and has_logits and self.work.covers(other.work)


@dataclass(frozen=True, kw_only=True)
class StepKinds:
    """The kinds of steps of one engine's Block Buffer.

    adapters     whether the engine can load LoRA adapters
    blocks_each  with a block budget: the blocks that each sequence may grow to, by the number of running sequences
    """

    max_rows: int
    num_slots: int
    block_size: int
    batch_invariant: bool
    adapters: bool = False
    blocks_each: Callable[[int], int] | None = None

    def kind(self, *, num_rows: int, num_slots: int, num_asked: int, work: StepWork) -> StepKind:
        """The smallest kind for a batch that uses `num_rows` rows, at most the first `num_slots` slots of each, and
        asks for at most `num_asked` positions."""
        rows = _power_of_two(num_rows, self.max_rows)
        slots = self.num_slots if self.blocks_each is None else _power_of_two(num_slots, self.num_slots)
        quarter = self._quarter(rows, slots)
        quarters = max(1, -(-num_asked // quarter))
        is_whole = quarters > 3 or self.batch_invariant
        return StepKind(num_rows=rows, num_slots=slots, num_asked=None if is_whole else quarters * quarter, work=work)

    def whole(self, *, num_rows: int, work: StepWork) -> StepKind:
        """The least kind for a batch that uses `num_rows` rows, with all their slots and logits."""
        rows = _power_of_two(num_rows, self.max_rows)
        return StepKind(num_rows=rows, num_slots=self.num_slots, num_asked=None, work=work)

    def to_capture(self, decoding: DecodingConfig) -> list[StepKind]:
        """The kinds worth a graph.

        For greedy requests with `decoding` there is a kind for each number of logits, without and with adapters. Two
        more kinds have all logits: one with all work except changes and reports of logits, and one with all work,
        which serves every other request. With a block budget each also exists with the slots that the budget leaves.
        """
        works = [work_of(decoding, Sampling())]
        if self.adapters:
            works.append(replace(works[0], adapts=True))
        kinds: list[StepKind] = []
        for rows, slots in self._shapes(decoding):
            max_asked = rows * min(slots, decoding.buffer_size) * self.block_size
            sizes = (*range(1, max_asked + 1, self._quarter(rows, slots)), max_asked)
            kinds += dict.fromkeys(
                self.kind(num_rows=rows, num_slots=slots, num_asked=n, work=w) for w in works for n in sizes
            )
            for work in (replace(ALL_WORK, adjusts=False, tops=False), ALL_WORK):
                kinds.append(StepKind(num_rows=rows, num_slots=slots, num_asked=None, work=work))
        return kinds

    def _shapes(self, decoding: DecodingConfig) -> list[tuple[int, int]]:
        """Rows and slots of the kinds, fewest first: with all slots, and with a request's slots at that many rows."""
        shapes = set()
        for n in range(1, self.max_rows + 1):
            rows = _power_of_two(n, self.max_rows)
            shapes.add((rows, self.num_slots))
            if self.blocks_each is not None and decoding.adaptive:
                slots = min(self.blocks_each(n), decoding.buffer_size)
                shapes.add((rows, _power_of_two(slots, self.num_slots)))
        return sorted(shapes)

    def _quarter(self, num_rows: int, num_slots: int) -> int:
        return -(-num_rows * num_slots * self.block_size // 4)


def _power_of_two(number: int, limit: int) -> int:
    """The least power of two from `number` on, at most `limit`."""
    return min(1 << (max(number, 1) - 1).bit_length(), limit)


@dataclass(frozen=True, kw_only=True)
class RowLimits:
    """The most that the request of one batch row has in a forward, beside its prompt, whatever it decodes by. The
    largest graph has places for no more, and so much is measured before the number of pages is chosen. Only a canvas
    has more: all its positions, which lie in its pages.

    positions  positions that go through a model
    logits     positions whose logits are held whole until they are read; those of slots are read in chunks
    """

    positions: int
    logits: int


def row_limits(model: ModelConfig, config: EngineConfig, page_size: int, draft: ModelConfig | None) -> RowLimits:
    """The limits of an engine of `config`; `draft` is its draft model, if it has one."""
    num_slots, block_size = config.num_slots, config.block_size or model.block_size
    in_slots = num_slots * block_size
    limits = [RowLimits(positions=in_slots, logits=0)]
    if model.attention == "block_causal" and model.has_mask:
        verified = Verify().rows(block_size, num_slots)
        limits.append(RowLimits(positions=verified.longest, logits=in_slots))
    if draft is not None:
        drafted = Verify(exact=True, store="causal", draft_model=True).rows(draft.block_size, num_slots)
        limits.append(RowLimits(positions=drafted.longest, logits=num_slots * draft.block_size))
    adapts = config.max_adapters > 0 and model.attention == "block_causal"
    methods = (replace(model, ar_mode=True) if adapts else model).ar_methods
    if "linear-spec" in methods:  # admission lets a draft, with what is drafted ahead, fill a page for each slot
        limits.append(RowLimits(positions=num_slots * page_size, logits=num_slots * page_size))
    if "renoise" in methods:
        limits.append(RowLimits(positions=Renoise().rows(block_size).longest, logits=0))
    return RowLimits(positions=max(limit.positions for limit in limits), logits=max(limit.logits for limit in limits))
