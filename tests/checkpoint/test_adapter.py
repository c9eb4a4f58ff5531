"""Adapters in PEFT's layout: what PEFT writes is read as PEFT computes it, and what is not supported is refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapter_folders import PREFIX, adaptable, write_adapter, write_settings
from family_models import FAMILIES, random_model, rewrite
from safetensors.torch import load_file, save_file
from torch import Tensor

from mbd_core.checkpoint.adapter import read_adapter
from mbd_core.models.lora import AdapterSlots, adapted_modules
from mbd_core.models.shard import Shard
from mbd_core.ops.attention.whole import DenseAttention

SDAR = FAMILIES["sdar"]
TOKENS, POSITIONS = torch.arange(9) + 3, torch.arange(9)


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    dense = DenseAttention(torch.ones(1, 1, len(q), len(q), dtype=torch.bool))
    return dense(layer, q[None], k[None], v[None])[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
        {"r": 3, "lora_alpha": 8, "use_rslora": True, "target_modules": "all-linear", "init_lora_weights": "gaussian"},
        {"r": 2, "lora_alpha": 1, "target_modules": ["down_proj", "o_proj"], "layers_to_transform": [1]},
    ],
)
def test_what_peft_saves_is_computed_as_peft_does(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The decoder's modules have the names of Qwen3's and SDAR's, so PEFT can wrap it as it is."""
    model = random_model(SDAR).double()
    with torch.no_grad():
        plain = model(TOKENS, POSITIONS, attend)
    config = peft.LoraConfig(exclude_modules=["lm_head"], lora_dropout=0.1, **settings)
    wrapped = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        wanted = wrapped.base_model.model(TOKENS, POSITIONS, attend)
    wrapped.save_pretrained(tmp_path)

    bare = random_model(SDAR).double()
    slots = AdapterSlots(SDAR, Shard(), bare.model.norm.weight, num_slots=2, max_rank=8)
    slots.write(2, read_adapter(tmp_path, SDAR))
    with torch.no_grad():
        found = bare(TOKENS, POSITIONS, attend, adapters=slots.choose(torch.full((9,), 2)))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert not torch.isclose(found, plain, atol=1e-2).all()


def test_the_names_are_those_of_each_familys_published_model() -> None:
    names = {family: set(adaptable(config)) for family, config in FAMILIES.items()}
    assert "model.layers.1.self_attn.q_proj" in names["sdar"] and "model.layers.1.mlp.down_proj" in names["dream"]
    assert {"model.layers.0.attention.query_key_value", "model.layers.1.attention.dense"} <= names["llada2"]
    assert "model.layers.1.mlp.shared_experts.up_proj" in names["llada2"]
    assert {"model.transformer.blocks.1.attn_out", "model.transformer.blocks.0.ff_out"} <= names["llada"]
    assert "model.layers.3.mlp.gate_proj" in names["sdar-moe"] and len(names["sdar-moe"]) == 4 * 4 + 3 * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read(tmp_path: Path, family: str) -> None:
    config = FAMILIES[family]
    adapter = read_adapter(write_adapter(tmp_path, config, seed=0, rank=3), config)
    assert adapter.rank == 3
    assert set(adapter.factors) == {module for _, _, module in adapted_modules(config)}


def test_the_parts_of_a_joint_projection_share_its_a(tmp_path: Path) -> None:
    config = FAMILIES["llada2"]
    adapter = read_adapter(write_adapter(tmp_path, config, seed=0, lora_alpha=5), config)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    joint = f"{PREFIX}model.layers.0.attention.query_key_value.lora_"
    parts = [adapter.factors[f"model.layers.0.self_attn.{p}_proj"] for p in "qkv"]
    assert all(torch.equal(a, tensors[f"{joint}A.weight"]) for a, _ in parts)
    torch.testing.assert_close(torch.cat([b for _, b in parts]), tensors[f"{joint}B.weight"] * 5 / 2)
    assert [len(b) for _, b in parts] == [n * config.head_dim for n in (4, 2, 2)]


