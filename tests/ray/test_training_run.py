"""A training run's folder: claimed once, resumed as itself, and never where something is that would be lost."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from actors.training.run import RECORD, TrainingRun, begin, check_run, named_base, record_recipe, recorded_precision
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.multitf.recipes.recipe import TrainingRecipe, with_precision
from mbd_core.multitf.run.checkpoints import MARKER
from mbd_core.multitf.run.curve_file import LOSSES
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.storage.folder import Folder
from mbd_core.storage.models import fetch_model


def new_run(recipe: TrainingRecipe, path: Path | str) -> TrainingRun:
    storage = Folder.at(path)
    return TrainingRun(recipe=recipe, name="mine", storage=storage, out=storage / "mine" / "model")


@pytest.mark.parametrize("remote", [False, True], ids=["local", "s3"])
def test_a_run_is_begun_once_and_resumed_as_itself(
    tiny_recipe: TrainingRecipe, tmp_path: Path, s3: str, remote: bool
) -> None:
    run = new_run(tiny_recipe, f"{s3}/{tmp_path.name}" if remote else tmp_path)
    with pytest.raises(ValueError, match="there is no run in"):
        begin(run, resume=True)
    begin(run, resume=False)
    with pytest.raises(ValueError, match=r"already lies in .*--resume"):
        begin(run, resume=False)
    begin(run, resume=True)
    other = replace(run, recipe=replace(tiny_recipe, max_length=300))
    with pytest.raises(ValueError, match=RECORD):
        begin(other, resume=True)


def test_a_run_lies_where_its_workers_reach_it(tiny_recipe: TrainingRecipe) -> None:
    with pytest.raises(ValueError, match=r"^memory://runs lies in the memory"):
        new_run(tiny_recipe, "memory://runs")


def test_a_resumed_run_keeps_the_precision_it_began_in(tiny_recipe: TrainingRecipe, tmp_path: Path) -> None:
    run = new_run(with_precision(tiny_recipe, "auto"), tmp_path)
    begin(run, resume=False)
    assert recorded_precision(run) == "auto"
    record_recipe(run, with_precision(tiny_recipe, "float32"))
    begin(run, resume=True)
    assert recorded_precision(run) == "float32"
    begin(new_run(with_precision(tiny_recipe, "float32"), tmp_path), resume=True)
    with pytest.raises(ValueError, match=r'train\.precision is "float32" there, not "bf'):
        begin(new_run(with_precision(tiny_recipe, "bfloat16"), tmp_path), resume=True)


def test_a_resumed_run_may_compute_its_updates_in_another_way(tiny_recipe: TrainingRecipe, tmp_path: Path) -> None:
    begin(new_run(tiny_recipe, tmp_path), resume=False)
    for changes in ({"micro_batch": 1}, {"activation_checkpointing": True}, {"attention": "dense"}):
        recipe = replace(tiny_recipe, train=replace(tiny_recipe.train, **changes))
        begin(new_run(recipe, tmp_path), resume=True)
    with pytest.raises(ValueError, match=r"train\.lr is 0\.002 there, not 0\.5"):
        begin(new_run(replace(tiny_recipe, train=replace(tiny_recipe.train, lr=0.5)), tmp_path), resume=True)


def test_a_run_of_an_older_version_is_not_resumed(tiny_recipe: TrainingRecipe, tmp_path: Path) -> None:
    run = new_run(tiny_recipe, tmp_path)
    begin(run, resume=False)
    recorded = json.loads(run.folder.read_text(RECORD) or "")
    del recorded["train"]["attention"], recorded["states"]["bounds"]["fitted"]
    run.folder.write_text(RECORD, json.dumps(recorded))
    with pytest.raises(ValueError, match=r"an older version, .*trainer\.pt"):
        begin(run, resume=True)


def test_a_target_that_is_there_is_refused_before_the_run_claims_its_folder(
    tiny_recipe: TrainingRecipe, tmp_path: Path
) -> None:
    out = tmp_path / "notes"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        run = replace(new_run(tiny_recipe, tmp_path / "runs"), out=Folder.at(out), overwrite=overwrite)
        with pytest.raises(ValueError, match="was not written by this project"):
            begin(run, resume=False)
        assert not run.storage.exists()
    assert (out / "notes.txt").read_text() == "mine"


def test_a_shipped_model_is_never_replaced(tiny_recipe: TrainingRecipe, tmp_path: Path) -> None:
    run = replace(new_run(tiny_recipe, tmp_path), out=Folder.at(model_folder("tiny-mbd")), overwrite=True)
    with pytest.raises(ValueError, match="was not written by this project"):
        begin(run, resume=False)


@pytest.mark.parametrize("out", ["mine", "."])
def test_the_model_cannot_hold_the_runs_own_folder(tiny_recipe: TrainingRecipe, tmp_path: Path, out: str) -> None:
    with pytest.raises(ValueError, match="would hold the run's own folder"):
        replace(new_run(tiny_recipe, tmp_path), out=Folder.at(tmp_path / out))


def test_a_base_is_a_known_name_or_a_folder(
    tiny_model_dir: Path, tiny_recipe: TrainingRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model_dir.parent)
    assert named_base("tiny-bd") == "tiny-bd"
    assert named_base(tiny_model_dir.name) == str(tiny_model_dir)
    with pytest.raises(ValueError, match=r"'nope'.*known: ledger-bd, ledger-mbd"):
        named_base("nope")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": ["SDARForCausalLM"]}))
    incomplete = replace(tiny_recipe, base=named_base(str(tmp_path / "model")))
    with pytest.raises(ValueError, match=r"config\.json"):
        StartingPoint.read(incomplete, fetch=fetch_model)


def test_a_base_at_a_url_is_fetched_and_checked(
    tiny_model_dir: Path, tiny_recipe: TrainingRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = f"memory://{tmp_path.name}/tiny"
    system, path = Folder.at(url).filesystem()
    system.put(str(tiny_model_dir), path, recursive=True)
    assert named_base(url) == url
    start = StartingPoint.read(replace(tiny_recipe, base=url), fetch=fetch_model)
    assert start.recipe.base == url and start.base is not None and start.base.path.is_relative_to(tmp_path)
    system.rm_file(f"{path}/config.json")
    with pytest.raises(ValueError, match=r"it holds no config\.json"):
        named_base(url)


@pytest.mark.parametrize("remote", [False, True], ids=["local", "s3"])
def test_a_run_whose_progress_is_lost_is_not_resumed(
    tiny_recipe: TrainingRecipe, tmp_path: Path, s3: str, remote: bool
) -> None:
    run = replace(new_run(tiny_recipe, f"{s3}/{tmp_path.name}" if remote else tmp_path), checkpoint_every=3)
    begin(run, resume=False)
    run.folder.write_text(LOSSES, '{"step": 0}\n{"step": 1}\n')
    begin(run, resume=True)  # it was stopped before its first checkpoint
    note = check_run(run, resume=True)
    assert note is not None and "no checkpoint after 2 updates (one is written every 3)" in note
    run.folder.write_text(LOSSES, '{"step": 0}\n{"step": 1}\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"holds the losses of 3 updates .* and no whole checkpoint.*--run-name"):
        begin(run, resume=True)
    run.folder.write_text("step_000003/__1_0.distcp", "")
    with pytest.raises(ValueError, match=r"holds parts of checkpoints \(step_000003\) and no whole checkpoint"):
        begin(run, resume=True)
    run.folder.write_text(f"step_000003/{MARKER}", "")
    run.folder.write_text("step_000006/__1_0.distcp", "")
    begin(run, resume=True)
    assert check_run(run, resume=True) is None
