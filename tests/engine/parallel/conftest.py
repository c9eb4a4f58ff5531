"""The model folders that the tests of tensor parallelism share."""

from pathlib import Path

import pytest
from small_groups import CONFIGS

from mbd_core.checkpoint.saving import save_model
from mbd_core.models.decoder import Decoder, init_weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = {}
    for name, config in CONFIGS.items():
        model = Decoder(config)
        init_weights(model, seed=3, std=0.35)
        out[name] = tmp_path_factory.mktemp("models") / name
        save_model(out[name], model)
    return out
