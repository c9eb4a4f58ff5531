"""Converted checkpoints: there and back is the same bytes, and the model they make is the same model."""

import json
import pickle
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_folders import CONFIGS, LLADA2, SDAR, contents, write_model
from safetensors.torch import load_file, save_file

from jobs.convert_checkpoint import main
from mbd_core.checkpoint import conversion
from mbd_core.checkpoint.conversion import convert
from mbd_core.checkpoint.loading import load_model
from mbd_core.files import MANIFEST
from mbd_core.json_text import parse_json
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shapes import SHAPES


def run(*args: object) -> int:
    return main([str(a) for a in args])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("middle", ["hf", "dcp"])
def test_there_and_back_is_the_same_bytes(tmp_path: Path, config: ModelConfig, middle: str) -> None:
    start = write_model(tmp_path / "start", config)
    stacked = ["--experts", "fused"] if config.moe is not None else []
    assert run(start, "--out", tmp_path / "there", *stacked, "--to", middle) == 0
    assert run(tmp_path / "there", "--out", tmp_path / "back", "--experts", "per-expert", "--to", "hf") == 0
    assert contents(tmp_path / "back") == contents(start)
    if middle == "hf":
        model, again = load_model(start), load_model(tmp_path / "there")
        assert again.config == model.config
        assert all(torch.equal(t, again.state_dict()[n]) for n, t in model.state_dict().items())


def test_fused_is_the_training_layout(tmp_path: Path) -> None:
    start = write_model(tmp_path / "start", LLADA2)
    convert(start, tmp_path / "fused", experts="fused")
    single = load_file(start / "model.safetensors")
    stacked = load_file(tmp_path / "fused" / "model.safetensors")
    for part in ("gate_proj", "up_proj", "down_proj"):
        wanted = [single[f"model.layers.2.mlp.experts.{e}.{part}.weight"] for e in range(8)]
        assert torch.equal(stacked[f"model.layers.2.mlp.experts.{part}"], torch.stack(wanted))
    assert stacked["model.layers.1.mlp.gate.expert_bias"].dtype == torch.float32
    assert json.loads((tmp_path / "fused" / "config.json").read_text())["model_type"] == "llada2_moe_veomni"
    convert(tmp_path / "fused", tmp_path / "again")  # nothing asked: nothing changed
    assert contents(tmp_path / "again") == contents(tmp_path / "fused")


def test_a_configuration_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    start = write_model(tmp_path / "start", LLADA2)
    marked = "\ufeff" + (start / "config.json").read_text()
    (start / "config.json").write_text(marked)
    convert(start, tmp_path / "out", experts="fused")
    assert parse_json((tmp_path / "out" / "config.json").read_text(), "it")["model_type"] == "llada2_moe_veomni"


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_several_shards(tmp_path: Path, to: str) -> None:
    start = write_model(tmp_path / "start", LLADA2, max_shard_bytes=4000)
    shards = sorted(start.glob("*.safetensors"))
    assert len(shards) > 3 and all(p.stat().st_size < 8000 for p in shards)
    convert(start, tmp_path / "there", experts="fused", to=to)
    convert(tmp_path / "there", tmp_path / "back", experts="per_expert", to="hf", max_shard_bytes=4000)
    assert contents(tmp_path / "back") == contents(start)


def test_memory_is_about_one_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the writer holds back never exceeds a shard, and of the source one tensor is kept."""
    start = write_model(tmp_path / "start", replace(LLADA2, num_layers=6))
    held = []

    class Watched(conversion.ShardWriter):
        def add(self, name, tensor):
            super().add(name, tensor)
            held.append(sum(t.untyped_storage().nbytes() for t in self._pending.values()))

    monkeypatch.setattr(conversion, "ShardWriter", Watched)
    convert(start, tmp_path / "there", experts="fused", max_shard_bytes=8000)
    assert max(held) <= 8000
    assert sum(p.stat().st_size for p in (tmp_path / "there").glob("*.safetensors")) > 5 * 8000


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = write_model(tmp_path / "start", LLADA2)

    def refused(sentence: str, *more: object, source: Path = start, target: Path = tmp_path / "out") -> None:
        assert run(source, "--out", target, "--experts", "fused", *more) == 2
        said = capsys.readouterr()
        last = said.err.rpartition("\r")[2]  # behind the bar, where writing had begun
        assert sentence in last and said.err.count("\n") == 1 + ("\r" in said.err) and not said.out
        assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(("out", "."))) == []

    refused("is not a model folder: it has no config.json", source=tmp_path)
    refused("exists already", target=start)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    refused("link exists already", target=tmp_path / "link")
    refused("experts='fused' stacks experts and the SDARForCausalLM in", source=write_model(tmp_path / "dense", SDAR))
    refused("start, which is read; give a folder elsewhere", target=start / "inside")
    refused("is not a model folder: it has no config.json", source=start / "config.json")
    convert(start, tmp_path / "dcp", to="dcp")
    file = sorted((tmp_path / "dcp").glob("*.distcp"))[0]
    whole = file.read_bytes()
    file.write_bytes(b"x" * len(whole))
    refused("is damaged: Weights only load failed\n", source=tmp_path / "dcp")
    file.write_bytes(whole[:10])
    refused("is cut short at tensor 'model.", source=tmp_path / "dcp")
    file.unlink()
    refused(f"lacks the file {file.name}, which holds 'model.", source=tmp_path / "dcp")
    for damaged in (b"", b"text", pickle.dumps([1]), pickle.dumps("text")):
        (tmp_path / "dcp" / ".metadata").write_bytes(damaged)
        refused(".metadata is damaged", source=tmp_path / "dcp")
    weights = load_file(start / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({n: t for n, t in weights.items() if n != name}, start / "model.safetensors")
    refused(f"lacks the tensor '{name}', which config.json asks for")
    save_file(weights | {name: weights[name].float()}, start / "model.safetensors")
    refused(f"'{name}' is torch.float32 but")
    path = start / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refused("is damaged or cut short at tensor '")
    (start / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    refused("architectures=['GPT2LMHeadModel']; supported: ")


def test_a_folder_that_is_there_is_replaced_only_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only one that the project wrote, and only if it holds nothing else."""
    start, foreign = write_model(tmp_path / "start", SDAR), tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    convert(start, tmp_path / "out", to="dcp")
    old = contents(tmp_path / "out")
    for given in ([start], ["--random", "tiny-sdar"]):
        assert run(*given, "--out", tmp_path / "out") == 2
        assert "out exists already and holds a model; give another folder, or --overwrite\n" in capsys.readouterr().err
        for overwrite in ([], ["--overwrite"]):
            assert run(*given, "--out", foreign, *overwrite) == 2
            assert "foreign exists already and was not written by this project" in capsys.readouterr().err
    assert contents(tmp_path / "out") == old and contents(foreign) == {"notes.txt": b"mine"}
    assert run(start, "--out", tmp_path / "out", "--overwrite") == 0
    assert contents(tmp_path / "out") == contents(start)
    assert run("--random", "tiny-sdar", "--out", tmp_path / "out", "--overwrite") == 0
    assert load_model(tmp_path / "out").config == SHAPES["tiny-sdar"]