def test_the_scale_is_alpha_over_r_or_over_its_root(tmp_path: Path) -> None:
    def b_of(folder: Path) -> Tensor:
        return read_adapter(folder, SDAR).factors["model.layers.0.self_attn.q_proj"][1]

    plain = b_of(write_adapter(tmp_path / "a", SDAR, seed=0, rank=4, lora_alpha=4))
    torch.testing.assert_close(b_of(write_adapter(tmp_path / "b", SDAR, seed=0, rank=4, lora_alpha=6)), plain * 1.5)
    rooted = write_adapter(tmp_path / "c", SDAR, seed=0, rank=4, lora_alpha=6, use_rslora=True)
    torch.testing.assert_close(b_of(rooted), plain * 6 / math.sqrt(4))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "lora_only"}, "bias='lora_only' is not supported"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern=.* is not supported"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern=.* is not supported"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters=.* is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices=.* is not supported"),
        ({"layer_replication": [[0, 1]]}, "layer_replication=.* is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True is not supported"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens=.* is not supported"),
        ({"a_setting_of_tomorrow": "on"}, "a_setting_of_tomorrow='on' is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' is not supported: it changes the"),
        ({"r": 0}, "r=0 must be a whole number of at least 1"),
        ({"lora_alpha": None}, "lora_alpha=None must be a number"),
    ],
)
def test_a_setting_that_is_not_supported_is_named(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    write_adapter(tmp_path, SDAR, seed=0)
    read_adapter(tmp_path, SDAR)
    rewrite(tmp_path / "adapter_config.json", **settings)
    with pytest.raises(ValueError, match=says) as caught:
        read_adapter(tmp_path, SDAR)
    assert "adapter_config.json" in str(caught.value)


def test_settings_of_training_are_of_no_matter(tmp_path: Path) -> None:
    write_adapter(tmp_path, SDAR, seed=0)
    ours = set(vars(peft.LoraConfig())) - {"peft_type", "target_modules", "r", "lora_alpha", "bias"}
    defaults = {name: value for name, value in peft.LoraConfig().to_dict().items() if name in ours}
    rewrite(tmp_path / "adapter_config.json", **{n: v for n, v in defaults.items() if n != "runtime_config"})
    rewrite(tmp_path / "adapter_config.json", lora_dropout=0.1, init_lora_weights="orthogonal", task_type="CAUSAL_LM")
    read_adapter(tmp_path, SDAR)


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Replace, add or (`None`) remove tensors of an adapter's file; `__` stands for a dot."""
    path = folder / "adapter_model.safetensors"
    whole = load_file(path)
    for name, tensor in tensors.items():
        whole.pop(name.replace("__", "."), None)
        if tensor is not None:
            whole[name.replace("__", ".")] = tensor
    save_file(whole, path)


Q = "base_model__model__model__layers__0__self_attn__q_proj__lora_"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({f"{Q}A__weight": None}, "'model.layers.0.self_attn.q_proj' has only lora_B of its two matrices"),
        ({f"{Q}A__weight": torch.zeros(2, 5)}, r"has shape \(2, 5\); this model asks for \(2, 16\)"),
        ({f"{Q}B__weight": torch.zeros(32, 3)}, r"has shape \(32, 3\); this model asks for \(32, 2\)"),
        ({f"{Q}B__weight": torch.full((32, 2), torch.nan)}, "has values that are not finite"),
        ({f"{Q}B__weight": torch.zeros(32, 2, dtype=torch.int32)}, "has dtype I32"),
        ({f"{Q}magnitude_vector": torch.zeros(32)}, "is no LoRA matrix of a linear layer"),
        (
            {"base_model__model__lm_head__lora_A__weight": torch.zeros(2, 16)},
            "adapters of 'lm_head' are not supported",
        ),
        ({"base_model__model__model__embed_tokens__lora_embedding_A": torch.zeros(2, 300)}, "is no LoRA matrix"),
        ({"base_model__model__model__layers__7__mlp__up_proj__lora_A__weight": torch.zeros(2, 16)}, "to no module of"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Tensor | None], says: str) -> None:
    write_adapter(tmp_path, SDAR, seed=0)
    change(tmp_path, **changes)
    with pytest.raises(ValueError, match=says) as caught:
        read_adapter(tmp_path, SDAR)
    assert "adapter_model.safetensors" in str(caught.value)


