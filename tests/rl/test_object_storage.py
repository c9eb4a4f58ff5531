"""A run on object storage: the command, a storage that fails under it, a second process, what is missing there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import ENGINE, WatchedExecutor, finish, number_lines, rollout_rows, timeless_lines, tiny_run

from jobs.train_rl import main
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import MODEL_KIND
from mbd_core.files import MANIFEST
from mbd_core.rl.folder import FAILURE, HELD_OUT, ITERATIONS, RunFolder
from mbd_core.rl.loop import RLRun
from mbd_core.rl.rollouts import RolloutPlan
from mbd_core.storage.errors import TakenOver
from mbd_core.storage.folder import Folder
from mbd_core.storage.models import fetch_model


def test_a_command_reads_its_model_from_a_url_and_writes_all_of_its_run_there(
    s3: str,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, runs = Folder.at(f"{s3}/{tmp_path.name}/models/tiny"), Folder.at(f"{s3}/{tmp_path.name}/runs")
    for file in tiny_model_dir.iterdir():
        model.write_file(file.name, file)
    command = ["--local", "--model", str(model), "--storage", str(runs), "--run-name", "one", "--max-tokens", "8"]
    command += ["--iterations", "1", "--prompts", "2", "--group", "2", "--evaluate-every", "1", "--held-out", "2"]
    command += ["--thresholds", "0.9", "--rewards", '{"correct": 0, "tpf": 1}', "--least-tpf-range", "0"]
    command += ["--decoding", '{"buffer_size": 3, "tau_m2t": 0.05}', "--log-to", "tensorboard", "--samples-every", "1"]
    assert main(command) == 0
    run = runs / "one"
    said = capsys.readouterr().out
    assert f"model: {run}/model\n" in said and f"numbers, rollouts and samples: {run}\n" in said
    names = [*run.files("*"), *run.files("rollouts/*/*"), *run.files("learner/*"), *run.files("samples/*")]
    assert names == [
        *(HELD_OUT, ITERATIONS, MANIFEST, "progress.png", "run.json"),
        *(f"rollouts/00000/{kind}-000.parquet" for kind in ("part", "scores")),
        *("learner/00001.pt", "samples/00000.html"),
    ]
    assert len(run.files("tensorboard/events*")) == 1
    assert [line["iteration"] for line in number_lines(run, HELD_OUT)] == [0, 1]
    assert (run / "model").kind() == MODEL_KIND
    assert load_model(Path(fetch_model(f"{run}/model"))).config.block_size == 4
    assert main(command) == 2
    assert f"a run already lies in {run}; go on with --resume" in capsys.readouterr().err
    assert main([*command, "--resume", "--iterations", "2"]) == 0
    assert len(number_lines(run)) == 2 and run.files("learner/*") == ["learner/00002.pt"]


def test_a_storage_that_fails_in_the_middle_leaves_nothing_half_written(
    s3: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second state does not reach it; the run goes on from the first one, as if nothing had happened."""
    recipe, run = tiny_run(tiny_model_dir), Folder.at(f"{s3}/{tmp_path.name}/run")
    system, _ = run.filesystem()
    put_file = system.put_file

    def cut_off(source: str, target: str, **options: Any) -> None:
        if target.endswith("learner/00002.pt"):
            raise ConnectionError("the network\nis down")
        put_file(source, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(system, "put_file", cut_off)
        with pytest.raises(OSError, match=rf"^{run} takes no learner/00002.pt: the network is down"):
            finish(recipe, run)
    assert run.files("learner/*") == ["learner/00001.pt"] and len(number_lines(run)) == 2
    _, model = finish(recipe, run, resume=True)
    _, wanted = finish(recipe, tmp_path / "whole")
    assert model.keys() == wanted.keys() and all(torch.equal(model[name], wanted[name]) for name in model)
    assert rollout_rows(run) == rollout_rows(tmp_path / "whole")
    assert timeless_lines(run) == timeless_lines(tmp_path / "whole")


def test_a_run_that_another_process_took_over_ends_and_writes_no_more(tiny_model_dir: Path, tmp_path: Path) -> None:
    recipe, run = tiny_run(tiny_model_dir), Folder.at(f"memory://{tmp_path.name}/run")
    plan = RolloutPlan.of(recipe, ENGINE)
    first = RunFolder(run, recipe, resume=False)

    class Interrupted(WatchedExecutor):
        """Another process resumes the run while this one learns for the second time."""

        def _call(self, name: str) -> None:
            super()._call(name)
            if self.calls.count("updated") == 2 and name == "updated":
                self.second = RunFolder(run, recipe, resume=True)

    executor = Interrupted(recipe, plan.engine)
    with pytest.raises(TakenOver, match=rf"^{run} was taken over by process"):
        RLRun(plan, first, executor).run()
    executor.close()
    first.close()
    assert run.files("learner/*") == ["learner/00001.pt"] and len(number_lines(run)) == 1
    executor.second.check_ours()
    executor.second.close()


def test_a_state_that_is_not_where_it_should_be_is_told(
    s3: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it a run with `--resume` would begin again at its first iteration, in silence."""
    recipe, run = tiny_run(tiny_model_dir, iterations=2), Folder.at(f"{s3}/{tmp_path.name}/run")
    finish(recipe, run)
    run.remove("learner/00002.pt")
    with pytest.raises(ValueError, match=rf"{run} has numbers of 2 iterations and no state of its learner"):
        RunFolder(run, recipe, resume=True)
    executor = WatchedExecutor(recipe, RolloutPlan.of(recipe, ENGINE).engine)
    with pytest.raises(ValueError, match=re.escape(f"{run}/learner/00002.pt is not on ")):
        executor.load(run, "learner/00002.pt")
    with pytest.raises(ValueError, match=rf"{tmp_path}/none/ is not on \S+, where the learner runs: give --storage"):
        executor.load(Folder.at(tmp_path / "none"), None)
    executor.close()
    other_machine = RunFolder(Folder.at(tmp_path / "elsewhere"), recipe, resume=False)
    with pytest.raises(RuntimeError, match=r"elsewhere/learner/00001.pt, which is not seen on \S+: give --storage"):
        other_machine.drop_older_states(1)
    other_machine.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--storage", "memory://runs"], "memory://runs/tiny-rl lies in the memory of one process"),
        (["--storage", "s4://bucket/runs"], "unknown scheme 's4'"),
        (["--storage", "s3://none-such/runs"], "s3://none-such/runs/tiny-rl cannot be written: "),
        (["--storage", "s3://bucket/runs", "--resume"], "--resume: there is no run in s3://bucket/runs/tiny-rl"),
        (["--storage", "s3://bucket/runs", "--run-name", "../mine"], "run name '../mine' must be one folder name"),
        (["--model", "s3://bucket/no-model"], "no folder lies at s3://bucket/no-model"),
    ],
)
def test_what_cannot_be_a_run_s_place_is_one_sentence(
    s3: str, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--local", *options]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
    assert not Folder.at(f"{s3}/runs").exists() and FAILURE not in said
