"""The loop without Ray: rewards rise, a run that is killed anywhere goes on as if it had not been."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from base_folders import base_folder
from rl_runs import DIGITS, ENGINE, finish, rollout_rows, timeless_lines, tiny_run
from rl_runs import number_lines as lines

from jobs.train_rl import RLOptions, chosen_recipe, main
from mbd_core.checkpoint.saving import save_random
from mbd_core.checkpoint.shape_tokenizer import shape_tokenizer
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.sequences.admission import Admission, AdmittedRequest
from mbd_core.models.shapes import SHAPES
from mbd_core.multitf.config import LoraSettings
from mbd_core.multitf.step.objective import PolicyObjective
from mbd_core.rl.config import HeldOutConfig, RLRecipe, RolloutConfig
from mbd_core.rl.folder import FILES, HELD_OUT, KIND, LOCK, RECORD, RunFolder
from mbd_core.rl.groups import GroupConfig
from mbd_core.rl.parts import RewardFailed
from mbd_core.rl.recipes import RL_RECIPES, rl_recipe_named
from mbd_core.rl.rewards import RewardConfig
from mbd_core.rl.rollouts import RolloutPlan, replayed
from mbd_core.storage.folder import Folder


def digits_run(model: Path, **changes: Any) -> RLRecipe:
    """Six iterations of four groups of eight, rewarded for the share of digits in an answer's text."""
    asked = RolloutConfig(
        task="gsm-mini", prompts=4, group=8, part_rows=32, max_tokens=12, decoding={"buffer_size": 3, "tau_m2t": 0.4}
    )
    return tiny_run(model, rollouts=asked, rewards=RewardConfig(rewards=DIGITS), iterations=6, **changes)


