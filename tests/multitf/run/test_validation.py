"""Held-out losses within a run: what they are, that they change nothing, and which checkpoint they keep."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chat_rows import chat, write_rows

from actors.training.run import TrainingRun
from jobs import train_multitf
from mbd_core.checkpoint.chat import question
from mbd_core.checkpoint.folder import read_folder
from mbd_core.multitf.config import ValidationOptions
from mbd_core.multitf.data.data_files import find_files
from mbd_core.multitf.data.preparation import Preparation, prepare_data
from mbd_core.multitf.data.prepared import PreparedExamples, named_data
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.recipes.recipe import shortened
from mbd_core.multitf.run import __main__ as plain
from mbd_core.multitf.run.checkpoints import Checkpoints, best_step
from mbd_core.multitf.run.curve_file import LOSSES
from mbd_core.multitf.run.log import PLOT
from mbd_core.multitf.run.log_targets import tag
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.run.validation import Validation, check_held_out
from mbd_core.multitf.run.worker import Run, train_worker
from mbd_core.multitf.step.loss import denominator, multitf_loss
from mbd_core.multitf.step.workers import ALONE
from mbd_core.storage.folder import Folder

EVERY = 2


@pytest.fixture
def start(tiny_model_dir: Path, tmp_path: Path) -> StartingPoint:
    """A short run on conversations, and held-out ones beside its data."""
    for name, first, count in (("data", 0, 12), ("held-out", 50, 7)):
        rows = write_rows(tmp_path / f"{name}.jsonl", [chat(n) for n in range(first, first + count)])
        preparation = Preparation(
            files=find_files(str(rows)), model=read_folder(tiny_model_dir), max_length=64, every=True
        )
        prepare_data(preparation, tmp_path / name)
    recipe = shortened(RECIPES["SDAR-8B-b4"], 5)
    train = replace(recipe.train, batch_size=4, precision="float32", lr=1e-2, schedule="constant", warmup=1)
    recipe = replace(recipe, base=str(tiny_model_dir), data=named_data(tmp_path / "data"), train=train)
    return StartingPoint.read(recipe)


def options(tmp_path: Path, **fields: object) -> ValidationOptions:
    return ValidationOptions(validation=str(tmp_path / "held-out"), validate_every=EVERY, **fields)


def test_the_losses_are_those_of_the_held_out_samples_laid_out_together(start: StartingPoint, tmp_path: Path) -> None:
    run = Run(start, ALONE, "replicated", validation=options(tmp_path))
    assert isinstance(run.validation, Validation)
    values = run.validation.measure(run.trainer, ALONE)
    assert values == run.validation.measure(run.trainer, ALONE)
    examples = list(run.validation.examples)
    batch = run.trainer.lay_out(examples, [random.Random(f"validation/{n}") for n in range(len(examples))])
    with torch.no_grad():
        loss, measures = multitf_loss(run.trainer.model, batch, denominator(batch, start.recipe.states.weighting))
    assert values["validation_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert values["validation_accuracy"] == pytest.approx(measures[0].item(), rel=1e-6)
    assert {tag(name).rpartition("/")[0] for name in values} == {
        "validation",
        "validation_loss_by_slot",
        "validation_loss_by_mask_ratio",
    }


def test_a_run_with_validation_has_the_updates_of_one_without(
    start: StartingPoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Run(start, ALONE, "replicated")
    plain.train()
    stored = Checkpoints(Folder.at(tmp_path / "run"), ALONE, recipe=start.recipe)
    run = train_worker(start, ALONE, "replicated", stored, every=100, log_targets=(), validation=options(tmp_path))
    measured = [{k: v for k, v in point.items() if k.startswith("validation_")} for point in run.curve]
    assert [bool(values) for values in measured] == [False, True, False, True, True]  # every 2, and the last
    bare = [{k: v for k, v in point.items() if not k.startswith("validation_")} for point in run.curve]
    assert bare == plain.curve
    lines = [json.loads(line) for line in (tmp_path / "run" / LOSSES).read_text().splitlines()]
    assert [line.get("validation_loss") for line in lines] == [m.get("validation_loss") for m in measured]
    assert "validation after step 2: loss" in capsys.readouterr().out and (tmp_path / "run" / PLOT).is_file()


def test_the_best_checkpoint_stays_also_when_the_run_goes_on(
    start: StartingPoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {2: 1.0, 3: 1.5, 4: 3.0, 5: 2.0}

    def measured(self: Validation, trainer: object, workers: object) -> dict[str, float]:
        return {"validation_loss": losses[trainer.step_number], "validation_accuracy": 0.5}

    monkeypatch.setattr(Validation, "measure", measured)

    def go_on(steps: int) -> Run:
        stored = Checkpoints(Folder.at(tmp_path / "run"), ALONE, recipe=start.recipe, keep=1)
        run = Run(start, ALONE, "replicated", stored, validation=options(tmp_path))
        run.trainer.config = replace(run.trainer.config, steps=steps)
        run.train(every=1)
        return run

    go_on(3)
    assert sorted(path.name for path in (tmp_path / "run").glob("step_*")) == ["step_000002", "step_000003"]
    run = go_on(5)
    assert run.resumed_after == 3 and best_step(run.curve, "validation_loss") == 2
    assert sorted(path.name for path in (tmp_path / "run").glob("step_*")) == ["step_000002", "step_000005"]
    assert best_step(run.curve, "validation_accuracy") == 2 and best_step(run.curve[:1], "validation_loss") is None
    diverged = [{"step": 0, "validation_loss": math.nan}]
    assert best_step([*diverged, *run.curve], "validation_loss") == 2
    assert best_step(diverged, "validation_loss") is None


def test_a_validation_that_fails_is_a_line_and_no_end(
    start: StartingPoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> dict[str, float]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Validation, "measure", fails)
    run = train_worker(start, ALONE, "replicated", None, every=1, validation=options(tmp_path))
    assert len(run.curve) == 5 and run.trainer.model.training
    assert "validation after step 2 failed: RuntimeError: out of memory" in capsys.readouterr().out


def test_a_share_of_the_data_leaves_training_and_nothing_else_does(start: StartingPoint, tmp_path: Path) -> None:
    for apart in (False, True):
        whole = PreparedExamples(tmp_path / "data", block_size=4, max_length=64, apart=apart)
        kept, share = whole.split(0.3)
        assert len(share.lengths) == len(share) and 0 < len(share) < len(whole)
        assert sorted([*map(repr, kept), *map(repr, share)]) == sorted(map(repr, whole))
        assert [repr(one) for one in whole.split(0.3)[1]] == [repr(one) for one in share]
        rows = [set(range(len(whole)) if part._rows is None else part._rows) for part in (kept, share)]
        assert not rows[0] & rows[1] and len(rows[1]) == round(0.3 * 12)
    run = Run(start, ALONE, "replicated", validation=ValidationOptions(validation="0.3"))
    assert run.validation is not None
    assert [len(run.trainer.examples), len(run.validation.examples)] == [8, 4]
    stored = Checkpoints(Folder.at(tmp_path / "run"), ALONE, recipe=start.recipe)
    train_worker(
        start, ALONE, "replicated", stored, every=9, log_targets=(), validation=ValidationOptions(validation="0.3")
    )
    for other, remedy in (("0.4", "--validation 0.3"), (None, "--validation 0.3")):
        with pytest.raises(ValueError, match=remedy):
            Run(start, ALONE, "replicated", stored, validation=ValidationOptions(validation=other))
    with pytest.raises(ValueError, match="1 of 12"):
        Run(start, ALONE, "replicated", validation=ValidationOptions(validation="0.9"))
    for share_text in ("0", "1", "-0.5", "nan"):
        with pytest.raises(ValueError, match=share_text):
            ValidationOptions(validation=share_text)


def test_both_commands_measure_what_their_options_name(
    start: StartingPoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RECIPES, "held-out-run", replace(start.recipe, name="held-out-run"))
    monkeypatch.chdir(tmp_path)
    recipe = ["--recipe", "held-out-run", "--log-to", "none"]
    for given, every in (("held-out", 2), ("0.25", 3)):
        options = [
            "--validation",
            given,
            "--set",
            f"held_out.validate_every={every}",
            "--set",
            "held_out.keep_best=validation_accuracy",
        ]
        place = ["--checkpoints", f"run-{every}", "--out", f"out-{every}"]
        assert plain.main([*recipe, *options, *place]) == 0
        lines = [json.loads(line) for line in (tmp_path / f"run-{every}" / LOSSES).read_text().splitlines()]
        measured = [line["step"] + 1 for line in lines if "validation_loss" in line]
        assert measured == [*range(every, 5, every), 5]
    assert plain.main([*recipe, "--validation", "nowhere", "--out", "x"]) == 2
    capsys.readouterr()

    runs: list[TrainingRun] = []
    monkeypatch.setattr("jobs.api.training.train_on_cluster", lambda training, *_, **__: runs.append(training))
    command = [*recipe, "--workers", "1", "--storage", str(tmp_path / "runs"), "--set", "held_out.validate_every=7"]
    assert train_multitf.main([*command, "--validation", "held-out", "--set", "held_out.keep_best=none"]) == 0
    assert train_multitf.main([*command, "--validation", "0.25"]) == 0
    assert train_multitf.main([*command, "--validation", "held-out.jsonl"]) == 0
    given = [str(tmp_path / "held-out"), "0.25", str(tmp_path / "held-out.jsonl")]
    assert [one.validation.validation for one in runs] == given
    assert runs[0].validation.validate_every == 7 and runs[0].validation.keep_best == "none"
    assert train_multitf.main([*command, "--validation", "0.9"]) == 2
    assert "--validation 0.9 leaves" in capsys.readouterr().err


def test_held_out_data_that_do_not_fit_are_refused_before_the_run(start: StartingPoint, tmp_path: Path) -> None:
    record = tmp_path / "held-out" / "data.json"
    said = json.loads(record.read_text())
    for changed, reason in ({"tokenizer": "x"}, "another model"), ({"longest": 10**6}, "has room for"):
        record.write_text(json.dumps(said | changed))
        with pytest.raises(ValueError, match=reason):
            Run(start, ALONE, "replicated", validation=options(tmp_path))
    with pytest.raises(ValueError):
        Run(start, ALONE, "replicated", validation=ValidationOptions(validation=str(tmp_path)))
    with pytest.raises(ValueError, match="validate_every=0"):
        ValidationOptions(validate_every=0)


def test_a_file_of_conversations_is_measured_as_its_prepared_folder(
    start: StartingPoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same losses; rows that do not fit are left out, and bad rows are named before anything is trained."""
    given = ValidationOptions(validation=str(tmp_path / "held-out.jsonl"), validate_every=EVERY)
    curves = []
    for held_out in (options(tmp_path), given):
        check_held_out(held_out, start, start.base and start.base.tokenizer)
        run = train_worker(start, ALONE, "replicated", None, every=9, validation=held_out)
        curves.append(run.curve)
    assert curves[0] == curves[1] and "validation_loss" in curves[0][1]
    assert "held out: 7 rows: 7 kept, 0 too long" in capsys.readouterr().out
    with (tmp_path / "held-out.jsonl").open("a") as file:
        file.write(json.dumps({"messages": [*question("why? " * 400), {"role": "assistant", "content": "so"}]}) + "\n")
    Run(start, ALONE, "replicated", validation=given)
    assert "held out: 8 rows: 7 kept, 1 too long" in capsys.readouterr().out
    with (tmp_path / "held-out.jsonl").open("a") as file:
        file.write('{"messages": []}\n{"messages": 7}\n')
    with pytest.raises(ValueError, match=r"--validation .*held-out.jsonl(.|\n)*prepare_data.py"):
        check_held_out(given, start, None)
    with pytest.raises(ValueError, match=r"nowhere.jsonl"):
        check_held_out(replace(given, validation="nowhere.jsonl"), start, None)
    with pytest.raises(ValueError, match="hold out a share"):
        check_held_out(given, replace(start, base=None), None)
