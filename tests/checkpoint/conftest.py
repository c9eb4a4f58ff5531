"""A model folder with a tokenizer."""

from pathlib import Path

import pytest
from family_models import SIZES

from mbd_core.checkpoint.saving import save_model
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.model_config import ModelConfig
from mbd_core.tasks.tiny_tokenizer import train_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = Decoder(ModelConfig(**SIZES))
    init_weights(model, seed=0)
    tokenizer = train_tokenizer(["some words to learn"], vocab_size=280)
    save_model(tmp_path / "model", model, tokenizer=tokenizer, generation={"buffer_size": 2})
    return tmp_path / "model"
