"""DiffusionGemma's folders: both forms of its config.json, what is wrong in them, and tensors that are skipped."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import rewrite
from gemma_models import GEMMA, gemma
from safetensors.torch import load_file, save_file

from mbd_core.checkpoint.base_files import read_base
from mbd_core.checkpoint.config import read_config, write_config
from mbd_core.checkpoint.conversion import convert
from mbd_core.checkpoint.folder import with_method
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.decoding.blocks.causal_config import Renoise
from mbd_core.decoding.blocks.config import decoding_config

CONFIG = write_config(GEMMA)
ROPES = CONFIG["text_config"]["rope_parameters"]


def changed(top: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG) | top
    config["text_config"] |= text
    return {key: value for key, value in config.items() if value is not None}


def test_both_forms_are_one_model() -> None:
    text = {"global_head_dim": None, "num_global_key_value_heads": None}
    saved = changed({}, text | {"per_layer_config": {"2": {"head_dim": 16}}})
    assert read_config(saved) == read_config(CONFIG) == GEMMA


def test_the_last_layer_is_global_whatever_its_type() -> None:
    assert read_config(changed({}, {"layer_types": ["sliding_attention"] * 3})) == GEMMA


@pytest.mark.parametrize(
    ("top", "text", "message"),
    [
        ({"text_config": 3}, None, "text_config=3; it must be an object"),
        ({}, {"model_type": "gemma4_text"}, "text_config.model_type='gemma4_text', not 'diffusion_gemma_text'"),
        ({}, {"layer_types": ["full_attention"] * 2}, "2 layer_types and num_hidden_layers=3"),
        ({}, {"layer_types": ["chunked"] * 3}, "it must list full_attention and sliding_attention"),
        ({}, {"rope_parameters": {}}, "it must have sliding_attention and full_attention"),
        (
            {},
            {"rope_parameters": ROPES | {"sliding_attention": {"rope_type": "yarn"}}},
            "only rope_type='default'",
        ),
        (
            {},
            {"rope_parameters": ROPES | {"sliding_attention": {"rope_theta": 1.0, "factor": 2}}},
            "factor=2 in rope_p",
        ),
        ({}, {"per_layer_config": {"1": {"head_dim": 16}}}, r"per_layer_config.1=.* of full_attention layers"),
        ({}, {"per_layer_config": {"2": {"window": 1}}}, r"only the head_dim, num_key_value_heads"),
        ({}, {"per_layer_config": [1]}, "it must be an object of objects"),
        ({}, {"global_head_dim": 0}, "global_head_dim=0; it must be a whole number from 1"),
        ({}, {"sliding_window": None}, "no 'sliding_window', which DiffusionGemma"),
        ({}, {"final_logit_softcapping": None}, "no 'final_logit_softcapping'"),
        ({}, {"hidden_activation": "silu"}, "hidden_activation='silu'; .* 'gelu_pytorch_tanh' only"),
        ({}, {"use_bidirectional_attention": "all"}, 'use_bidirectional_attention="all", which this project\'s'),
        ({"tie_word_embeddings": False}, {}, "tie_word_embeddings=False"),
        ({}, {"num_global_key_value_heads": 3}, "not a multiple of num_global_key_value_heads=3"),
    ],
)
def test_a_wrong_config_is_named(top: dict[str, Any], text: dict[str, Any] | None, message: str) -> None:
    config = CONFIG | top if text is None else changed(top, text)
    with pytest.raises(ValueError, match=message) as error:
        read_config(config)
    assert "\n" not in str(error.value)


def test_a_releases_settings_are_those_of_its_method() -> None:
    released = {
        "max_denoising_steps": 12,
        "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.2},
        "t_min": 0.3,
        "confidence_threshold": 0.01,
        "max_new_tokens": 256,
    }
    defaults = with_method(released, GEMMA)
    decoding = decoding_config(defaults, {}, block_size=8)
    assert decoding.renoise == Renoise(steps=12, entropy_bound=0.2, t_min=0.3, tau_entropy=0.01)
    assert with_method({}, GEMMA) == {"renoise": {}}
    chosen = {**released, "renoise": {"steps": 3}}
    assert with_method(chosen, GEMMA) == chosen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model", gemma())
    return tmp_path / "model"


def test_tensors_of_images_are_skipped_and_others_are_not(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    vision = {
        "model.encoder.vision_tower.encoder.layers.0.q_proj.weight": torch.ones(2, 2),
        "model.encoder.embed_vision.embedding_projection.weight": torch.ones(2, 2),
    }
    save_file(weights | vision, folder / "model.safetensors")
    rewrite(folder / "config.json", vision_config={"model_type": "gemma4_vision"}, image_token_id=5)
    loaded = load_model(folder).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in gemma().state_dict().items())
    save_file(weights | {"model.encoder.audio.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.encoder.audio.weight"):
        load_model(folder)


@pytest.mark.parametrize(
    "name", ["model.encoder.language_model.layers.1.layer_scalar", "model.decoder.layers.0.experts.gate_up_proj"]
)
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"lacks .*'{name}'"):
        load_model(folder)


def test_global_layers_store_no_values_and_each_layer_both_scalars(folder: Path) -> None:
    names = set(load_file(folder / "model.safetensors"))
    assert {n for n in names if n.endswith("v_proj.weight")} == {
        f"model.decoder.layers.{n}.self_attn.v_proj.weight" for n in (0, 1)
    }
    assert sum(n.endswith("layer_scalar") for n in names) == 6 and "lm_head.weight" not in names
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [1], "block_size": 8}


def test_a_folder_is_converted_there_and_back(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "dcp", to="dcp")
    shutil.copy(folder / "config.json", tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "back", to="hf")
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


VISION = {
    "model.encoder.vision_tower.encoder.layers.0.q_proj.weight": torch.randn(4, 4).bfloat16(),
    "model.encoder.vision_tower.patch_embedder.position_embedding_table": torch.tensor([[torch.inf, -0.0, 1e-40]]),
    "model.encoder.embed_vision.embedding_projection.weight": torch.randn(3, 4).half(),
}
SECTIONS = {
    "vision_config": {"model_type": "gemma4_vision", "hidden_size": 4, "dtype": "bfloat16"},
    "image_token_id": 5,
    "boi_token_id": 6,
    "vision_soft_tokens_per_image": 280,
}
TEXT = {"use_bidirectional_attention": "vision", "bos_token_id": 2, "dtype": "float32"}


@pytest.fixture
def seeing(folder: Path) -> Path:
    """A folder with a vision tower, in shards, and what belongs to it in config.json."""
    save_file(load_file(folder / "model.safetensors") | VISION, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    rewrite(folder / "config.json", **SECTIONS, text_config=config["text_config"] | TEXT)
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


def check_vision(made: Path) -> None:
    """The tower's tensors are there byte for byte, its sections too, and the text model is read as before."""
    weights = {name: tensor for file in made.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name, tensor in VISION.items():
        assert weights[name].dtype == tensor.dtype
        assert torch.equal(weights[name].view(torch.uint8), tensor.view(torch.uint8))
    config = json.loads((made / "config.json").read_text())
    assert {key: config[key] for key in SECTIONS} == SECTIONS
    assert config["text_config"].items() >= {key: value for key, value in TEXT.items() if key != "dtype"}.items()
    assert (made / "preprocessor_config.json").exists()
    assert load_model(made).config == GEMMA


def test_a_converted_folder_keeps_its_vision_tower(seeing: Path, tmp_path: Path) -> None:
    convert(seeing, tmp_path / "shards", max_shard_bytes=2000)
    check_vision(tmp_path / "shards")
    convert(tmp_path / "shards", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "back", to="hf", config_from=seeing)
    check_vision(tmp_path / "back")
    before, after = load_file(seeing / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in after.items())


def test_weights_alone_get_the_tower_of_their_base(seeing: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "text", gemma(seed=1))
    convert(tmp_path / "text", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "whole", to="hf", config_from=seeing)
    check_vision(tmp_path / "whole")
    found, wanted = load_model(tmp_path / "whole").state_dict(), gemma(seed=1).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_model_that_is_saved_from_a_base_keeps_its_vision_tower(seeing: Path, tmp_path: Path) -> None:
    base = read_base(seeing)
    shutil.rmtree(seeing)  # as where a base was fetched to a temporary folder
    save_model(tmp_path / "made", gemma(), base=base, dtype=torch.bfloat16)
    check_vision(tmp_path / "made")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (config["dtype"], config["text_config"]["dtype"]) == ("bfloat16", "bfloat16")