def test_a_source_is_never_replaced(tmp_path: Path) -> None:
    start = write_model(tmp_path / "start", SDAR)
    for target in (start, start / "inside"):
        with pytest.raises(ValueError, match="lies inside"):
            convert(start, target, overwrite=True)
    shutil.copytree(start, start / "inside")
    with pytest.raises(ValueError, match="cannot be replaced"):
        convert(start / "inside", start, overwrite=True)
    manifest = json.loads((start / MANIFEST).read_text())
    (start / MANIFEST).write_text(json.dumps(manifest | {"files": ["*", "inside/*"]}))
    with pytest.raises(ValueError, match="would be replaced"):
        convert(start / "inside", start, overwrite=True)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([], "give either DIR, a checkpoint to read, or --random, a shape by name"),
        (["x", "--random", "tiny-sdar"], "give either DIR"),
        (["--random", "tiny-x"], "--random tiny-x is unknown; choose one of sdar-null, "),
        (["--random", "tiny-sdar", "--experts", "fused"], "--random writes a Hugging Face folder as published"),
        (["x", "--max-shard-gb", "0"], "--max-shard-gb 0 must be a number above 0"),
        (["x", "--max-shard-gb", "1e300"], "--max-shard-gb 1e300 must be at most 2147483647"),
        (["x", "--max-shard-gb", "nan"], "--max-shard-gb nan must be a finite number above 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], sentence: str
) -> None:
    assert run(*given, "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"convert_checkpoint: {sentence}") and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_other_formats_weights_are_not_copied_along(tmp_path: Path) -> None:
    start = write_model(tmp_path / "start", SDAR)
    whole = contents(start)
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "old.pt", "old.pth", "q4.gguf"):
        (start / name).write_text("weights")
    convert(start, tmp_path / "there")
    assert contents(tmp_path / "there") == whole


@pytest.mark.parametrize("random", [False, True])
def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], random: bool
) -> None:
    start = write_model(tmp_path / "start", SDAR)
    needed = sum(t.nbytes for t in load_file(start / "model.safetensors").values())
    asked: list[Path] = []

    def disk_usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=needed - 1)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    target = tmp_path / "new" / "out"
    assert run(*(("--random", "llada2-mini") if random else (start,)), "--out", target) == 2
    said = capsys.readouterr().err
    assert asked == [tmp_path] and not target.parent.exists() and said.count("\n") == 1
    assert f"and {tmp_path} has {needed - 1:,} free" in said
    assert random or f"{target} needs {needed:,} bytes" in said
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    convert(start, target)


SLOWLY = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which the tests may run, has it ignored
from jobs import convert_checkpoint
from mbd_core.checkpoint.tensor_pieces import TensorPieces

def slowly(*args):
    print("writing", flush=True)
    time.sleep(60)

TensorPieces.make = slowly
sys.exit(convert_checkpoint.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "to"),
    [
        (signal.SIGINT, "hf"),
        pytest.param(signal.SIGTERM, "dcp", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, "hf", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_conversion_leaves_nothing(tmp_path: Path, number: signal.Signals, to: str) -> None:
    start, target = write_model(tmp_path / "start", SDAR), tmp_path / "out"
    command = [sys.executable, "-c", SLOWLY, start, "--out", target, "--to", to]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        assert any(p.name.startswith(".out-") for p in tmp_path.iterdir())
        process.send_signal(number)
        said = process.communicate(timeout=30)[1]
    assert (process.returncode, said) == (130, f"convert_checkpoint: stopped; {target} was not written\n")
    assert [p.name for p in tmp_path.iterdir()] == ["start"]
