"""LoRA adapters in the forward: each row of tokens gets the numbers of a model whose weights hold its adapter."""

from pathlib import Path

import pytest
import torch
from adapter_folders import merged, write_adapter
from family_models import FAMILIES, random_model
from torch import Tensor

from mbd_core.checkpoint.adapter import read_adapter
from mbd_core.models.decoder import Decoder
from mbd_core.models.fused import fuse
from mbd_core.models.lora import AdapterSlots, TokenAdapters
from mbd_core.models.quantize import quantize_weights
from mbd_core.models.shard import Shard
from mbd_core.ops.attention.whole import DenseAttention

LENGTHS, LATEST = [3, 4, 5, 4], 40
ROW_T = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
SLOTS_K = [2, 0, 1, 2]  # of each row
TOKENS_T = torch.randint(300, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
POSITIONS_T = torch.arange(sum(LENGTHS)) * 2


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Packed heads (T, H, C); tokens see their own row."""
    seen = ROW_T[:, None] == ROW_T if len(q) == len(ROW_T) else torch.ones(len(q), len(q), dtype=torch.bool)
    return DenseAttention(seen[None, None])(layer, q[None], k[None], v[None])[0]


def loaded(model: Decoder, folders: list[Path]) -> TokenAdapters:
    """The adapters in slots 1, 2, ... of three, chosen for each token as `SLOTS_K` says."""
    slots = AdapterSlots(model.config, Shard(), model.model.norm.weight, num_slots=3, max_rank=5)
    for number, folder in enumerate(folders, start=1):
        slots.write(number, read_adapter(folder, model.config))
    return slots.choose(torch.tensor(SLOTS_K)[ROW_T])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    base = tmp_path_factory.mktemp("adapters")
    return {
        family: [
            write_adapter(base / f"{family}-a", config, seed=1, rank=2),
            write_adapter(base / f"{family}-b", config, seed=2, rank=5, use_rslora=True),
        ]
        for family, config in FAMILIES.items()
    }


def by_rows(model: Decoder, folders: list[Path]) -> Tensor:
    """Each row alone, by the model that has its adapter in its weights."""
    models = [model, *(merged(model, folder) for folder in folders)]
    parts = zip(SLOTS_K, TOKENS_T.split(LENGTHS), POSITIONS_T.split(LENGTHS), strict=True)
    with torch.no_grad():
        return torch.cat([models[slot](tokens, positions, attend) for slot, tokens, positions in parts])


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_has_the_numbers_of_its_merged_model(folders: dict[str, list[Path]], family: str) -> None:
    model = random_model(FAMILIES[family]).double()
    wanted = by_rows(model, folders[family])
    with torch.no_grad():
        plain = model(TOKENS_T, POSITIONS_T, attend)
        adapters = loaded(model, folders[family])
        found = model(TOKENS_T, POSITIONS_T, attend, adapters=adapters)
        split = model(TOKENS_T, POSITIONS_T, attend, adapters=adapters, split=LENGTHS)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(split, wanted, atol=1e-5, rtol=1e-5)
    without = torch.tensor(SLOTS_K)[ROW_T] == 0
    assert torch.equal(found[without], plain[without]), "a row without an adapter has its own numbers, bit for bit"
    assert not torch.isclose(found[~without], plain[~without], atol=1e-3).all(1).any(), "every adapted token changes"
    fused = fuse(model, num_positions=LATEST).forward(TOKENS_T, POSITIONS_T, attend, adapters=adapters)
    torch.testing.assert_close(fused, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_fused_rows_without_an_adapter_keep_their_bits(folders: dict[str, list[Path]], family: str) -> None:
    model = random_model(FAMILIES[family])
    fused = fuse(model, num_positions=LATEST)
    plain = fused.forward(TOKENS_T, POSITIONS_T, attend)
    found = fused.forward(TOKENS_T, POSITIONS_T, attend, adapters=loaded(model, folders[family]))
    without = torch.tensor(SLOTS_K)[ROW_T] == 0
    assert torch.equal(found[without], plain[without]) and not torch.equal(found, plain)


def test_beside_fp8_weights_an_adapter_is_not_rounded(folders: dict[str, list[Path]]) -> None:
    """Layers with FP8 products are not fused; the adapter's products are added to theirs."""
    model = quantize_weights(random_model(FAMILIES["sdar"]), "all")
    adapters = loaded(model, folders["sdar"])
    with torch.no_grad():
        wanted = model(TOKENS_T, POSITIONS_T, attend, adapters=adapters)
        plain = model(TOKENS_T, POSITIONS_T, attend)
    found = fuse(model, num_positions=LATEST).forward(TOKENS_T, POSITIONS_T, attend, adapters=adapters)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert not torch.isclose(wanted, plain, atol=1e-3).all()


def test_a_cleared_slot_holds_nothing_of_a_larger_adapter(folders: dict[str, list[Path]]) -> None:
    config = FAMILIES["sdar"]
    small, large = (read_adapter(folder, config) for folder in folders["sdar"])
    like = torch.zeros(1)
    slots, fresh = (AdapterSlots(config, Shard(), like, num_slots=1, max_rank=5) for _ in range(2))
    slots.write(1, large)
    slots.clear(1)
    slots.write(1, small)
    fresh.write(1, small)
    x = torch.randn(4, config.hidden_size)
    for one, other in zip(slots.layers, fresh.layers, strict=True):
        assert torch.equal(one["qkv"].right, other["qkv"].right)
        assert torch.equal(one["qkv"].inner(x, torch.ones(4, 1)), other["qkv"].inner(x, torch.ones(4, 1)))


@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_the_ranks_partial_sums_are_the_whole_models(folders: dict[str, list[Path]], family: str) -> None:
    """Of every product: rows of B side by side, or sums over columns of A."""
    config = FAMILIES[family]
    half = config.sharded(2)
    adapter = read_adapter(folders[family][1], half, shard=Shard(rank=1, size=2))
    like = torch.zeros(1, dtype=torch.float64)
    whole = AdapterSlots(config, Shard(), like, num_slots=1, max_rank=5)
    ranks = [AdapterSlots(half, Shard(rank=r, size=2), like, num_slots=1, max_rank=5) for r in range(2)]
    for slots in (whole, *ranks):
        slots.write(1, adapter)
    ones_T = torch.ones(4, dtype=torch.int64)
    for layer, groups in enumerate(whole.layers):
        for product, width in (("q_proj", config.hidden_size), ("o_proj", config.num_heads * config.head_dim)):
            x = torch.randn(4, width, dtype=torch.float64)
            wanted = whole.choose(ones_T).of(layer)(product, x)
            parts = x.chunk(2, dim=-1) if product == "o_proj" else (x, x)
            found = [r.choose(ones_T).of(layer)(product, part) for r, part in zip(ranks, parts, strict=True)]
            joined = sum(found) if product == "o_proj" else torch.cat(found, dim=-1)
            torch.testing.assert_close(joined, wanted)
        assert groups.keys() == ranks[0].layers[layer].keys()
