"""A folder's config.json and generation_config.json: read, and refused where they contradict each other."""

from pathlib import Path

import pytest
from family_models import rewrite

from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.loading import load_model


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


def test_a_file_is_no_model_folder(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json is not a model folder: it has no config.json"):
        load_model(folder / "config.json")
