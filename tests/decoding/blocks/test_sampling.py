"""Drawn tokens: what is refused, what they follow, and that only truncation sorts a vocabulary."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_device import FakeDevice, fake_device
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mbd_core.decoding.blocks.sampling import Draw, Vocab, choose, gumbel
from mbd_core.decoding.blocks.sampling_config import Sampling

VOCAB = Vocab(mask_token_id=0, size=46)
P, V = 600, 48

PLAIN = Sampling(temperature=0.9)
TRUNCATED = (
    Sampling(temperature=0.9, top_k=5),
    Sampling(temperature=0.7, top_p=0.6),
    Sampling(temperature=1.4, top_k=9, top_p=0.8),
    Sampling(temperature=0.9, top_k=1000),
)
GREEDY = Sampling(top_k=3)
EVERY_KIND = (PLAIN, *TRUNCATED, GREEDY)


class SortedRows(TorchDispatchMode):
    """Counts the positions whose vocabulary is sorted, wholly or in part."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ("sort", "topk")):
            self.count += args[0].shape[0]
        return func(*args, **(kwargs or {}))


def draw_of(samplings: list[Sampling], **changes: Any) -> Draw:
    """The draw of one position a sampling."""
    return Draw(
        temperature_P=torch.tensor([s.temperature for s in samplings], dtype=torch.float64),
        top_p_P=torch.tensor([s.top_p for s in samplings], dtype=torch.float64),
        top_k_P=torch.tensor([s.top_k for s in samplings]),
        seed_P=torch.arange(len(samplings)) % 7,
        position_P=torch.arange(len(samplings)),
        forward_P=torch.arange(len(samplings)) % 3,
        **changes,
    )


def logits(seed: int = 0) -> Tensor:
    return 3.0 * torch.randn(P, V, generator=torch.Generator().manual_seed(seed))


def cycle(samplings: tuple[Sampling, ...]) -> list[Sampling]:
    return [samplings[i % len(samplings)] for i in range(P)]


def sorted_draw(logits_PV: Tensor, draw: Draw) -> Tensor:
    """The definition: every vocabulary in order, cut by top_k, then by top_p, and drawn from what is left."""
    temperature_P = torch.where(draw.temperature_P > 0, draw.temperature_P, 1.0).float()
    scaled = VOCAB.exclude_(logits_PV / temperature_P[:, None], -torch.inf)
    order = scaled.argsort(dim=-1, descending=True, stable=True)
    p = scaled.gather(-1, order).softmax(dim=-1)
    limit_P = torch.where(draw.top_k_P > 0, draw.top_k_P, V)
    p = p.masked_fill(torch.arange(V) >= limit_P[:, None], 0.0)
    p = p / p.sum(-1, keepdim=True)
    p = p.masked_fill((p.cumsum(-1) - p) >= draw.top_p_P[:, None], 0.0)
    place = (p.log() + gumbel(draw, order)).argmax(dim=-1, keepdim=True)
    drawn_P = order.gather(-1, place)[:, 0]
    return torch.where(draw.temperature_P > 0, drawn_P, VOCAB.likeliest(logits_PV)[0])


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_device() as found:
        yield found


@pytest.mark.parametrize("samplings", [(PLAIN,), (PLAIN, GREEDY)])
def test_nothing_is_sorted_where_no_request_truncates(samplings: tuple[Sampling, ...]) -> None:
    given = cycle(samplings)
    assert not any(s.truncates for s in given)
    for draw in (draw_of(given), draw_of(given, truncates=False)):
        with SortedRows() as rows:
            choose(logits(), VOCAB, draw)
        assert rows.count == 0


def test_only_positions_of_requests_that_truncate_are_sorted() -> None:
    given = cycle(EVERY_KIND)
    with SortedRows() as rows:
        choose(logits(), VOCAB, draw_of(given))
    assert rows.count == sum(s.truncates for s in given) == P * len(TRUNCATED) // len(EVERY_KIND)


@pytest.mark.parametrize("samplings", [(PLAIN,), TRUNCATED, EVERY_KIND])
def test_tokens_are_those_of_a_draw_that_sorts_everything(samplings: tuple[Sampling, ...]) -> None:
    for seed in range(20):
        draw = draw_of(cycle(samplings))
        assert torch.equal(choose(logits(seed), VOCAB, draw)[0], sorted_draw(logits(seed), draw))


def test_a_position_does_not_depend_on_whether_others_truncate() -> None:
    given = cycle(EVERY_KIND)
    plain = torch.tensor([not s.truncates for s in given])
    mixed = choose(logits(), VOCAB, draw_of(given))
    alone = choose(logits()[plain], VOCAB, dataclasses.replace(draw_of(given).select(plain), truncates=False))
    for one, other in zip(mixed, alone, strict=True):
        assert torch.equal(one[plain], other)


def test_a_device_draws_the_hosts_tokens_and_the_host_waits_for_nothing(device: FakeDevice) -> None:
    given = cycle(EVERY_KIND)
    here, draw = logits(), draw_of(given)
    wanted_token, wanted_confidence = choose(here, VOCAB, draw)
    tensors = (getattr(draw, f.name) for f in dataclasses.fields(Draw) if f.name != "truncates")
    token, confidence = choose(device.put(here), VOCAB, Draw(*(device.put(t) for t in tensors)))
    assert not device.waits
    assert torch.equal(token.content, wanted_token) and torch.equal(confidence.content, wanted_confidence)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": 1e-30}, "temperature=1e-30"),
        ({"temperature": "hot"}, 'temperature="hot"'),
        ({"top_p": 0}, "top_p=0"),
        ({"top_p": 1e-60}, "top_p=1e-60"),
        ({"top_k": -1}, "top_k=-1"),
        ({"seed": 1.5}, "seed=1.5"),
    ],
)
def test_sampling_refuses_what_it_cannot_draw_with(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        Sampling(**fields)


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (40, 8192), (3, 49152), (7, 100)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_id_is_the_first_of_the_highest_of_a_whole_vocabulary(shape: Any, dtype: torch.dtype) -> None:
    """Positions in parts and ids in groups give the bits that one search of everything gives, also among equals."""
    logits = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[1::3, 5] = torch.nan
    vocab = Vocab(mask_token_id=2, size=shape[1] - 3)
    highest, token = vocab.exclude_(logits.float().softmax(-1), -1.0).max(-1)
    found = vocab.likeliest(logits)
    assert torch.equal(found[0], token)
    torch.testing.assert_close(found[1], highest, rtol=0, atol=0, equal_nan=True)
