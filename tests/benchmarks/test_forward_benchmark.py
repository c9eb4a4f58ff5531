"""The forward of an autoregressive model beside transformers': the same work, and models that have none."""

from pathlib import Path

import pytest
import torch
from base_folders import base_folder
from transformers import AutoModelForCausalLM

from benchmarks import forward as measured
from benchmarks.commands import forward
from benchmarks.forward import measure_forwards
from mbd_core.engine.config import EngineConfig
from mbd_core.serving.tokens.load import load_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base"), "Llama", "tiny-llama", tie_word_embeddings=True)


def test_both_compute_the_logits_of_the_same_tokens(folder: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = network(torch.ones((1, 5), dtype=torch.int64)).logits[0]
    with load_engine(folder, EngineConfig(dtype="float32", max_rows=1)) as loaded:
        for prefix in (0, 1):  # the first stores what the second finds
            logits = measured._forward_after(loaded.engine, prefix, 5 - prefix)()
            torch.testing.assert_close(logits, expected[prefix:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_every_case_has_its_ratios(folder: Path, dtype: str) -> None:
    rows = measure_forwards(folder, dtype, prefix=5, repeats=2, cases=[(1, 1), (1, 4), (3, 1)])
    assert [(row["rows"], row["tokens"], "step" in row) for row in rows] == [(1, 1, True), (1, 4, False), (3, 1, True)]
    for row in rows:
        assert row["forward_ratio_wall"] == row["forward"] / row["transformers"]


def test_a_model_of_blocks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert forward(["--model", "tiny-mbd", "--repeats", "1"]) == 2
    assert "--model tiny-mbd decodes in blocks: transformers has no forward of it" in capsys.readouterr().err