@pytest.mark.usefixtures("rendered_pictures")
def test_a_reward_rises_and_the_learner_scores_as_the_engine_did(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The whole loop: drawn answers, a function's reward, updates, swaps, held-out sweeps, samples and a model."""
    recipe = digits_run(
        tiny_model_dir,
        samples_every=4,
        held_out=HeldOutConfig(evaluate_every=6, held_out=4, thresholds=(0.4, 0.9)),
    )
    finish(recipe, tmp_path / "run", engine=replace(ENGINE, max_rows=32))
    numbers = lines(tmp_path / "run")
    rewards = [line["reward"] for line in numbers]
    assert max(rewards[:2]) < 0.1 < 0.3 < min(rewards[4:])
    assert all(line["d_max"] < 2e-4 and line["effective_share"] > 0.999 for line in numbers)
    assert all(line["version_lag"] == 0 and line["answers_learned"] == 32 for line in numbers)
    assert all(name in numbers[0] for name in ("correct", "tpf", "tokens_each", "eos", "overlong", "entropy"))
    front = lines(tmp_path / "run", HELD_OUT)
    assert [(line["iteration"], line["tau_m2t"]) for line in front] == [(0, 0.4), (0, 0.9), (6, 0.4), (6, 0.9)]
    assert all(line["problems"] == 4 and line["tpf"] > 0 for line in front)
    assert {path.name for path in (tmp_path / "run" / "samples").iterdir()} == {f"0000{n}.html" for n in (0, 4, 5)}
    page = (tmp_path / "run" / "samples" / "00004.html").read_text()
    assert "the best and the worst of 8 answers" in page and "accepted by this forward" in page
    assert (tmp_path / "run" / "progress.png").stat().st_size > 1000
    written = json.loads((tmp_path / "run" / "model" / "rl_recipe.json").read_text())
    assert written["rewards"]["rewards"] == DIGITS
    RolloutPlan.of(replace(recipe, model=str(tmp_path / "run" / "model")), ENGINE)  # it can be trained again


def test_a_reward_does_not_rise_by_shuffled_advantages(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The same answers, updates and sizes of advantages, of which none is its own answer's."""
    control = GroupConfig(advantages="shuffled", least_right=0.0, least_tpf_range=0.0)
    finish(digits_run(tiny_model_dir, groups=control), tmp_path / "run", engine=replace(ENGINE, max_rows=32))
    numbers = lines(tmp_path / "run")
    assert all(line["answers_learned"] == 32 for line in numbers) and numbers[0]["advantage_max"] > 1
    assert max(line["reward"] for line in numbers) < 0.1


@pytest.mark.parametrize(
    ("ends_at", "place"),
    [
        *((2, "disk"), (6, "s3"), (8, "disk")),
        *(pytest.param(n, "disk", marks=pytest.mark.slow) for n in (5, 7, 9, 11)),
        *(pytest.param(n, "s3", marks=pytest.mark.slow) for n in (2, 5, 7, 8, 9, 11)),
    ],
)
def test_a_run_that_is_killed_anywhere_goes_on_as_if_it_had_not_been(
    request: pytest.FixtureRequest,
    tiny_model_dir: Path,
    tmp_path: Path,
    whole_run: tuple[Path, dict[str, torch.Tensor]],
    ends_at: int,
    place: Literal["disk", "s3"],
) -> None:
    """Killed within the second iteration: between two parts, after scoring, before and after an update, before and
    after its state is written. Rollouts, numbers and weights are those of the run that was not killed, bit for bit,
    and what each version of the weights was taught are its own rollouts, once."""
    whole_folder, whole_model = whole_run
    runs = tmp_path if place == "disk" else f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    recipe, folder = tiny_run(tiny_model_dir), Folder.at(runs) / "run"
    calls_before = 10  # the first swap, and the first iteration's parts, scores, update, save and swap
    killed, nothing = finish(recipe, folder, ends_at=calls_before + ends_at)
    assert not nothing
    resumed, model = finish(recipe, folder, resume=True)
    assert model.keys() == whole_model.keys()
    assert all(torch.equal(model[name], whole_model[name]) for name in model)
    assert folder.files("learner/*") == ["learner/00003.pt"]
    assert rollout_rows(folder) == rollout_rows(whole_folder)
    assert timeless_lines(folder) == timeless_lines(whole_folder) and len(lines(folder)) == 3
    num_saved = killed.calls.count("saved")
    lineage = killed.taught[:num_saved] + resumed.taught
    assert len(lineage) == 3 == len(set(lineage))


@pytest.fixture(scope="module")
def whole_run(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    executor, model = finish(tiny_run(tiny_model_dir), folder)
    ending = ["update", "updated", "swap", "save", "saved"]
    assert executor.calls[:10] == ["swap", *["rollouts", "scores"] * 2, *ending]
    return folder, model


def test_recorded_experts_reach_the_learner_and_survive_a_resumed_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    model, folder = str(tmp_path / "experts"), tmp_path / "run"
    config = replace(SHAPES["tiny-llada2"], block_size=4)
    save_random(config, Path(model), tokenizer=shape_tokenizer(config), dtype=torch.float32)
    plain = tiny_run(model, iterations=2)
    recipe = replace(plain, rollouts=replace(plain.rollouts, record_experts=True))
    finish(recipe, folder, ends_at=5)  # in the first iteration: rollouts are written, and nothing was learned
    finish(recipe, folder, resume=True)
    assert all(line["d_max"] < 2e-4 for line in lines(folder))
    rows = [row for part in rollout_rows(folder).values() for row in part]
    assert len(rows) == 16
    assert config.moe is not None
    num_layers = sum(config.is_sparse(layer) for layer in range(config.num_layers))
    for row in rows:
        records = replayed(row, advantage=1.0, correct=True).experts
        assert sum(record.forward > 0 for record in records) == row["num_forwards"]
        assert {record.ids.shape[1:] for record in records} == {(num_layers, config.moe.experts_per_token)}
    for other, why in (({"model": str(tiny_model_dir)}, "no experts"), ({"shrink": 2}, "shrink=1")):
        with pytest.raises(ValueError, match=why):
            RolloutPlan.of(replace(recipe, **other), ENGINE)


def test_one_step_off_learns_from_the_weights_before(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Iteration n + 1 is drawn with the weights of iteration n; after a kill what is too old or lost is not used."""
    objective = PolicyObjective(kind="clipped", old="rollout")
    recipe = tiny_run(tiny_model_dir, schedule="one-step-off", objective=objective, iterations=4)
    executor, _ = finish(recipe, tmp_path / "run")
    assert executor.calls.count("scores") == executor.calls.count("rollouts") == 8  # each part once
    assert [line["version_lag"] for line in lines(tmp_path / "run")] == [0, 1, 1, 1]
    versions = {rows[0]["version"] for rows in rollout_rows(tmp_path / "run").values()}
    assert versions == {0, 1, 2}
    every = replace(recipe, checkpoint_every=3)
    executor, _ = finish(every, tmp_path / "killed", ends_at=16)
    assert executor.calls.count("updated") == 2 and executor.calls.count("saved") == 0
    drawn = {rows[0]["version"] for rows in rollout_rows(tmp_path / "killed").values()}
    assert drawn > {0}
    finish(every, tmp_path / "killed", resume=True)
    assert rollout_rows(tmp_path / "killed") == rollout_rows(tmp_path / "run")


@pytest.mark.parametrize("on_error", ["drop", "stop"])
def test_a_reward_that_always_fails_loses_nothing(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: Literal["drop", "stop"]
) -> None:
    """It ends the run in its first iteration; the answers are scored anew."""
    monkeypatch.setenv("RL_REWARD_SWITCH", str(tmp_path / "switch"))
    rewards = RewardConfig(rewards={"rl_rewards:broken_once": 1.0}, on_reward_error=on_error)
    recipe = tiny_run(tiny_model_dir, iterations=1, rewards=rewards)
    says = (
        "^no answer of iteration 1 got a reward, 8 of 8 failed: reward 'rl_rewards:broken_once' raised RuntimeError: "
    )
    if on_error == "stop":
        says = "raised RuntimeError: the switch is off, for an answer to gsm-mini/train/"
    with pytest.raises(RewardFailed, match=says):
        finish(recipe, tmp_path / "run")
    drawn = rollout_rows(tmp_path / "run")
    assert len(drawn) == (1 if on_error == "stop" else 2)
    assert not list((tmp_path / "run").glob("rollouts/*/scores-*"))
    (tmp_path / "switch").touch()
    executor, _ = finish(recipe, tmp_path / "run", resume=True)
    assert executor.calls.count("rollouts") == 2 - len(drawn)  # the parts that were not there
    assert rollout_rows(tmp_path / "run") == rollout_rows(tmp_path / "run") | drawn


def test_answers_whose_reward_fails_are_dropped_and_counted(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = RewardConfig(rewards={"tpf": 1.0, "rl_rewards:fails_for_some": 1.0, "rl_rewards:only_long": 1.0})
    recipe = tiny_run(tiny_model_dir, iterations=2, rewards=rewards, samples_every=1)
    finish(recipe, tmp_path / "run", ends_at=5)
    finish(recipe, tmp_path / "run", resume=True)
    finish(recipe, tmp_path / "whole")
    drawn, whole = ({path: path.read_bytes() for path in place} for place in score_files(tmp_path, "run", "whole"))
    assert len(drawn) == 4 and list(drawn.values()) == list(whole.values())
    (first, second) = lines(tmp_path / "run")
    sentence = "reward 'rl_rewards:fails_for_some' raised ValueError: an odd answer"
    assert 0 < first["failed"] == first["unrewarded"] < 8 and first["failures"] == {sentence: first["failed"]}
    assert first["answers_learned"] <= 8 - first["failed"]
    number = int(first["failed"])
    assert f"iteration 1: {number} of 8 answers are dropped, since their reward failed" in capsys.readouterr().out
    assert "reward_rl_rewards_fails_for_some" in second


def score_files(folder: Path, *names: str) -> list[list[Path]]:
    return [sorted((folder / name).glob("rollouts/*/scores-*")) for name in names]


NEVER_RIGHT = RewardConfig(rewards={"correct": 1.0, "tpf": 1.0})


def test_groups_that_teach_nothing_leave_the_weights_and_the_run_says_so(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_run(tiny_model_dir, iterations=2, groups=GroupConfig(), rewards=NEVER_RIGHT)
    with pytest.raises(RuntimeError, match=r"4 were dropped.*a higher limit, since all are done \(--iterations 2\)"):
        finish(recipe, tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"a higher limit, since 8 answers were drawn \(--max-rollouts 1\)"):
        finish(replace(recipe, max_rollouts=1), tmp_path / "limited")
    why = "of 2 groups, 2 were dropped, since their share of right answers is below 0.01 (--least-right 0 keeps them)"
    said = capsys.readouterr().out
    assert f"iteration 1 taught nothing: {why}" in said and f"iteration 2 taught nothing: {why}" in said
    for line in lines(tmp_path / "run"):
        assert line["groups_dropped_too_few_right"] == 2 and line["answers_learned"] == 0 and "loss" not in line
    assert not (tmp_path / "run" / "model").exists()


def test_a_run_without_a_lesson_ends_early_and_goes_on(tiny_model_dir: Path, tmp_path: Path) -> None:
    recipe = tiny_run(
        tiny_model_dir, iterations=9, checkpoint_every=9, groups=GroupConfig(), rewards=NEVER_RIGHT, most_idle=2
    )
    with pytest.raises(RuntimeError, match="--most-idle 2"):
        finish(recipe, tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"^3 iterations"):
        finish(replace(recipe, most_idle=3), tmp_path / "run", resume=True)
    assert [line["iteration"] for line in lines(tmp_path / "run")] == [0, 1, 2, 3, 4]


def test_groups_are_judged_by_what_is_rewarded(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A model that is never right, and one token a forward: TPF is equal."""
    asked = RolloutConfig(
        task="gsm-mini", prompts=2, group=4, part_rows=4, max_tokens=8, decoding={"buffer_size": 1, "tau_m2t": 1.0}
    )
    short = RewardConfig(rewards={"correct": 0.0, "tpf": 0.0, "rl_rewards:short": 1.0})
    recipe = tiny_run(tiny_model_dir, iterations=1, groups=GroupConfig(), rewards=short, rollouts=asked)
    executor, _ = finish(recipe, tmp_path / "run")
    assert executor.taught and lines(tmp_path / "run")[0]["answers_learned"] > 0


def test_groups_without_an_answer_are_counted_and_a_run_without_any_ends(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine refuses one group of two; or both, which are longer than the model's positions."""
    recipe = tiny_run(tiny_model_dir, iterations=1)
    check = Admission.check

    def refuses_the_first(admission: Admission, request: Request) -> AdmittedRequest:
        return check(admission, replace(request, max_tokens=10**6) if int(request.request_id) < 4 else request)

    with monkeypatch.context() as patch:
        patch.setattr(Admission, "check", refuses_the_first)
        finish(recipe, tmp_path / "run")
    (line,) = lines(tmp_path / "run")
    assert line["groups_dropped_undecoded"] == 1 and line["undecoded"] == 4 == line["answers_learned"]
    long = replace(recipe, rollouts=replace(recipe.rollouts, max_tokens=10**6))
    with pytest.raises(RuntimeError, match="512"):
        finish(long, tmp_path / "long")
    assert not (tmp_path / "long" / "model").exists()


def test_a_folder_holds_one_run(tiny_model_dir: Path, tmp_path: Path) -> None:
    recipe = tiny_run(tiny_model_dir, iterations=1)
    with pytest.raises(ValueError, match="--resume: there is no run in"):
        finish(recipe, tmp_path / "run", resume=True)
    finish(recipe, tmp_path / "run")
    with pytest.raises(ValueError, match="--resume"):
        finish(recipe, tmp_path / "run")
    other = replace(recipe, rollouts=replace(recipe.rollouts, group=8))
    with pytest.raises(ValueError, match=r"rollouts\.group"):
        finish(other, tmp_path / "run", resume=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="was not written by this project"):
        finish(recipe, tmp_path / "other")
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"
    longer = replace(recipe, iterations=2)  # goes on where it ended
    executor, _ = finish(longer, tmp_path / "run", resume=True)
    assert len(executor.taught) == 1 and len(lines(tmp_path / "run")) == 2
    with pytest.raises(ValueError, match="give at least 2"):
        finish(recipe, tmp_path / "run", resume=True)


def test_a_run_that_was_killed_before_its_record_begins_anew(tiny_model_dir: Path, tmp_path: Path) -> None:
    recipe, place = tiny_run(tiny_model_dir, iterations=1), tmp_path / "run"
    Folder.at(place).claim(KIND, FILES, lock=LOCK).close()
    with pytest.raises(ValueError, match="--resume: there is no run in"):
        RunFolder(Folder.at(place), recipe, resume=True)
    RunFolder(Folder.at(place), recipe, resume=False).close()
    (place / RECORD).unlink()
    (place / "learner").mkdir()
    (place / "learner" / "00001.pt").touch()
    with pytest.raises(ValueError, match=r"the learner of a run without its run\.json; choose another --run-name"):
        RunFolder(Folder.at(place), recipe, resume=False)


def test_bad_input_is_one_sentence(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--local", "--max-failures", "1", "--storage", str(tmp_path)]) == 2
    assert "leave --max-failures out" in capsys.readouterr().err
    with pytest.raises(ValueError, match="harness:arc"):
        RolloutConfig(task="harness:arc")
    with pytest.raises(ValueError, match="known: gsm-mini"):
        RolloutConfig(task="arc")
    with pytest.raises(ValueError, match="are not read out of rollouts"):
        RolloutConfig(task="bfcl-free:parallel")
    with pytest.raises(ValueError, match="group=1"):
        tiny_run(tiny_model_dir, rollouts=RolloutConfig(group=1))
    with pytest.raises(ValueError, match=r"temperature=0\.0"):
        RolloutConfig(temperature=0.0)
    with pytest.raises(ValueError, match="one-step-off"):
        tiny_run(tiny_model_dir, schedule="one-step-off")
    with pytest.raises(ValueError, match="known: ledger-opd, ledger-rl, tiny-opd, tiny-rl"):
        rl_recipe_named("rl")
    recipe = tiny_run(tiny_model_dir)
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny_model_dir.iterdir():
        if not file.name.startswith("tokenizer"):
            (bare / file.name).write_bytes(file.read_bytes())
    refused = [
        ({"model": str(bare)}, "bare.*tokenizer"),
        ({"model": str(base_folder(tmp_path / "ar", "Llama", "tiny-llama"))}, "ar' decodes with ar, and a learner"),
        ({"rollouts": replace(recipe.rollouts, task="gsm8k")}, r"task 'gsm8k' needs the file .*--data PATH"),
        ({"rollouts": replace(recipe.rollouts, prompt_recipe="none")}, "unknown recipe 'none'"),
        (
            {"rollouts": replace(recipe.rollouts, decoding={"t2t": {"tau": 0.4}})},
            "t2t cannot be replayed",
        ),
        ({"rollouts": replace(recipe.rollouts, decoding={"tau": 0.4})}, "tau"),
    ]
    for changes, says in refused:
        with pytest.raises(ValueError, match=says) as error:
            RolloutPlan.of(replace(recipe, **changes), ENGINE)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--set train.steps=3", "there is no field train.steps"),
        ("--set train.lrr=1", "there is no field train.lrr; is 'train.lr' meant?"),
        ("--clip 1 --set train.clip=1", "--clip and --set train.clip are both given"),
        ("--betas 0.9,0.99", "(say --set train.betas=VALUE)"),
        ("--set train.betas=[0.9,2]", "must be a list of 2 numbers from 0 to 1"),
        ("--set train.tensor_parallel=2", "train.tensor_parallel=2 does not divide --learners 1"),
        ("--learners 3", "make 32 answers, which do not divide over --learners 3"),
        ("--lora 4 --lora-dropout 0.1", "give dropout 0"),
        ("--lora 4 --set train.lora.quantize_base=nf4", "there is no field train.lora.quantize_base"),
    ],
)
def test_what_a_learner_cannot_honour_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, sentence: str
) -> None:
    assert main([*options.split(), "--storage", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ({"start": "adapter"}, "start=adapter is MultiTF's, .* merge the adapter into the model first"),
        ({"quantize_base": "nf4"}, "quantize_base=nf4 is MultiTF's"),
        ({"dropout": 0.1}, "give dropout 0"),
    ],
)
def test_a_recipe_s_adapter_that_no_learner_takes_is_refused(field: dict[str, Any], sentence: str) -> None:
    train = rl_recipe_named("tiny-rl").train
    with pytest.raises(ValueError, match=sentence):
        replace(rl_recipe_named("tiny-rl"), train=replace(train, lora=LoraSettings(**{"dropout": 0.0} | field)))


def test_the_rank_of_an_adapter_is_enough() -> None:
    lora = chosen_recipe(RLOptions(), {"train": {"lora": {"rank": 4}}}).train.lora
    assert lora is not None and (lora.rank, lora.alpha, lora.dropout) == (4, 4, 0.0)
    lora = chosen_recipe(RLOptions(), {"train": {"lora": {"rank": 4, "alpha": 8}}}).train.lora
    assert lora is not None and (lora.alpha, lora.dropout) == (8, 0.0)


def test_set_changes_a_field_without_an_option() -> None:
    changes = {"train": {"betas": (0.8, 0.9)}, "rollouts": {"prompts": 2}}
    recipe = chosen_recipe(RLOptions(), changes)
    assert recipe.train.betas == (0.8, 0.9) and recipe.train.batch_size == 2 * recipe.rollouts.group
    with pytest.raises(ValueError, match=r"^train.seed follows other options: give --seed instead"):
        chosen_recipe(RLOptions(), {"train": {"seed": 3}})


def test_a_command_whose_reward_fails_goes_on_once_it_is_mended(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    size = ["--iterations", "1", "--prompts", "1", "--group", "2", "--max-tokens", "16", "--evaluate-every", "0"]
    model = ["--local", "--model", str(tiny_model_dir), "--storage", str(tmp_path), "--log-to", "none"]
    command = [*model, *size, "--run-name", "run", "--rewards", '{"mended:reward": 1}']
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "reward 'mended:reward' raised ModuleNotFoundError: No module named 'mended'" in said
    assert not (tmp_path / "run").exists()
    (tmp_path / "mended.py").write_text("def reward(prompt, text, reference): raise KeyError('reward')\n")
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "raised KeyError: 'reward'" in said and "--resume" in said and "Traceback" not in said
    part, failure = tmp_path / "run" / "rollouts" / "00000" / "part-000.parquet", tmp_path / "run" / "failure.txt"
    drawn = part.read_bytes()
    assert "Traceback" in failure.read_text()
    (tmp_path / "mended.py").write_text("def reward(prompt, text, reference): return hash(text) % 97\n")
    assert main([*command, "--resume", "--reward-seconds", "20"]) == 0
    assert part.read_bytes() == drawn and not failure.exists()


@pytest.mark.parametrize("name", sorted(RL_RECIPES))
def test_a_recipe_can_be_planned(name: str) -> None:
    plan = RolloutPlan.of(rl_recipe_named(name), ENGINE)
    parts = [table.num_rows for _, table in plan.parts(0)]
    assert sum(parts) == plan.recipe.answers and plan.recipe.train.batch_size == plan.recipe.answers


def test_an_engine_computes_in_bfloat16_where_its_learner_is_asked_to(tiny_model_dir: Path) -> None:
    recipe = tiny_run(tiny_model_dir)
    wide = replace(recipe, train=replace(recipe.train, precision="bfloat16"))
    assert RolloutPlan.of(recipe, ENGINE).engine.dtype == ENGINE.dtype == "auto"  # float32 on a CPU
    assert RolloutPlan.of(wide, ENGINE).engine.dtype == "bfloat16"
    assert RolloutPlan.of(wide, replace(ENGINE, dtype="float32")).engine.dtype == "float32"
