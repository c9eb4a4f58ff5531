"""Plain AR fine-tuning as a user runs it: its folder is its base's kind, for transformers and for the engine."""

import json
from pathlib import Path

import pytest
import torch
from base_folders import base_folder
from transformers import AutoModelForCausalLM

from jobs.prepare_data import main as prepare_data
from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.causal_config import Causal
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.multitf.run import __main__ as run

ROWS = [{"prompt": f"What is {n} and {n}?", "response": f"It is {2 * n}."} for n in range(12)]
OPTIONS = ["--recipe", "ar", "--base", "base", "--data", "data", "--precision", "float32"]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random Llama's folder, and data prepared for it, in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    folder = base_folder(tmp_path / "base", "Llama", "tiny-llama", tie_word_embeddings=True)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert prepare_data(["rows.jsonl", "--model", "base", "--max-length", "128", "--out", "data"]) == 0
    return folder


@pytest.mark.parametrize("lora", [[], ["--lora", "4", "--set", "train.lora.dropout=0"]], ids=["whole", "lora"])
def test_a_llama_is_trained_and_stays_a_llama(base: Path, lora: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = [*OPTIONS, "--steps", "8", "--batch-size", "6", "--lr", "1e-2", *lora]
    assert run.main([*options, "--checkpoints", "run", "--log-to", "none"]) == 0
    said = capsys.readouterr().out
    assert "next-token accuracy" in said and "blocks of" not in said
    points = [json.loads(line) for line in Path("run/losses.jsonl").read_text().splitlines()]
    assert points[-1]["loss"] < 0.9 * points[0]["loss"]
    assert all(point["loss_ar"] == pytest.approx(point["loss"], rel=1e-4) for point in points)
    written, before = (json.loads((folder / "config.json").read_text()) for folder in (Path("out/ar"), base))
    assert written["architectures"] == before["architectures"] == ["LlamaForCausalLM"]
    assert not {"block_size", "mask_token_id"} & written.keys()

    theirs = AutoModelForCausalLM.from_pretrained("out/ar", dtype=torch.float32).eval()
    model, old = load_model(Path("out/ar"), dtype=torch.float32), load_model(base, dtype=torch.float32)
    assert not torch.equal(
        model.state_dict()["model.layers.0.self_attn.q_proj.weight"],
        old.state_dict()["model.layers.0.self_attn.q_proj.weight"],
    )
    prompt = (5, 9, 30, 4, 77)
    ids = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, min_new_tokens=12)
    decoding = DecodingConfig(block_size=1, causal=Causal(method="ar"))
    request = Request(request_id="0", prompt=prompt, max_tokens=12, min_tokens=12, decoding=decoding)
    (output,) = Engine(model, EngineConfig(max_rows=1, num_pages=16)).generate([request])
    assert output.tokens == tuple(ids[0, len(prompt) :].tolist())


def test_a_mixed_run_on_the_converted_base_logs_both_losses(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from jobs.convert_checkpoint import main as convert

    assert convert(["base", "--to", "block-diffusion", "--out", "diffusion", "--block-size", "4"]) == 0
    assert prepare_data(["rows.jsonl", "--model", "diffusion", "--max-length", "128", "--out", "masked"]) == 0
    mixed = ["--recipe", "tiny-tf", "--base", "diffusion", "--data", "masked", "--precision", "float32"]
    mixed += ["--set", "states.block_size=4", "--set", "states.ar_weight=0.5", "--steps", "2", "--batch-size", "4"]
    assert run.main([*mixed, "--checkpoints", "run", "--log-to", "none", "--validation", "0.2"]) == 0
    assert json.loads(Path("out/tiny-tf/generation_config.json").read_text())["ar_mode"] is True
    point = json.loads(Path("run/losses.jsonl").read_text().splitlines()[-1])
    assert {"loss_ar", "accuracy_ar", "loss_slot_1", "validation_loss_ar"} <= point.keys()
    # the AR arm takes the same folder and data, and leaves its blocks as they are
    ar = ["--recipe", "ar", "--base", "diffusion", "--data", "masked", "--precision", "float32", "--out", "ar"]
    assert run.main([*ar, "--steps", "1", "--batch-size", "4"]) == 0
    trained = load_model(Path("ar"))
    assert trained.config.block_size == 4 and trained.config.ar_mode
    decoding = DecodingConfig(block_size=4, causal=Causal())
    drafted = Request(request_id="0", prompt=(5, 9, 30), max_tokens=9, decoding=decoding)
    assert Engine(trained, EngineConfig(max_rows=1, num_pages=16)).generate([drafted])[0].counts.num_drafted_tokens
    capsys.readouterr()
    assert run.main([*mixed[:2], *OPTIONS[2:], "--steps", "1", "--batch-size", "4", "--out", "x"]) == 2
    assert "has no mask token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--set", "states.ar_weight=0"], "give ar_weight above 0"),
        (["--set", "states.ar_weight=-1"], "ar_weight"),
        (["--base", "tiny-bd-b8"], "prepare it again with --model tiny-bd-b8"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(
    base: Path, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([*OPTIONS, *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.splitlines()) == 1
