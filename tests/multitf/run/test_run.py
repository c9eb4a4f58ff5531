"""A recipe in one process: what it writes, where it refuses to, and how it goes on."""

import fcntl
import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mbd_core.checkpoint.adapter import read_adapter
from mbd_core.checkpoint.base_values import check_base
from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import SHIPPED
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.recipes.recipe import TrainingRecipe, as_recorded, with_precision
from mbd_core.multitf.run import __main__ as run
from mbd_core.multitf.run import alone
from mbd_core.multitf.run.checkpoints import MARKER
from mbd_core.multitf.run.curve_file import LOSSES, SPEEDS
from mbd_core.multitf.step import compute as precision


@pytest.fixture
def recipe(tiny_recipe: TrainingRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The tiny recipe by name, in a folder of the test's own, on a CPU without bfloat16."""
    monkeypatch.setitem(RECIPES, tiny_recipe.name, with_precision(tiny_recipe, "auto"))
    monkeypatch.setattr(precision, "computes_bfloat16", lambda device: False)
    monkeypatch.chdir(tmp_path)
    return tiny_recipe.name


def test_a_run_writes_a_model_and_says_its_precision(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--recipe", recipe, "--steps", "2"]) == 0
    out = Path("out") / recipe
    assert load_model(out).config.block_size == 4
    recorded = json.loads((out / "recipe.json").read_text())
    assert recorded["train"]["precision"] == "float32"
    assert recorded["train"]["steps"] == 2
    assert "2 steps of 8 samples in float32" in capsys.readouterr().out


def test_a_run_says_what_it_logs_and_where(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--recipe", recipe, "--steps", "2", "--checkpoints", "run"]
    assert run.main([*options, "--log-to", "none", "--out", "a"]) == 0
    said = capsys.readouterr().out
    assert "logs: losses.jsonl; MFU is of " in said and "measured on this CPU" in said
    assert not Path("run/tensorboard").exists()
    first, second = points("run")
    assert first["loss_slot_1"] > 0 and second["tflop"] > 0 and "seconds" not in first
    assert json.loads(Path("run/losses.jsonl").read_text().splitlines()[0])["mfu"] > 0


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_a_folder_that_is_there_is_refused_before_a_sample_is_generated(
    recipe: str, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(alone, "train_worker", lambda *_, **__: pytest.fail("training must not begin"))
    mine = Path("out") / recipe / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert run.main(["--recipe", recipe, *options]) == 2
    error = capsys.readouterr().err
    assert f"out/{recipe} exists already" in error and len(error.splitlines()) == 1
    assert mine.read_text() == "mine"


def test_a_model_of_the_project_is_replaced_on_demand(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--recipe", recipe, "--steps", "1", "--out", "model"]) == 0
    assert run.main(["--recipe", recipe, "--steps", "2", "--out", "model"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run.main(["--recipe", recipe, "--steps", "2", "--out", "model", "--overwrite"]) == 0
    assert json.loads(Path("model/recipe.json").read_text())["train"]["steps"] == 2


@pytest.mark.parametrize("name", ["tiny-bd-b8", "tiny-bd", "tiny-mbd", "tiny-tf"])
def test_no_recipe_writes_into_the_package_by_default(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    targets: list[Path] = []

    def check(folder: Path, kind: str, *, overwrite: bool) -> None:
        targets.append(folder.resolve())
        raise ValueError("far enough")

    monkeypatch.setattr(alone, "check_target_folder", check)
    assert run.main(["--recipe", name]) == 2
    assert targets == [tmp_path / "out" / name]
    assert SHIPPED not in targets[0].parents


def points(folder: str) -> list[dict[str, float]]:
    """The updates in a run's folder, without the speeds that no two runs share."""
    lines = map(json.loads, (Path(folder) / LOSSES).read_text().splitlines())
    return [{name: number for name, number in line.items() if name not in SPEEDS} for line in lines]


def test_a_folder_in_which_another_run_writes_is_refused(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--recipe", recipe, "--steps", "1", "--checkpoints", "run", "--out", "a"]
    Path("run").mkdir()
    other = os.open("run", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert run.main(options) == 2
    assert f"another run writes in {Path('run').resolve()}; wait for its end" in capsys.readouterr().err
    assert not Path("a").exists() and not list(Path("run").iterdir())
    os.close(other)
    assert run.main(options) == 0


def test_a_run_goes_on_from_its_checkpoint(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--recipe", recipe, "--checkpoints", "run", "--every", "5"]
    assert run.main([*options, "--out", "whole"]) == 0
    written = ["losses.jsonl", "losses.png", "run.md", "step_000010", "step_000012", "tensorboard"]
    assert sorted(path.name for path in Path("run").iterdir()) == written
    losses = points("run")
    (Path("run/step_000012") / MARKER).unlink()  # as if the run had been killed while it wrote this one
    assert run.main([*options, "--out", "resumed"]) == 0
    assert points("run") == losses and len(losses) == 12
    whole, resumed = (load_model(Path(folder)).state_dict() for folder in ("whole", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert run.main(["--recipe", "tiny-bd", "--checkpoints", "run"]) == 2
    assert f"holds checkpoints of a run of {recipe}, not of tiny-bd" in capsys.readouterr().err
    for other in (["--steps", "9"], ["--lora", "2"]):
        assert run.main([*options, *other, "--out", "other"]) == 2
        error = capsys.readouterr().err
        assert f"holds checkpoints of a run with other settings ({MARKER} in step_000012): train." in error
        assert ("train.steps is 12 there, not 9" in error) == ("--steps" in other)
        assert ("train.lora is null there, not {" in error) == ("--lora" in other)
    assert run.main([*options, "--precision", "bfloat16", "--out", "other"]) == 2
    assert f"--precision bfloat16: the run in {Path.cwd()}/run began in float32" in capsys.readouterr().err
    assert (
        run.main(
            [
                *options,
                "--set",
                "train.micro_batch=1",
                "--set",
                "train.attention=dense",
                "--set",
                "train.pack=300",
                "--out",
                "other",
            ]
        )
        == 0
    )


def test_the_page_of_a_run_says_what_differs_from_its_recipe(recipe: str) -> None:
    Path("my.yaml").write_text(f"recipe: {recipe}\ntrain: {{lr: 1e-4}}\n")
    assert run.main(["--config", "my.yaml", "--steps", "1", "--set", "train.clip=0.5", "--checkpoints", "run"]) == 0
    page = Path("run/run.md").read_text()
    assert "- train.lr: 0.0001, not " in page and "- train.clip: 0.5, not 1.0" in page and "train.betas" not in page
    assert json.loads((Path("out") / recipe / "recipe.json").read_text())["train"]["clip"] == 0.5


def test_an_adapter_alone_is_written_on_demand(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--recipe", recipe, "--steps", "1", "--write", "adapter", "--out", "a"]
    assert run.main(options) == 2 and "--lora" in capsys.readouterr().err
    base = RECIPES[recipe].base
    size = load_config(Path(str(base))).block_size
    assert (
        run.main(
            [
                *options,
                "--lora",
                "2",
                "--set",
                "train.lora.alpha=6",
                "--set",
                f"states.block_size={size}",
                "--overwrite",
            ]
        )
        == 0
    )
    adapter = read_adapter(Path("a"), load_config(Path(str(base))))
    assert adapter.rank == 2 and json.loads(Path("a/adapter_config.json").read_text())["lora_alpha"] == 6
    assert sorted(path.name for path in Path("a").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "mbd-manifest.json",
        "recipe.json",
    ]
    again = ["--recipe", recipe, "--steps", "1", "--write", "adapter", "--set", f"states.block_size={size}"]
    again += ["--lora", "2", "--lr", "0", "--out", "b"]
    assert run.main([*again, "--set", "train.lora.start=a"]) == 0, "an update at rate 0 leaves what it goes on from"
    for name, (a, b) in read_adapter(Path("b"), load_config(Path(str(base)))).factors.items():
        torch.testing.assert_close(b @ a, adapter.factors[name][1] @ adapter.factors[name][0])
    capsys.readouterr()
    assert run.main([*again, "--overwrite", "--set", "train.lora.start=nowhere"]) == 2
    assert "nowhere is not an adapter folder" in capsys.readouterr().err
    assert run.main([*again[:-5], "3", "--out", "c", "--set", "train.lora.start=a"]) == 2
    assert "give --lora 2" in capsys.readouterr().err and not Path("c").exists()
    check_base(Path("a"), Path(str(base)))
    tensors = {name: -tensor for name, tensor in load_file(Path(str(base)) / "model.safetensors").items()}
    shutil.copytree(Path(str(base)), "other")
    save_file(tensors, "other/model.safetensors", metadata={"format": "pt"})
    assert run.main([*again, "--overwrite", "--base", "other", "--set", "train.lora.start=a"]) == 2
    assert f"a was trained beside {base}, whose" in capsys.readouterr().err


def test_some_updates_are_profiled(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--recipe", recipe, "--steps", "5", "--checkpoints", "run"]
    assert run.main([*options, "--out", "a", "--set", "measuring.profile=2"]) == 0
    (trace,) = Path("run/profile").iterdir()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum("Optimizer.step#AdamW" in event["name"] for event in events if event.get("ph") == "X") == 2
    assert (
        run.main(["--recipe", recipe, "--set", "measuring.profile=2"]) == 2
        and "--checkpoints" in capsys.readouterr().err
    )
    assert run.main(["--recipe", recipe, "--set", "measuring.memory_snapshot=true", "--checkpoints", "other"]) == 2
    assert "measuring.memory_snapshot" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_run_goes_on_with_two_workers_and_then_with_one(tiny_recipe: TrainingRecipe, tmp_path: Path) -> None:
    """The recipe goes to torchrun's processes as a file, and each start finds the checkpoint of the one before."""
    file, one = tmp_path / "recipe.json", [sys.executable, "-m", "mbd_core.multitf.run"]
    file.write_text(json.dumps(as_recorded(with_precision(tiny_recipe, "float32"))))
    two = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "mbd_core.multitf.run"]
    options = [
        "--config",
        str(file),
        "--steps",
        "6",
        "--every",
        "2",
        "--set",
        "train.optimizer=adamw",
        "--log-to",
        "none",
        "--checkpoints",
        "run",
    ]

    def losses(command: list[str], out: str) -> list[float]:
        subprocess.run([*command, *options, "--out", out], cwd=tmp_path, check=True, timeout=280)
        lines = (tmp_path / "run" / LOSSES).read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    whole = losses(one, "whole")
    shutil.rmtree(tmp_path / "run/step_000006")
    assert losses(two, "two")[4:] == pytest.approx(whole[4:], rel=1e-4)
    shutil.rmtree(tmp_path / "run/step_000004")
    shutil.rmtree(tmp_path / "run/step_000006")
    again = losses(two, "two-whole")
    shutil.rmtree(tmp_path / "run/step_000006")
    assert again == pytest.approx(whole, rel=1e-4)
    assert losses(one, "one") == pytest.approx(whole, rel=1e-4)


DAMAGES = (  # a file of a checkpoint, what is left of it, and what the error says
    (MARKER, "{", f"{MARKER} is cut or damaged"),
    (MARKER, '{"a": 1}', f"{MARKER} is cut or damaged"),
    (MARKER, "[]", f"{MARKER} is cut or damaged"),
    (".metadata", "x", ".metadata is cut or damaged"),
    (".metadata", None, ".metadata is missing"),
    ("__0_0.distcp", "x", "__0_0.distcp is cut: 1 of "),
    ("__0_0.distcp", None, "__0_0.distcp is missing"),
)


def test_a_damaged_checkpoint_is_named_and_what_to_do(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--recipe", recipe, "--steps", "2", "--checkpoints", "run", "--every", "1", "--overwrite"]
    assert run.main(options) == 0
    damaged = Path("run/step_000002")
    for file, kept, named in DAMAGES:
        path = damaged / file
        whole = path.read_bytes()
        if kept is None:
            path.unlink()
        else:
            path.write_text(kept)
        assert run.main(options) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"the checkpoint {Path.cwd()}/run/step_000002 cannot be read: {named}" in error
        assert error.endswith("remove that folder to go on from step_000001")
        path.write_bytes(whole)
    shutil.rmtree(damaged)
    assert run.main(options) == 0


def test_a_storage_that_fails_is_one_sentence(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--recipe", recipe, "--steps", "1", "--checkpoints", "run", "--overwrite"]
    assert run.main(options) == 0
    part = Path("run/step_000001/__0_0.distcp")
    part.write_bytes(bytes(part.stat().st_size))
    assert run.main(options) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    start = f"mbd_core.multitf.run: the checkpoint {Path.cwd()}/run/step_000001 cannot be read: "
    assert error.startswith(start) and "remove" not in error


def test_folders_that_are_no_checkpoints_stay(recipe: str) -> None:
    mine = Path("run/step_000000/notes.txt")
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert run.main(["--recipe", recipe, "--steps", "4", "--checkpoints", "run", "--every", "1"]) == 0
    assert sorted(path.name for path in Path("run").glob("step_*")) == ["step_000000", "step_000003", "step_000004"]
    assert mine.read_text() == "mine"


def test_checkpoints_of_an_older_version_are_refused(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    old = Path("run/step_000100/trainer.pt")
    old.parent.mkdir(parents=True)
    old.write_text("old")
    assert run.main(["--recipe", recipe, "--checkpoints", "run"]) == 2
    assert "run/step_000100 is a checkpoint of an older version (trainer.pt)" in capsys.readouterr().err
    assert old.read_text() == "old"


def test_a_plan_is_printed_and_nothing_begins(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(alone, "train_worker", lambda *_, **__: pytest.fail("training must not begin"))
    assert run.main(["--recipe", recipe, "--plan", "4"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4 and "4 GPUs, replicated: " in printed[0] and "4 GPUs, sharded: " in printed[2]
    assert not list(Path().iterdir())


def test_a_training_that_does_not_fit_is_refused(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(alone, "free_host_memory", lambda: 10**6)
    monkeypatch.setattr(alone, "train_worker", lambda *_, **__: pytest.fail("training must not begin"))
    assert run.main(["--recipe", recipe]) == 2
    assert (
        "mbd_core.multitf.run: training takes 0.3 GB on each CPU, and 0.0 GB of its 0.0 are for it; choose"
        in capsys.readouterr().err
    )


LONG = "x" * 300


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--out", "s3://bucket/model"], "s3://bucket/model is a URL: give a folder on this machine"),
        (["--out", " "], "--out is empty"),
        (["--out", LONG], "longer than 200 bytes"),
        (["--out", f"a/{LONG}/b"], "a name in it than 255"),
        (["--out", "/proc/model"], "cannot be written"),
        (["--checkpoints", "file/run"], "file/run cannot be written: "),
        (["--checkpoints", ""], "--checkpoints is empty; name a folder or a URL"),
        (["--checkpoints", "file"], "file is a file; give a folder for checkpoints"),
        (["--checkpoints", "nowhere://bucket/run"], "nowhere://bucket/run cannot be reached: unknown"),
        (["--checkpoints", "local://file/run"], "file/run cannot be written: "),
        (["--log-to", "tensorboard"], "--log-to tensorboard needs a folder for the run: name it with --checkpoints"),
        (["--checkpoints", "run", "--log-to", "paper"], "--log-to 'paper': known are tensorboard, wandb, mlflow"),
        (["--base", "nowhere"], "unknown model 'nowhere'"),
        (["--data", "folder"], "folder holds no prepared training data"),
        (["--recipe", "SDAR-8B-b32"], "recipe SDAR-8B-b32 has no model of its own: name one with --base"),
        (["--recipe", "SDAR-8B-b32", "--base", "tiny-bd"], "recipe SDAR-8B-b32 has no data of its own"),
        (["--tensor-parallel", "2"], "--tensor-parallel 2 does not divide the number of training processes, 1"),
        (["--tensor-parallel", "7", "--base", "tiny-bd"], "does not divide among --tensor-parallel 7 workers"),
        (["--tensor-parallel", "2", "--lora", "4"], "an adapter (LoRA) is not trained by tensor-parallel workers"),
        (
            ["--tensor-parallel", "2", "--set", "train.compile=true"],
            "leave one of train.compile and --tensor-parallel out",
        ),
        (["--set", "train.cut_experts=width"], "--set train.cut_experts=width is for tensor-parallel workers"),
        (["--tensor-parallel", "2", "--sharding", "replicated", "--plan", "2"], "leave --sharding at auto"),
    ],
)
def test_what_cannot_be_trained_or_written_is_refused_before_it_begins(
    recipe: str,
    options: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(alone, "train_worker", lambda *_, **__: pytest.fail("training must not begin"))
    Path("file").write_text("")
    Path("folder").mkdir()
    assert run.main(["--recipe", recipe, *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.splitlines()) == 1
    assert sorted(path.name for path in Path().iterdir()) == ["file", "folder"]


def test_a_run_starts_from_the_base_that_is_named(recipe: str) -> None:
    assert run.main(["--recipe", recipe, "--base", "tiny-bd", "--steps", "1"]) == 0
    recorded = json.loads((Path("out") / recipe / "recipe.json").read_text())
    assert recorded["base"] == "tiny-bd"
    assert load_model(Path("out") / recipe).config.hidden_size == 192


def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, sentence in (
        (["--recipe", "nope"], "unknown recipe 'nope'; known: D2F-Dream"),
        (["--recipe", "tiny-bd", "--precision", "half"], "--precision"),
        ([], "--recipe"),
    ):
        assert run.main(arguments) == 2
        error = capsys.readouterr().err
        assert sentence in error and len(error.splitlines()) == 1
