"""Tasks of lm-evaluation-harness in a sweep: the same numbers as the harness's own run of the model `mbd`."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="the package lm_eval is not installed")

import lm_eval
from lm_eval import simple_evaluate

from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.report.summary import write_summary
from mbd_core.evaluation.sweep.decoding import DecodingModel
from mbd_core.evaluation.sweep.endpoint import EndpointStage
from mbd_core.evaluation.sweep.executor import LocalExecutor
from mbd_core.evaluation.sweep.folder import SweepFolder, read_samples
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.evaluation.sweep.parts import SweepShard, Timing
from mbd_core.evaluation.sweep.plan import plan_sweep
from mbd_core.evaluation.sweep.run import SweepRun
from mbd_core.evaluation.tasks.harness_tasks import manager_of
from mbd_core.harness.model import HarnessModel
from mbd_core.serving.tokens.load import load_engine
from mbd_core.tasks.generated import GENERATED_TASKS

TASKS = Path(lm_eval.__file__).parent / "tasks"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The harness's GSM8K and IFEval on local files of their schemas."""
    tmp_path = tmp_path_factory.mktemp("harness")
    rows = list(zip(range(12), GENERATED_TASKS["gsm-mini"].generate(split="test", seed=0), strict=False))
    gsm8k = tmp_path / "gsm8k.jsonl"
    gsm8k.write_text("".join(json.dumps(row) + "\n" for _, row in rows))
    ifeval = tmp_path / "ifeval.jsonl"
    asked = [("punctuation:no_comma", {}), ("change_case:english_lowercase", {})]
    ifeval.write_text(
        "".join(
            json.dumps({"key": n, "prompt": f"Say {n}", "instruction_id_list": [name], "kwargs": [given]}) + "\n"
            for n, (name, given) in enumerate(asked * 2)
        )
    )
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local_gsm8k.yaml").write_text(
        f"include: {TASKS}/gsm8k/gsm8k.yaml\ntask: local_gsm8k\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs: {{data_files: {{test: {gsm8k}, train: {gsm8k}}}}}\nnum_fewshot: 1\n"
    )
    (tmp_path / "tasks" / "local_ifeval.yaml").write_text(
        f"include: {TASKS}/ifeval/ifeval.yaml\ntask: local_ifeval\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs: {{data_files: {{train: {ifeval}}}}}\ngeneration_kwargs: {{until: [], max_gen_toks: 24}}\n"
    )
    (tmp_path / "tasks" / "local_choices.yaml").write_text(
        f"task: local_choices\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {gsm8k}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: question\ndoc_to_target: 0\n"
        'doc_to_choice: ["a", "b"]\n'
    )
    (tmp_path / "tasks" / "local_missing.yaml").write_text(
        f"include: {TASKS}/gsm8k/gsm8k.yaml\ntask: local_missing\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/absent.jsonl}}}}\n"
    )
    return tmp_path


def options(folder: Path, task: str, **changes: Any) -> SweepOptions:
    given = {
        "models": ["tiny-mbd"],
        "methods": ["multi"],
        "tasks": [f"harness:{task}"],
        "include_path": str(folder / "tasks"),
        "engine": EngineConfig(max_rows=4),
    }
    return SweepOptions(**{**given, **changes})


def swept(place: Path, chosen: SweepOptions) -> dict[str, Any]:
    sweep = plan_sweep(chosen)

    def load(name: str, engine: EngineConfig) -> DecodingModel:
        loaded = load_engine(model_folder(name), engine)
        return DecodingModel(loaded.engine, loaded.tokenizer)

    work = SweepRun.of(sweep, shard=SweepShard(), timing=Timing(problems=0))
    work.run(
        place,
        lambda: nullcontext(LocalExecutor(load, sweep.engine, concurrency=1)),
        stage=EndpointStage({}, {}, concurrency=1),
        report=write_summary,
    )
    content: dict[str, Any] = json.loads((place / "report.json").read_text())
    return content


