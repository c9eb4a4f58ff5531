"""A model made of a hash, with a cache that behaves like one: what a canvas decoder is driven by in tests.

A lane's cache remembers, of every position, the token it was last computed from and what the lane looked like then;
logits at a position are random numbers seeded by the whole lane's cache and the position. So stale keys change
predictions as they do in a model.
"""

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.canvas.canvas_decoder import canvas_decoder
from mbd_core.decoding.canvas.plan import CanvasPlan, PlannedDecoder, Query

VOCAB, MASK, TAIL = 14, 0, 13
PREDICTED = Vocab(MASK, TAIL)


Key = tuple[int, str]


@dataclass
class FakeModel:
    """`blind` positions at the beginning (a prompt, say) do not enter the predictions."""

    seed: int = 0
    scale: float = 4.0
    blind: int = 0
    lanes: dict[int, list[Key | None]] = field(default_factory=dict)
    plans: list[CanvasPlan] = field(default_factory=list)

    def forward(self, plan: CanvasPlan, length: int) -> list[Tensor]:
        for source, target in plan.copies:
            self.lanes[target] = list(self.lanes[source])
        for q in plan.queries:
            assert 0 <= q.start < q.stop <= length and len(q.tokens) == q.stop - q.start
            lane = self.lanes.setdefault(q.lane, [None] * length)
            lane[q.start : q.stop] = [(t, "") for t in q.tokens.tolist()]
        for q in plan.queries:
            lane = self.lanes[q.lane]
            seen = hashlib.sha256(repr([key and key[0] for key in lane[self.blind :]]).encode()).hexdigest()
            lane[q.start : q.stop] = [(t, seen) for t in q.tokens.tolist()]
        self.plans.append(plan)
        return [self.rows(q) for q in plan.queries]

    def rows(self, q: Query) -> Tensor:
        keys = self.lanes[q.lane][self.blind :]
        assert None not in keys, "attends to a position that no forward has computed"
        assert all(q.start <= p < q.stop for p in q.logits_at.tolist()), "asks for logits it did not compute"
        return torch.stack([self.row(keys, p) for p in q.logits_at.tolist()] or [torch.zeros(VOCAB)])[
            : len(q.logits_at)
        ]

    def row(self, keys: list[Key | None], position: int) -> Tensor:
        digest = hashlib.sha256(repr((self.seed, keys, position)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return self.scale * torch.randn(VOCAB, generator=generator)


def make(
    canvas: Canvas,
    *,
    prompt: tuple[int, ...] = (3, 4, 5),
    max_tokens: int = 12,
    eos: tuple[int, ...] = (),
    shift: bool = False,
    sampling: Sampling | None = None,
) -> PlannedDecoder:
    return canvas_decoder(
        prompt,
        max_tokens,
        canvas,
        sampling or Sampling(),
        eos_token_ids=eos,
        vocab=PREDICTED,
        shift=shift,
    )


def drive(decoder: PlannedDecoder, model: FakeModel | None = None, *, limit: int = 200) -> PlannedDecoder:
    """Run a decoder to its end; it must get there within `limit` forwards."""
    model = model or FakeModel()
    while not decoder.done:
        assert decoder.num_forwards < limit, "does not end"
        decoder.update(model.forward(decoder.plan(), decoder.length))
    return decoder
