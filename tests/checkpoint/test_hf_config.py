"""config.json of every family: its dialects, and a sentence for every value that it cannot have."""

import math
from pathlib import Path
from typing import get_type_hints

import pytest
from family_models import FAMILIES, SDAR, rewrite

from mbd_core.checkpoint import families
from mbd_core.checkpoint.config import load_config, read_config, write_config
from mbd_core.checkpoint.loading import load_model
from mbd_core.models.model_config import ModelConfig, MoEConfig


def test_ids_and_block_size_may_stand_in_generation_config() -> None:
    config = write_config(FAMILIES["llada2"])
    for key in ("mask_token_id", "eos_token_id", "block_size"):
        del config[key]
    with pytest.raises(ValueError, match="mask_token_id"):
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
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0.25"):
        read_config(config | {"partial_rotary_factor": 0.25})
    with pytest.raises(ValueError, match="model_type='sdar'"):
        read_config(config | {"model_type": "sdar"})
    with pytest.raises(ValueError, match="embedding_size=512"):
        read_config(write_config(FAMILIES["llada"]) | {"embedding_size": 512})


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
    family, written = families.FAMILIES[config.architecture], write_config(config)
    for kind, keys in ((ModelConfig, family.keys), (MoEConfig, family.moe_keys or {})):
        for ours, theirs in keys.items():
            for value in BAD_VALUES[get_type_hints(kind)[ours]]:
                # token id 0 is of the right type, but an edit token does not stand alone
                with pytest.raises(ValueError, match=rf"^config.json( has|:) {theirs}=") as caught:
                    read_config({**written, theirs: value})
                assert "\n" not in str(caught.value)
            if theirs in written and theirs not in (*family.defaults, "rotary_dim"):
                with pytest.raises(ValueError, match=f"no '{theirs}'"):
                    read_config({**written, theirs: None})
    for key, wanted in family.fixed.items():
        for value in ("other", 2, int(wanted) if isinstance(wanted, bool) else [wanted]):
            with pytest.raises(ValueError, match=f"has {key}="):
                read_config({**written, key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": "SDARForCausalLM"}, "^config.json has architectures='SDARForCausalLM'; supported: "),
        ({"architectures": ["SDARForCausalLM", "DreamModel"]}, r"architectures=\['SDARForCausalLM', 'DreamModel'\]"),
        ({"architectures": [{}]}, r"architectures=\[\{\}\]; supported: "),
        ({"architectures": None}, "architectures=None; supported: "),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "with quant_method='fp8' and weight_block_size=None; only fp8",
        ),
        ({"quantization_config": "fp8"}, "^config.json has a quantization_config with quant_method='fp8' and"),
        (
            {"quantization_config": {"quant_method": "gptq", "weight_block_size": [128, 128]}},
            r"with quant_method='gptq' and weight_block_size=\[128, 128\]; only fp8 with two block sizes is read",
        ),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta=10000.0, and 500000.0 in rope_parameters; remove"),
        ({"rope_scaling": {"partial_rotary_factor": 1}}, "partial_rotary_factor=0.5, and 1 in rope_scaling; remove"),
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


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_a_key_that_nobody_reads_is_refused_by_name(config: ModelConfig) -> None:
    """Unless it is listed as harmless, or its value is; null says nothing."""
    written = write_config(config)
    assert (
        read_config(written | {"query_scale": None, "layer_types": ["full_attention"] * config.num_layers}) == config
    )
    sentence = (
        rf"^config.json has query_scale=2.0, which this project's {config.architecture} does not know; take a release "
        r"without it, or remove the key if it changes nothing that the network computes$"
    )
    with pytest.raises(ValueError, match=sentence):
        read_config(written | {"query_scale": 2.0})
    with pytest.raises(ValueError, match="remove the keys"):
        read_config(written | {"query_scale": 2.0, "sinks": []})
    with pytest.raises(ValueError, match="layer_types"):
        read_config(written | {"layer_types": ["full_attention", "sliding_attention"]})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("sdar", {"partial_rotary_factor": 0.5}, "has partial_rotary_factor=0.5, which"),
        ("sdar", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "has partial_rotary_factor=0.5, which"),
        ("sdar", {"rope_parameters": {"factor": 4.0}}, "has factor=4.0 in rope_parameters, which is not known"),
        (
            "sdar",
            {"rope_parameters": {"type": "linear"}},
            "has rope_type='linear' in rope_parameters without 'factor'",
        ),
        ("sdar", {"use_regular_causal": True}, "has use_regular_causal=true, which"),
        ("sdar-moe", {"shared_expert_intermediate_size": 6}, "has shared_expert_intermediate_size=6, which"),
        ("llada2", {"use_qk_norm": False}, "has use_qk_norm=false, which"),
        ("llada2", {"num_nextn_predict_layers": 1}, "has num_nextn_predict_layers=1, which"),
        ("llada", {"rope_full_precision": False}, "has rope_full_precision=false, which"),
        ("llada", {"norm_after": True}, "has norm_after=true, which"),
        ("dream", {"use_mrope": True}, "has use_mrope=true, which"),
        ("dream", {"head_dim": 8}, "has head_dim=8; DreamModel has heads of 4"),
        (
            "llada2",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8], "zero_point": True}},
            "has zero_point=True in quantization_config, which is not known",
        ),
    ],
)
def test_a_value_that_changes_the_network_is_refused(family: str, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^config.json {message}"):
        read_config(write_config(FAMILIES[family]) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"\['GPT2LMHeadModel'\]; supported: exactly one of A2DLlamaLMHeadModel, ",
        ),
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


def test_a_file_is_no_model_folder(folder: Path) -> None:
    with pytest.raises(ValueError, match="not a model folder"):
        load_model(folder / "config.json")