@pytest.mark.parametrize(
    ("task", "form"), [("local_gsm8k", "turn"), ("local_gsm8k", "plain"), ("local_ifeval", "turn")]
)
def test_a_sweep_has_the_numbers_of_the_harness_s_own_run(folder: Path, tmp_path: Path, task: str, form: Any) -> None:
    pytest.importorskip("langdetect", reason="IFEval's grader needs it") if task == "local_ifeval" else None
    own = simple_evaluate(
        model=HarnessModel("tiny-mbd", "multi", batch_size=4, device="cpu"),
        tasks=[task],
        task_manager=manager_of(str(folder / "tasks")),
        apply_chat_template=form != "plain",
        fewshot_as_multiturn=False,
        bootstrap_iters=0,
    )
    assert own is not None
    (row,) = swept(tmp_path / "out", options(folder, task, form=form))["rows"]
    found = {
        f"{metric},{by}": value for by, all_of in row["harness"]["metrics"].items() for metric, value in all_of.items()
    }
    wanted = {name: value for name, value in own["results"][task].items() if name in found}
    assert found == wanted and len(found) >= 2
    assert row["n"] == row["harness"]["num_graded"] == own["n-samples"][task]["effective"]
    texts = [sample["resps"][0][0] for sample in own["samples"][task]]
    assert row["num_tokens"] == sum(text.measures()["tokens"] for text in texts)


def test_what_a_decoder_does_not_change_and_what_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"local_choices.*log-likelihoods.*mbd-lm-eval"):
        plan_sweep(options(folder, "local_choices"))
    with pytest.raises(ValueError, match=r"no task 'absent'.*--include"):
        plan_sweep(options(folder, "absent"))
    with pytest.raises(ValueError, match=r"local_missing.*cannot be loaded.*--include"):
        plan_sweep(options(folder, "local_missing"))


def test_a_group_has_the_average_that_it_defines(folder: Path, tmp_path: Path) -> None:
    """Of tasks of 12 and of 5 documents, weighted by their sizes and not."""
    tasks = folder / "tasks"
    short = folder / "short.jsonl"
    short.write_text("".join((folder / "gsm8k.jsonl").read_text().splitlines(keepends=True)[:5]))
    whole = (tasks / "local_gsm8k.yaml").read_text()
    (tasks / "local_short.yaml").write_text(
        whole.replace("task: local_gsm8k", "task: local_short").replace(
            f"test: {folder}/gsm8k", f"test: {folder}/short"
        )
    )
    for weighted in ("true", "false"):
        (tasks / f"group_{weighted}.yaml").write_text(
            f"group: group_{weighted}\ntask: [local_gsm8k, local_short]\naggregate_metric_list:\n"
            f"  - {{metric: exact_match, aggregation: mean, weight_by_size: {weighted}, "
            "filter_list: [flexible-extract]}\n"
        )
    manager_of.cache_clear()
    names = ["group_true", "group_false"]
    chosen = options(folder, "group_true", tasks=[f"harness:{name}" for name in names])
    content = swept(tmp_path / "out", chosen)
    values, sizes = [], []
    for row in content["rows"]:
        values.append(row["harness"]["metrics"]["flexible-extract"]["exact_match"])
        sizes.append(row["n"])
    assert sizes == [12, 5]
    found = {one["group"]: one for one in content["harness_groups"]}
    wanted = [sum(v * n for v, n in zip(values, sizes, strict=True)) / 17, sum(values) / 2]
    assert [found[f"harness:{name}"]["metrics"]["flexible-extract"]["exact_match"] for name in names] == pytest.approx(
        wanted
    )
    assert all((one["num_graded"], one["num_answers"]) == (17, 17) for one in found.values())
    assert "group_false" in (tmp_path / "out" / "report.md").read_text()
    own = simple_evaluate(
        model=HarnessModel("tiny-mbd", "multi", batch_size=4, device="cpu"),
        tasks=names[:1],  # it refuses groups that share a task
        task_manager=manager_of(str(tasks)),
        bootstrap_iters=0,
    )
    assert own is not None
    assert own["groups"][names[0]]["exact_match,flexible-extract"] == pytest.approx(wanted[0])


def test_a_killed_sweep_of_the_harness_goes_on_and_has_each_answer_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = options(folder, "local_gsm8k", engine=EngineConfig(max_rows=1))
    whole = swept(tmp_path / "whole", chosen)
    write, written = SweepFolder.write_part, list[int]()

    def killed(self: SweepFolder, number: int, table: Any) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(number)
        write(self, number, table)

    with monkeypatch.context() as patch:
        patch.setattr(SweepFolder, "write_part", killed)
        with pytest.raises(KeyboardInterrupt):
            swept(tmp_path / "out", chosen)
    there = sorted(row["sample"] for row in read_samples(tmp_path / "out"))
    assert 0 < len(there) < 12
    assert swept(tmp_path / "out", chosen)["rows"] == whole["rows"]
    assert sorted(row["sample"] for row in read_samples(tmp_path / "out")) == list(range(12))
