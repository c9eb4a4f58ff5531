"""Model folders of every family: exact round trips, tensor-parallel slices, a sentence for every wrong folder."""

import json
import math
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from mbd_core.checkpoint import loading as loader
from mbd_core.checkpoint.families import FAMILIES as ROWS
from mbd_core.checkpoint.families import read_config, write_config
from mbd_core.checkpoint.loading import load_config, load_generation_defaults, load_model, load_tokenizer, save_model
from mbd_core.checkpoint.safetensor_files import INDEX
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.model_config import ModelConfig, MoEConfig
from mbd_core.models.shard import Shard, split_dim
from mbd_core.ops.attention_dense import DenseAttention
from mbd_core.tasks.tiny_tokenizer import train_tokenizer

SIZES = {
    "architecture": "SDARForCausalLM", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2,
    "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "max_positions": 64,
    "tie_word_embeddings": False, "mask_token_id": 0, "eos_token_ids": (1,), "block_size": 4,
}  # fmt: skip
SDAR = ModelConfig(**(SIZES | {"num_heads": 4, "num_kv_heads": 2}))
WHOLE_SEQUENCE = {"qk_norm": False, "attention": "full", "block_size": 32}
FAMILIES = {
    "sdar": SDAR,
    "sdar-moe": replace(
        SDAR,
        architecture="SDARMoeForCausalLM",
        num_layers=4,
        moe=MoEConfig(
            num_experts=4, experts_per_token=2, intermediate_size=6, score="softmax", norm_topk_prob=True,
            sparse_step=2, dense_layers=(3,),
        ),
    ),
    "llada2": replace(
        SDAR,
        architecture="LLaDA2MoeModelLM",
        block_size=32,
        rotary_dim=4,
        moe=MoEConfig(
            num_experts=8, experts_per_token=2, intermediate_size=6, score="sigmoid", norm_topk_prob=True,
            num_shared_experts=2, expert_bias=True, num_groups=4, topk_groups=2, routed_scaling=2.5,
            first_dense_layers=1,
        ),
    ),
    "llada": replace(SDAR, architecture="LLaDAModelLM", num_heads=2, num_kv_heads=2, **WHOLE_SEQUENCE),
    "dream": replace(
        SDAR, architecture="DreamModel", head_dim=4, qkv_bias=True, shift_logits=True, **WHOLE_SEQUENCE
    ),
}  # fmt: skip


def random_model(config: ModelConfig, seed: int = 0) -> Decoder:
    """Every number drawn, gains, biases and routing offsets too, so that none can be lost unnoticed."""
    model = Decoder(config)
    init_weights(model, seed=seed, std=0.2)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.ndim == 1:
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    return model


