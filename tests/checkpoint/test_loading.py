"""Loading a model: its dtypes, a tensor-parallel rank's slices, and weights that are not finite."""

import json
import math
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES, random_model, rewrite
from gemma_models import gemma
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRanks
from torch import nn

from mbd_core.checkpoint import loading
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.models.decoder import Decoder
from mbd_core.models.mlp import Experts
from mbd_core.models.model_config import Fp8Parts, ModelConfig
from mbd_core.models.quantize import quantize_weights, round_to_int8
from mbd_core.models.shard import Shard, served_dim
from mbd_core.ops.attention.whole import DenseAttention


def test_weights_stay_as_stored_unless_asked(tmp_path: Path) -> None:
    save_model(tmp_path / "m", random_model(FAMILIES["llada2"]), dtype=torch.bfloat16)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    bias = "model.layers.1.mlp.gate.expert_bias"
    wanted = random_model(FAMILIES["llada2"]).state_dict()[bias]
    assert torch.equal(load_file(tmp_path / "m" / "model.safetensors")[bias], wanted)
    for dtype in (None, torch.bfloat16, torch.float32):
        state = load_model(tmp_path / "m", dtype=dtype).state_dict()
        assert state.pop(bias).dtype == torch.float32
        assert {t.dtype for t in state.values()} == {dtype or torch.bfloat16}


def test_mixed_dtypes_are_loaded_in_the_one_that_config_names(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].half()
    save_file(weights, folder / "model.safetensors")
    for key, other in (("torch_dtype", "dtype"), ("dtype", "torch_dtype")):
        rewrite(folder / "config.json", **{key: "bfloat16", other: None})
        assert {t.dtype for t in load_model(folder).state_dict().values()} == {torch.bfloat16}
    rewrite(folder / "config.json", dtype=None, torch_dtype=None)
    with pytest.raises(ValueError, match="dtypes"):
        load_model(folder)


def random_logits(model: Decoder) -> torch.Tensor:
    ids = torch.randint(model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden = model(ids, torch.arange(12).expand(2, 12), DenseAttention(torch.ones(1, 1, 12, 12).bool()))
        return model.logits(hidden)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("experts", ["per_expert", "fused"])
def test_two_ranks_make_one_model(tmp_path: Path, config: ModelConfig, experts, monkeypatch) -> None:
    save_model(tmp_path / "m", random_model(config), experts=experts)
    whole = load_model(tmp_path / "m")
    reads = 0

    class Counted:
        def __init__(self, file):
            self.file = file

        def get_slice(self, name):
            part = self.file.get_slice(name)

            class Slice:
                def __getitem__(self, where):
                    nonlocal reads
                    tensor = part[where]
                    reads += tensor.numel()
                    return tensor

            return Slice()

    @contextmanager
    def counted(path):
        with opened(path) as file:
            yield Counted(file)

    opened = loading.open_file
    monkeypatch.setattr(loading, "open_file", counted)
    together = ThreadRanks(2)
    ranks = []
    for r in range(2):
        reads = 0
        ranks.append(load_model(tmp_path / "m", shard=Shard(rank=r, size=2), reduce=together.reduce(r)))
        assert reads == sum(t.numel() for t in ranks[r].state_dict().values())
    for name, tensor in whole.state_dict().items():
        parts, dim = [r.state_dict()[name] for r in ranks], served_dim(name)
        assert torch.equal(tensor, parts[0] if dim is None else torch.cat(parts, dim)), name
    assert ranks[0].config.num_kv_heads * 2 == config.num_kv_heads
    found = together.run(lambda rank: random_logits(ranks[rank]))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], random_logits(whole), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="rank 1 of 2"):
        save_model(tmp_path / "part", ranks[1])


def test_sizes_that_do_not_divide_are_named(tmp_path: Path) -> None:
    save_model(tmp_path / "m", random_model(FAMILIES["llada2"]))
    with pytest.raises(ValueError, match="num_key_value_heads=2"):
        load_model(tmp_path / "m", shard=Shard(rank=0, size=4))
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Shard(rank=2, size=2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    """In a stacked expert, in one of several tensors stored as one, and in the last place of a norm."""
    save_model(tmp_path / "m", random_model(FAMILIES["llada2"]), dtype=dtype)
    path = tmp_path / "m" / "model.safetensors"
    weights = load_file(path)
    assert load_model(tmp_path / "m").model.norm.weight.dtype == dtype
    for name in (
        "model.layers.1.mlp.experts.5.up_proj.weight",
        "model.layers.0.attention.query_key_value.weight",
        "model.norm.weight",
        "model.layers.1.mlp.gate.expert_bias",
    ):
        bad = weights[name].clone()
        bad.view(-1)[-1] = value
        save_file(weights | {name: bad}, path)
        with pytest.raises(ValueError, match=name):
            load_model(tmp_path / "m")


def test_values_that_a_narrower_dtype_cannot_hold_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = 1e6
    save_file(weights, folder / "model.safetensors")
    assert load_model(folder, dtype=torch.bfloat16).model.norm.weight[3].item() == pytest.approx(1e6, rel=1e-2)
    with pytest.raises(ValueError, match=r"'model.norm.weight' .*finite"):
        load_model(folder, dtype=torch.float16)


@pytest.mark.parametrize(
    ("family", "parts"),
    [("sdar", None), ("llada2", None), ("gemma", None), ("dream", "all"), ("llada2", "all"), ("llada2", "experts")],
)
def test_a_model_is_rounded_layer_by_layer(
    family: str, parts: Fp8Parts | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No layer is wide in memory when the next one is read, and the weights are those of the whole model, rounded."""
    save_model(tmp_path / "m", gemma() if family == "gemma" else random_model(FAMILIES[family]))
    wide_layers: list[list[int]] = []
    round_one = loading._round

    def watch(model: Decoder, *how: Any) -> None:
        layers = model.model.layers
        products = {
            n: [m for m in layer.modules() if isinstance(m, Experts | nn.Linear)] for n, layer in enumerate(layers)
        }
        wide_layers.append(
            [n for n, own in products.items() if any(not p.is_meta for m in own for p in m.parameters())]
        )
        round_one(model, *how)

    monkeypatch.setattr(loading, "_round", watch)
    dtype = torch.int8 if parts is None else torch.float32
    given = load_model(tmp_path / "m", dtype=dtype, fp8=parts)
    wide = load_model(tmp_path / "m", dtype=torch.float32)
    expected = round_to_int8(wide) if parts is None else quantize_weights(wide, parts)
    if parts != "experts":  # other products of the layers stay wide
        assert wide_layers == [[n] for n in range(wide.config.num_layers)]
    ours, theirs = given.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n].view(torch.uint8), theirs[n].view(torch.uint8)) for n in ours if ours[n].ndim)
    tokens = torch.arange(2, 18)
    attend = DenseAttention(torch.ones(1, 1, 16, 16, dtype=torch.bool))
    with torch.inference_mode():
        assert torch.equal(*(m(tokens[None], tokens[None] - 2, attend) for m in (given, expected)))


def test_experts_to_round_that_a_model_lacks_are_said_before_weights_are_read(tmp_path: Path) -> None:
    save_model(tmp_path / "m", random_model(FAMILIES["sdar"]))
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"].fill_(math.nan)
    save_file(tensors, file)
    with pytest.raises(ValueError, match="rounds experts and this SDARForCausalLM has none"):
        load_model(tmp_path / "m", fp8="experts")
