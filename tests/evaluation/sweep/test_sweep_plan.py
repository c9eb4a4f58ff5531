"""What a sweep runs: every model's configurations on every task's problems, and what is refused before it begins."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs.convert_checkpoint import main
from mbd_core.batch.parts import cut
from mbd_core.batch.rows import PLANNED_COLUMNS
from mbd_core.checkpoint.model_digest import model_digest
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.loading import load_inputs
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.evaluation.sweep.plan import plan_sweep
from mbd_core.evaluation.sweep.record import plan_of
from mbd_core.evaluation.sweep.sweep import Sweep


def planned(folder: Path | str, **changes: Any) -> Sweep:
    """The sweep of two problems on a model, with these options."""
    options = SweepOptions(**{"models": [str(folder)], "tasks": ["gsm-mini"], "limit": 2, **changes})
    return plan_sweep(load_inputs(options))


def test_every_configuration_meets_every_problem_and_a_model_s_rows_stand_together(tiny_model_dir: Path) -> None:
    sweep = planned(
        "tiny-mbd",
        models=["tiny-mbd", str(tiny_model_dir)],
        tasks=["gsm-mini", "code-mini"],
        grid="tau_m2t=0.7,0.9;buffer_size=2",
        seed=3,
    )
    rows = list(sweep.rows())
    assert len(rows) == sweep.num_samples == 2 * 2 * 2 * 4
    assert [row["sample"] for row in rows] == list(range(len(rows)))
    assert len({(r["model"], r["task"], r["problem_id"], r["method"], r["config"]) for r in rows}) == len(rows)
    assert [row["model"] for row in rows] == ["tiny-mbd"] * 16 + [tiny_model_dir.name] * 16
    assert {(row["seed"], row["max_tokens"], row["may_shorten"]) for row in rows} == {(3, 128, True)}
    assert {json.loads(row["config"])["buffer_size"] for row in rows} == {1, 2}
    assert pa.Table.from_pylist(rows, schema=PLANNED_COLUMNS).to_pylist() == rows
    assert sweep.models == {"tiny-mbd": "tiny-mbd", tiny_model_dir.name: str(tiny_model_dir.resolve())}
    assert all(model_folder(folder).is_dir() for folder in sweep.models.values())


def test_the_engine_has_the_slots_that_the_configurations_ask_for(tiny_model_dir: Path) -> None:
    engine = EngineConfig(max_rows=3, num_pages=64, kv_memory_fraction=0.5)
    assert planned(tiny_model_dir, engine=engine, grid="buffer_size=2,6").engine == EngineConfig(
        max_rows=3, num_pages=64, kv_memory_fraction=0.5, buffer_size=6
    )
    assert planned(tiny_model_dir, engine=engine, methods=["single"]).engine.buffer_size == 1


def test_a_draft_model_is_recorded_by_its_files_and_reported_by_its_name(tiny_model_dir: Path, tmp_path: Path) -> None:
    twin = shutil.copytree(tiny_model_dir, tmp_path / "twin")
    sweeps = [planned(tiny_model_dir, engine=EngineConfig(draft_model=str(path))) for path in (tiny_model_dir, twin)]
    digests = [plan_of(sweep, list(sweep.rows()))["draft_model"] for sweep in sweeps]
    assert digests == [model_digest(twin)] * 2
    settings = sweeps[1].settings(engine=sweeps[1].engine, num_actors=1, on_gpu=False, machine="")
    assert settings["draft model"]["twin"]["block_size"] == settings["models"][tiny_model_dir.name]["block_size"]
    assert "draft_model" not in plan_of(planned(tiny_model_dir), list(planned(tiny_model_dir).rows()))


def test_defined_methods_run_unless_others_are_named(tiny_model_dir: Path) -> None:
    definitions = ['edit={"t2t": {}}']
    sweep = planned(tiny_model_dir, definitions=definitions)
    assert list(sweep.methods) == ["single", "multi", "edit"]
    assert len(sweep.notes) == 1 and "decoding.t2t was asked for" in sweep.notes[0]
    assert list(planned(tiny_model_dir, definitions=definitions, methods=["multi"]).methods) == ["multi"]


@pytest.mark.parametrize(
    ("shape", "methods"), [("tiny-nemotron", ["ar", "linear-spec", "dlm"]), ("tiny-diffusion-gemma", ["renoise"])]
)
def test_a_model_of_causal_rows_is_compared_by_its_own_methods(tmp_path: Path, shape: str, methods: list[str]) -> None:
    assert main(["--random", shape, "--out", str(tmp_path / shape)]) == 0
    assert list(planned(tmp_path / shape).methods) == methods


def test_a_path_alone_is_the_file_of_the_one_task(tiny_model_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows=1.jsonl"
    data.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    for given in (str(data), f"gsm8k={data}"):
        (drawn,) = planned(tiny_model_dir, tasks=["gsm8k"], data=[given]).tasks
        assert drawn.problem_set.source == str(data)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": ["a.jsonl"], "tasks": ["gsm8k", "humaneval"]}, "with several tasks write TASK=PATH"),
        ({"data": ["gsm8k=a", "gsm8k=b"], "tasks": ["gsm8k"]}, "gives task 'gsm8k' two files: a and b"),
        ({"data": ["a.jsonl"], "tasks": ["harness:any"]}, "none of the --tasks takes a file"),
        ({"data": ["gsm8k=a"]}, "the task 'gsm8k' is not among --tasks gsm-mini"),
        ({"tensor_parallel": 3}, "--tensor-parallel 3 cannot be honoured: model 'tiny-random'"),
        ({"methods": ["verified-two-sizes"]}, "needs a model that drafts: name it by --draft-model"),
        ({"methods": ["d2f"]}, "method 'd2f' needs a model with full attention; 'tiny-random' has block_causal"),
    ],
)
def test_what_cannot_be_run_is_refused(tiny_model_dir: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        planned(tiny_model_dir, **changes)


def test_two_models_of_one_name_are_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    twin = shutil.copytree(tiny_model_dir, tmp_path / tiny_model_dir.name)
    with pytest.raises(ValueError, match=f"'{tiny_model_dir.name}'"):
        planned(tiny_model_dir, models=[str(tiny_model_dir), str(twin)])


def test_a_problem_has_as_many_rows_as_answers_are_drawn_and_each_noise_of_its_own(tiny_model_dir: Path) -> None:
    drawn = list(planned(tiny_model_dir, samples=3, temperature=0.7, grid="tau_m2t=0.7,0.9").rows())
    again = list(planned(tiny_model_dir, samples=3, temperature=0.7, grid="tau_m2t=0.7,0.9").rows())
    assert drawn == again and {row["draw"] for row in drawn} == {0, 1, 2}
    assert len({json.loads(row["sampling"])["seed"] for row in drawn}) == len(drawn) == 2 * 3 * 4
    fewer = list(planned(tiny_model_dir, samples=2, temperature=0.7, grid="tau_m2t=0.7").rows())
    name = ("method", "config", "problem_id", "draw")
    noise = {tuple(row[n] for n in name): row["sampling"] for row in drawn}
    assert all(noise[tuple(row[n] for n in name)] == row["sampling"] for row in fewer)
    (part,) = cut(fewer, rows_per_part=64)
    assert part.table().to_pylist() == fewer


def test_a_greedy_sweep_has_the_columns_that_it_had(tiny_model_dir: Path) -> None:
    sweep = planned(tiny_model_dir)
    (part,) = cut(sweep.rows(), rows_per_part=64)
    assert part.table().schema == PLANNED_COLUMNS and "samples" not in plan_of(sweep, part.rows)
    with pytest.raises(ValueError, match="--temperature above 0"):
        planned(tiny_model_dir, samples=2)