def random_logits(model: Decoder) -> torch.Tensor:
    ids = torch.randint(model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden = model(ids, torch.arange(12).expand(2, 12), DenseAttention(torch.ones(1, 1, 12, 12).bool()))
        return model.logits(hidden)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = Decoder(ModelConfig(**SIZES))
    init_weights(model, seed=0)
    tokenizer = train_tokenizer(["some words to learn"], vocab_size=280)
    save_model(tmp_path / "model", model, tokenizer=tokenizer, generation={"buffer_size": 2})
    return tmp_path / "model"


def rewrite(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("tied", [False, True])
def test_round_trip(tmp_path: Path, tied: bool) -> None:
    model = Decoder(ModelConfig(**(SIZES | {"tie_word_embeddings": tied, "eos_token_ids": (1, 2)})))
    init_weights(model, seed=0)
    save_model(tmp_path / "m", model)
    again = load_model(tmp_path / "m")
    assert again.config == model.config
    assert ("lm_head.weight" in load_file(tmp_path / "m" / "model.safetensors")) is not tied
    for (name, a), (_, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    assert sum(p.numel() for p in again.parameters()) == model.config.num_parameters


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("experts", ["per_expert", "fused"])
def test_every_family_comes_back_from_several_files(tmp_path: Path, config: ModelConfig, experts) -> None:
    model = random_model(config)
    save_model(tmp_path / "m", model, experts=experts, max_shard_bytes=9000)
    files = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    again = load_model(tmp_path / "m")
    assert again.config == config == read_config(write_config(config))
    assert sum(p.numel() for p in again.parameters()) == config.num_parameters
    for (name, a), (_, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_families_call_their_tensors_what_their_authors_do(tmp_path: Path) -> None:
    found = {}
    for family, config in FAMILIES.items():
        save_model(tmp_path / family, random_model(config))
        found[family] = load_file(tmp_path / family / "model.safetensors")
    qkv = found["llada2"]["model.layers.1.attention.query_key_value.weight"]
    layer = load_model(tmp_path / "llada2").model.layers[1]
    assert torch.equal(qkv[:32], layer.self_attn.q_proj.weight)
    assert torch.equal(qkv[32:48], layer.self_attn.k_proj.weight)
    assert torch.equal(qkv[48:], layer.self_attn.v_proj.weight)
    assert torch.equal(found["llada2"]["model.layers.1.mlp.experts.5.up_proj.weight"], layer.mlp.experts.up_proj[5])
    assert {"model.word_embeddings.weight", "model.layers.1.mlp.gate.expert_bias",
            "model.layers.0.mlp.gate_proj.weight", "model.layers.1.attention.dense.weight",
            "model.layers.1.mlp.shared_experts.down_proj.weight"} <= found["llada2"].keys()  # fmt: skip
    assert {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.3.down_proj.weight",
            "model.layers.0.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight",
            } <= found["sdar-moe"].keys()  # fmt: skip
    assert found["llada"]["model.transformer.ff_out.weight"].shape == (300, 16)
    assert found["llada"]["model.transformer.blocks.0.ff_out.weight"].shape == (16, 24)
    assert "model.layers.0.self_attn.q_proj.bias" in found["dream"]
    assert not any("norm" in n and "self_attn" in n for n in found["dream"])


def test_ids_and_block_size_may_stand_in_generation_config() -> None:
    config = write_config(FAMILIES["llada2"])
    for key in ("mask_token_id", "eos_token_id", "block_size"):
        del config[key]
    with pytest.raises(ValueError, match=r"config.json and generation_config.json have no 'mask_token_id'"):
        read_config(config)
    read = read_config(config, {"mask_token_id": 7, "eos_token_id": [8, 9]})
    assert (read.mask_token_id, read.eos_token_ids, read.block_size) == (7, (8, 9), 32)
    assert read_config(config | {"mask_token_id": 6}, {"mask_token_id": 7, "eos_token_id": 8}).mask_token_id == 6


def test_config_dialects() -> None:
    config = write_config(FAMILIES["llada2"])
    assert read_config(config | {"model_type": "llada2_moe_veomni"}) == FAMILIES["llada2"]
    newer = {k: v for k, v in config.items() if k not in ("rope_theta", "rotary_dim", "partial_rotary_factor")}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert read_config(newer) == FAMILIES["llada2"]
    newer["rope_parameters"]["rope_type"] = "yarn"
    with pytest.raises(ValueError, match="rope_type='yarn'"):
        read_config(newer)
    with pytest.raises(ValueError, match=r"rotary_dim=4 but partial_rotary_factor=0.25"):
        read_config(config | {"partial_rotary_factor": 0.25})
    with pytest.raises(ValueError, match="model_type='sdar', which is not LLaDA2MoeModelLM's"):
        read_config(config | {"model_type": "sdar"})
    with pytest.raises(ValueError, match="embedding_size=512"):
        read_config(write_config(FAMILIES["llada"]) | {"embedding_size": 512})


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
    with pytest.raises(ValueError, match=r"several dtypes and config.json's dtype is None"):
        load_model(folder)


class Sum:
    """Ranks in threads that add their tensors up."""

    def __init__(self, size: int) -> None:
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def of(self, rank: int):
        def reduce(x: torch.Tensor) -> torch.Tensor:
            self.parts[rank] = x
            self.barrier.wait()
            total = torch.stack(self.parts).sum(0)
            self.barrier.wait()
            return total

        return reduce


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

    opened = loader.open_file
    monkeypatch.setattr(loader, "open_file", counted)
    total = Sum(2)
    ranks = []
    for r in range(2):
        reads = 0
        ranks.append(load_model(tmp_path / "m", shard=Shard(rank=r, size=2), reduce=total.of(r)))
        assert reads == sum(t.numel() for t in ranks[r].state_dict().values())
    for name, tensor in whole.state_dict().items():
        parts, dim = [r.state_dict()[name] for r in ranks], split_dim(name)
        assert torch.equal(tensor, parts[0] if dim is None else torch.cat(parts, dim)), name
    assert ranks[0].config.num_kv_heads * 2 == config.num_kv_heads
    found = {}
    threads = [threading.Thread(target=lambda r=r: found.update({r: random_logits(ranks[r])})) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], random_logits(whole), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="rank 1 of 2 holds only its part"):
        save_model(tmp_path / "part", ranks[1])


def test_sizes_that_do_not_divide_are_named(tmp_path: Path) -> None:
    save_model(tmp_path / "m", random_model(FAMILIES["llada2"]))
    with pytest.raises(ValueError, match="num_key_value_heads=2 does not divide among 4 tensor-parallel ranks"):
        load_model(tmp_path / "m", shard=Shard(rank=0, size=4))
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Shard(rank=2, size=2)


class RowAttention:
    """Packed rows of `lengths` tokens, each attending to itself alone."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __call__(self, layer, q, k, v):
        rows = zip(*(x.split(self.lengths) for x in (q, k, v)), strict=True)
        return torch.cat([self.attend(*(x.clone().transpose(0, 1)[None] for x in row)) for row in rows])

    @staticmethod
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_split_rows_do_not_notice_each_other(config: ModelConfig) -> None:
    wider = replace(config, hidden_size=136, head_dim=34, num_heads=4, intermediate_size=200)
    model = random_model(wider)
    generator = torch.Generator().manual_seed(2)
    lengths = [1, 8, 3, 16, 8, 1]
    ids = torch.randint(300, (sum(lengths),), generator=generator)
    soft = torch.rand(sum(lengths), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        hidden = model(ids, positions, RowAttention(lengths), soft_weight=soft, split=lengths)
        logits = model.logits(hidden, split=lengths)
        together = model.logits(model(ids, positions, RowAttention(lengths), soft_weight=soft))
        torch.testing.assert_close(logits, together, atol=1e-4, rtol=1e-4)
        for n, i, p, w, row in zip(lengths, *(x.split(lengths) for x in (ids, positions, soft, logits)), strict=True):
            alone = model(i.clone(), p.clone(), RowAttention([n]), soft_weight=w.clone(), split=[n])
            assert torch.equal(model.logits(alone, split=[n]), row)


def test_soft_embeddings_lie_between_token_and_mask() -> None:
    model = random_model(SDAR)
    ids, table = torch.tensor([5, 6, 7, 8]), model.model.embed_tokens.weight
    weight = torch.tensor([1.0, 0.0, 0.25, 0.9])
    with torch.no_grad():
        soft = model.embed(ids, weight)
        assert torch.equal(soft[0], table[5])
        torch.testing.assert_close(soft[1], table[0], rtol=1e-4, atol=1e-6)
        for row in (2, 3):
            w, token, mask = weight[row], table[ids[row]], table[0]
            torch.testing.assert_close(soft[row].norm(), w * token.norm() + (1 - w) * mask.norm(), rtol=1e-4, atol=0)
            cosine = F.cosine_similarity(soft[row], w * token + (1 - w) * mask, dim=0)
            assert float(cosine) == pytest.approx(1)
        assert torch.equal(model.embed(ids, torch.ones(4)), model.embed(ids))
        ones = {"soft_weight": torch.ones(4)}
        mask = DenseAttention(torch.ones(1, 1, 4, 4).bool())
        args = (ids[None], torch.arange(4)[None], mask)
        assert torch.equal(model(*args, **ones), model(*args))


def test_generation_defaults_and_tokenizer(folder: Path) -> None:
    assert load_generation_defaults(folder) == {
        "eos_token_id": [1], "mask_token_id": 0, "block_size": 4, "buffer_size": 2,
    }  # fmt: skip
    tokenizer = load_tokenizer(folder, load_config(folder))
    text = "some wörds\n    12 = 3 <|mask|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|mask|>") == [0]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|user|>x<|assistant|>"


def test_unfinished_save_leaves_the_old_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args, **kwargs):
        raise OSError("disk full")

    before = (folder / "model.safetensors").read_bytes()
    model = load_model(folder)
    monkeypatch.setattr("mbd_core.checkpoint.safetensor_files.save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        save_model(folder, model)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


def test_wrong_folders_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a model folder: it has no config.json"):
        load_model(tmp_path)
    weights = load_file(folder / "model.safetensors")

    def with_tensors(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_model(folder)

    name = "model.layers.1.mlp.up_proj.weight"
    with_tensors({k: v for k, v in weights.items() if k != name}, f"lacks the tensor '{name}', which")
    with_tensors(weights | {"surprise": torch.zeros(1)}, "unexpected tensor 'surprise'")
    with_tensors(weights | {name: torch.zeros(3, 3)}, rf"'{name}' has shape \(3, 3\)")
    save_file(weights, folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged or cut short at tensor 'model"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks the weights file model.safetensors"):
        load_model(folder)


def test_wrong_shards_are_named(folder: Path) -> None:
    save_model(folder, load_model(folder), max_shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = index["weight_map"]["model.norm.weight"]
    shard = load_file(folder / file)
    save_file(shard | {"lm_head.weight": torch.zeros(300, 16)}, folder / file)
    with pytest.raises(ValueError, match=r"both hold the tensor 'lm_head.weight'"):
        load_model(folder)
    save_file({n: t for n, t in shard.items() if n != "model.norm.weight"}, folder / file)
    with pytest.raises(ValueError, match=f"{file} lacks the tensor 'model.norm.weight'"):
        load_model(folder)
    (folder / file).unlink()
    with pytest.raises(ValueError, match=rf"lacks the weights file {file}, which holds 'model\.\S+' and \d+ more"):
        load_model(folder)


def change_index(folder: Path, **files: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    rewrite(folder / INDEX, weight_map=index["weight_map"] | files)


def first(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def cast(folder: Path, dtype: torch.dtype) -> None:
    weights = load_file(first(folder))
    save_file(weights | {"model.embed_tokens.weight": weights["model.embed_tokens.weight"].to(dtype)}, first(folder))


def be_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda f: (f / INDEX).unlink(), "lacks the weights file model.safetensors, and model.safeten"),
    "index without map": (lambda f: (f / INDEX).write_text("{}"), "index.json has no weight_map"),
    "index is a list": (lambda f: (f / INDEX).write_text("[]"), "index.json holds a list, not a JSON object"),
    "index with a number": (lambda f: change_index(f, x=5), "index.json has the tensor 'x' in 5, which is no file"),
    "index leads away": (lambda f: change_index(f, x="../x"), "has the tensor 'x' in '../x', which is no file"),
    "index with a lost file": (lambda f: change_index(f, x="y.safetensors"), "lacks the weights file y.safetensors"),
    "index with a lost tensor": (lambda f: change_index(f, x=first(f).name), "00001-of-.* lacks the tensor 'x'"),
    "empty file": (lambda f: first(f).write_bytes(b""), "00001-of-.* is damaged or cut short in its header"),
    "cut header": (lambda f: first(f).write_bytes(first(f).read_bytes()[:40]), "00001-of-.* in its header"),
    "odd header": (lambda f: first(f).write_bytes(b"\x08" + bytes(7) + b'{"a": 1}'), "00001-of-.* in its header"),
    "longer file": (lambda f: first(f).write_bytes(first(f).read_bytes() + b"x"), "00001-of-.* is damaged"),
    "folder for a file": (lambda f: be_a_folder(first(f)), "00001-of-.* cannot be read: Is a directory"),
    "whole numbers": (lambda f: cast(f, torch.int8), "00001-of-.*: tensor 'model.embed_.*' has dtype I8; known: "),
    "config is a folder": (lambda f: be_a_folder(f / "config.json"), "config.json cannot be read: Is a directory"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json holds a list"),
    "config is no text": (lambda f: (f / "config.json").write_bytes(b"\xff"), "config.json is not valid JSON"),
    "generation is no JSON": (lambda f: (f / "generation_config.json").write_text("{"), "^[^:]*/generation_config.j"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_one_sentence(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    save_model(folder, load_model(folder), max_shard_bytes=20_000)
    load_model(folder)
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_a_file_is_no_model_folder(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json is not a model folder: it has no config.json"):
        load_model(folder / "config.json")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    """In a stacked expert, in one of several tensors stored as one, and in the last place of a norm."""
    save_model(tmp_path / "m", random_model(FAMILIES["llada2"]), dtype=dtype)
    path = tmp_path / "m" / "model.safetensors"
    weights = load_file(path)
    assert load_model(tmp_path / "m").model.norm.weight.dtype == dtype
    for name in ("model.layers.1.mlp.experts.5.up_proj.weight", "model.layers.0.attention.query_key_value.weight",
                 "model.norm.weight", "model.layers.1.mlp.gate.expert_bias"):  # fmt: skip
        bad = weights[name].clone()
        bad.view(-1)[-1] = value
        save_file(weights | {name: bad}, path)
        with pytest.raises(ValueError, match=f"{path}: tensor '{name}' has values that are not finite in "):
            load_model(tmp_path / "m")


def test_values_that_a_narrower_dtype_cannot_hold_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = 1e6
    save_file(weights, folder / "model.safetensors")
    assert load_model(folder, dtype=torch.bfloat16).model.norm.weight[3].item() == pytest.approx(1e6, rel=1e-2)
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' has values that are not finite in float16"):
        load_model(folder, dtype=torch.float16)


def test_weights_can_be_read_by_others(folder: Path) -> None:
    assert {path.stat().st_mode & 0o444 for path in folder.iterdir()} == {0o444}


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_wrong_vocabularies_are_named(tmp_path: Path, config: ModelConfig) -> None:
    save_model(tmp_path / "m", random_model(config))
    rewrite(tmp_path / "m" / "config.json", vocab_size=320, embedding_size=None)
    with pytest.raises(
        ValueError, match=r"model.safetensors: tensor '\S+' has 300 rows, config.json says vocab_size=320"
    ):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures=\['GPT2LMHeadModel'\]; supported: DreamModel, "),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"mask_token_id": 1}, "mask_token_id=1 is also an EOS id"),
        ({"mask_token_id": 999}, "mask_token_id=999 lies outside"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"attention_bias": True}, "attention_bias=True"),
    ],
)
def test_wrong_configs_are_named(folder: Path, changes: dict, message: str) -> None:
    rewrite(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        load_config(folder)


def test_tokenizer_that_disagrees_is_refused(folder: Path) -> None:
    for file in ("config.json", "generation_config.json"):
        rewrite(folder / file, mask_token_id=5)
    with pytest.raises(ValueError, match="mask_token_id=5 but the tokenizer's"):
        load_tokenizer(folder, load_config(folder))
    for file in ("config.json", "generation_config.json"):
        rewrite(folder / file, mask_token_id=0)
    for damaged in ("{}", "[]", "{", '{"added_tokens": []}'):
        (folder / "tokenizer.json").write_text(damaged)
        with pytest.raises(ValueError, match="has no tokenizer that can be loaded: "):
            load_tokenizer(folder, load_config(folder))


def test_tokenizer_without_a_mask_token_needs_a_special_token_there(folder: Path) -> None:
    """LLaDA's, as released: its mask token is a special token like others."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["mask_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = load_config(folder)
    tokenizer = load_tokenizer(folder, config)
    assert (tokenizer.mask_token, tokenizer.encode("<|mask|>")) == (None, [config.mask_token_id])
    with pytest.raises(ValueError, match="mask_token_id=200 but the tokenizer's mask token None"):
        load_tokenizer(folder, replace(config, mask_token_id=200))


def test_dreams_tokenizer_needs_no_code_of_its_own(tmp_path: Path) -> None:
    """Dream and DiffuCoder, as released: vocabulary, merges, and a class in a file of the checkpoint."""
    letters = [*"abcdefgh", "\u0120", "ab"]
    (tmp_path / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenization_dream.py").write_text("raise RuntimeError('this was run')")
    special = {"10": {"content": "<|endoftext|>", "special": True}, "11": {"content": "<|mask|>", "special": True}}
    settings = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": special,
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = replace(FAMILIES["dream"], mask_token_id=11)
    tokenizer = load_tokenizer(tmp_path, config)
    assert tokenizer.encode("ab ab<|mask|>") == [9, 8, 9, 11]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "OtherTokenizer"}))
    with pytest.raises(ValueError, match=r"has no tokenizer that can be loaded: .*custom code"):
        load_tokenizer(tmp_path, config)


BAD_VALUES: dict[object, list[object]] = {
    int: ["7", 7.0, True, -1, [7], {}, 2**31],
    int | None: ["7", 7.0, True, -1, 0, [7]],
    float: ["7", True, 0, -1.0, math.nan, math.inf, [7.0]],
    bool: [0, 1, "true", [True], {}],
    tuple[int, ...]: ["7", 7.0, True, -1, [7.5], [[7]], [True], {}],
}


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_a_value_of_another_type_is_named(config: ModelConfig) -> None:
    """Every key that is read, with every kind of value that it cannot have."""
    family, written = ROWS[config.architecture], write_config(config)
    for kind, keys in ((ModelConfig, family.keys), (MoEConfig, family.moe_keys or {})):
        for ours, theirs in keys.items():
            for value in BAD_VALUES[get_type_hints(kind)[ours]]:
                with pytest.raises(ValueError, match=rf"^config.json has {theirs}=") as caught:
                    read_config({**written, theirs: value})
                assert "\n" not in str(caught.value)
            if theirs not in (*family.defaults, "rotary_dim"):
                with pytest.raises(ValueError, match=f"no '{theirs}', which {config.architecture} needs"):
                    read_config({**written, theirs: None})
    for key, wanted in family.fixed.items():
        for value in ("other", 2, int(wanted) if isinstance(wanted, bool) else [wanted]):
            with pytest.raises(ValueError, match=f"config.json has {key}=.* is supported with {wanted!r} only"):
                read_config({**written, key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": "SDARForCausalLM"}, "^config.json has architectures='SDARForCausalLM'; supported: "),
        ({"architectures": ["SDARForCausalLM", "DreamModel"]}, r"architectures=\['SDARForCausalLM', 'DreamModel'\]"),
        ({"architectures": [{}]}, r"architectures=\[\{\}\]; supported: "),
        ({"architectures": None}, "architectures=None; supported: "),
        ({"quantization_config": {"quant_method": "fp8"}}, "^config.json has a quantization_config; take a release"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\]; it must be an object"),
        ({"rotary_dim": "4"}, "rotary_dim='4'; it must be a whole number"),
        ({"partial_rotary_factor": True}, "partial_rotary_factor=True; it must be a number above 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5; it must be at most 1"),
        ({"eos_token_id": []}, "^config.json: eos_token_id is an empty list"),
        ({"n_group": 3}, "^config.json: num_experts=8 does not divide into n_group=3"),
    ],
)
def test_config_that_no_decoder_fits_is_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(write_config(FAMILIES["llada2"]) | changes)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"mask_token_id": "0"}, "^generation_config.json has mask_token_id='0'; it must be a whole number"),
        ({"mask_token_id": True}, "^generation_config.json has mask_token_id=True"),
        ({"eos_token_id": [1.0]}, r"^generation_config.json has eos_token_id=\[1.0\]; it must be a list"),
        ({"block_size": 0}, "^generation_config.json has block_size=0; it must be a whole number from 1"),
        ({"mask_token_id": 999}, "^config.json with generation_config.json: mask_token_id=999 lies outside"),
    ],
)
def test_a_wrong_value_in_generation_config_names_that_file(value: dict, message: str) -> None:
    config = {k: v for k, v in write_config(SDAR).items() if k not in value}
    with pytest.raises(ValueError, match=message):
        read_config(config, value)