@pytest.mark.parametrize("module", ["mlp.experts.2.gate_proj", "mlp.gate"])
def test_adapters_of_experts_are_refused(tmp_path: Path, module: str) -> None:
    config = FAMILIES["llada2"]
    write_adapter(tmp_path, config, seed=0)
    change(tmp_path, **{f"base_model.model.model.layers.1.{module}.lora_A.weight": torch.zeros(2, 16)})
    with pytest.raises(ValueError, match=f"{module}"):
        read_adapter(tmp_path, config)


def test_a_folder_that_is_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adapter_config"):
        read_adapter(tmp_path, SDAR)
    write_settings(tmp_path, r=2)
    with pytest.raises(ValueError, match="adapter_model"):
        read_adapter(tmp_path, SDAR)
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="no tensors"):
        read_adapter(tmp_path, SDAR)


def respell(folder: Path, spell: Callable[[str], str]) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({spell(name): tensor for name, tensor in load_file(path).items()}, path)


SPELLINGS: dict[str, Callable[[str], str]] = {
    "AReaL": lambda key: key.replace(".weight", ".default.weight"),
    "prime-rl": lambda key: key.removeprefix(PREFIX),
    "an adapter of another name": lambda key: key.replace(".weight", ".policy_1.weight"),
    "twice wrapped by PEFT": lambda key: PREFIX + key,
    "compiled": lambda key: f"_orig_mod.{key}",
    "DDP": lambda key: f"module.{key}",
    "DDP of compiled": lambda key: f"module._orig_mod.{key.removeprefix(PREFIX)}",
    "PEFT within the model": lambda key: key.replace("model.model.", "model.", 1),
    "FSDP 1": lambda key: "_fsdp_wrapped_module." + key.replace(".self_attn.", "._fsdp_wrapped_module.self_attn."),
    "FSDP and checkpointing, by layer": lambda key: key.replace(
        ".mlp.", "._fsdp_wrapped_module._checkpoint_wrapped_module.mlp."
    ).replace(".lora_A.weight", "._fsdp_wrapped_module.lora_A.default._fsdp_wrapped_module.weight"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_names_as_trainers_leave_them_are_read(tmp_path: Path, spelling: str) -> None:
    wanted = read_adapter(write_adapter(tmp_path, SDAR, seed=0), SDAR)
    respell(tmp_path, SPELLINGS[spelling])
    if spelling.startswith("FSDP and"):  # A has the adapter's name, and so must B
        respell(tmp_path, lambda key: key.replace(".lora_B.weight", ".lora_B.default.weight"))
    found = read_adapter(tmp_path, SDAR)
    assert found.factors.keys() == wanted.factors.keys()
    for module, (a, b) in wanted.factors.items():
        assert torch.equal(found.factors[module][0], a) and torch.equal(found.factors[module][1], b)


A = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (A.replace(PREFIX, "_orig_mod."), "are both lora_A of 'model.layers.0.self_attn.q_proj'; keep one of them"),
        (A.replace("A.weight", "A.other.weight"), "of different adapters; save each adapter to a folder of its own"),
        (
            A.replace(PREFIX, f"{PREFIX}language_model."),
            r"to no module of SDARForCausalLM; if it is of 'model.layers.0.self_attn.q_proj', rename it to "
            r"'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'",
        ),
        (
            A.replace("model.layers.0.", ""),
            "'base_model.model.self_attn.q_proj.lora_A.weight' belongs to no module of",
        ),
        (A.replace("lora_A", "base_layer"), "is a weight of the base model; save the adapter's own state"),
        (
            A.replace("lora_A", "lora_a"),
            "is no LoRA matrix of a linear layer, base_model.model.<module>.lora_A.weight",
        ),
        ("_fsdp_wrapped_module._flat_param", "is no LoRA matrix of a linear layer"),
    ],
)
def test_a_name_that_could_mean_anything_else_is_refused(tmp_path: Path, name: str, says: str) -> None:
    write_adapter(tmp_path, SDAR, seed=0)
    change(tmp_path, **{name.replace(".", "__"): torch.zeros(2, 16)})
    with pytest.raises(ValueError, match=says) as caught:
        read_adapter(tmp_path, SDAR)
    assert "\n" not in str(caught.value)
