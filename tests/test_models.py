"""Model folders of every family: exact round trips, tensor-parallel slices, a sentence for every wrong folder."""

import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from mbd_core.models import loader
from mbd_core.models.config import ModelConfig, MoEConfig
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.families import read_config, write_config
from mbd_core.models.loader import load_config, load_generation_defaults, load_model, load_tokenizer, save_model
from mbd_core.models.shard import Shard, split_dim
from mbd_core.ops.dense import DenseAttention
from mbd_core.recipes import TINY_MODEL
from mbd_core.tasks.tokenizer import train_tokenizer

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
    monkeypatch.setattr("mbd_core.models.safetensor_files.save_file", broken)
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
    with_tensors({k: v for k, v in weights.items() if k != name}, f"lacks 1 tensors, the first is '{name}'")
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
    rewrite(folder / "config.json", mask_token_id=5)
    with pytest.raises(ValueError, match="mask_token_id=5 but the tokenizer's"):
        load_tokenizer(folder, load_config(folder))


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", "64"), ("num_attention_heads", 0), ("vocab_size", 1.5), ("rope_theta", "x")]
)
def test_a_size_that_is_no_number_is_named(key: str, value: object) -> None:
    written = write_config(TINY_MODEL)
    with pytest.raises(ValueError, match=f"config.json has {key}="):
        read_config({**written, key: value})
