"""Model folders: exact round trips, and a sentence for every way a folder can be wrong."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mbd_core.models.config import ModelConfig
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.families import read_config, write_config
from mbd_core.models.loader import load_config, load_generation_defaults, load_model, load_tokenizer, save_model
from mbd_core.tasks.tokenizer import train_tokenizer

SIZES = {
    "architecture": "SDARForCausalLM", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2,
    "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "max_positions": 64,
    "tie_word_embeddings": False, "mask_token_id": 0, "eos_token_ids": (1,), "block_size": 4,
}  # fmt: skip


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


def test_config_mapping_is_its_own_inverse() -> None:
    config = ModelConfig(**SIZES)
    assert read_config(write_config(config)) == config


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
    monkeypatch.setattr("mbd_core.models.loader.save_file", broken)
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
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks the weights file model.safetensors"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures=\['GPT2LMHeadModel'\]; supported: SDARForCausalLM"),
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
