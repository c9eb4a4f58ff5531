"""Tasks of lm-evaluation-harness in a sweep: the same numbers as the harness's own run of the model `mbd`."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="the package lm_eval is not installed")

import lm_eval
from lm_eval import simple_evaluate

from mbd_core.batch.decoding_model import DecodingModel
from mbd_core.batch.executor import LocalExecutor
from mbd_core.batch.timed_cases import Timing
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.report.summary import write_summary
from mbd_core.evaluation.sweep.endpoints.endpoint import EndpointStage
from mbd_core.evaluation.sweep.folder import SweepFolder, read_samples
from mbd_core.evaluation.sweep.grading.part_grading import Grading
from mbd_core.evaluation.sweep.loading import load_inputs
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.evaluation.sweep.plan import plan_sweep
from mbd_core.evaluation.sweep.run import SweepRun
from mbd_core.evaluation.sweep.shard import SweepShard
from mbd_core.evaluation.tasks.kinds.harness import manager_of
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
    choices = tmp_path / "choices.jsonl"
    choices.write_text(
        "".join(
            json.dumps(
                {
                    "question": f"What is {n} + {n}? ",
                    "choices": [str(2 * n + shift) for shift in range(4)],
                    "answer": n % 4,
                    "subject": "sums",
                    "Question": f"What is {n} + 1?",
                    "Correct Answer": str(n + 1),
                    **{f"Incorrect Answer {k}": str(n + 1 + k) for k in (1, 2, 3)},
                    "text": f"Tom has {n} apples and no pears",
                }
            )
            + "\n"
            for n in range(7)
        )
    )
    local = (
        f"dataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs: {{data_files: {{test: {choices}, dev: {choices}, train: {choices}}}}}\n"
    )
    (tmp_path / "tasks" / "local_mmlu.yaml").write_text(
        f"include: {TASKS}/mmlu/default/mmlu_abstract_algebra.yaml\ntask: local_mmlu\nnum_fewshot: 1\n{local}"
    )
    (tmp_path / "tasks" / "local_gpqa.yaml").write_text(
        f"include: {TASKS}/gpqa/zeroshot/_gpqa_zeroshot_yaml\ntask: local_gpqa\n{local}"
    )
    (tmp_path / "tasks" / "local_lambada.yaml").write_text(
        f"include: {TASKS}/lambada/lambada_openai.yaml\ntask: local_lambada\n{local}"
    )
    (tmp_path / "tasks" / "local_information.yaml").write_text(
        f"task: local_information\ntest_split: test\noutput_type: multiple_choice\ndoc_to_text: question\n"
        f"doc_to_target: answer\ndoc_to_choice: choices\n{local}"
        "metric_list: [{metric: acc_mutual_info}, {metric: acc_norm}, {metric: exact_match}, {metric: brier_score}]\n"
    )
    (tmp_path / "tasks" / "local_pages.yaml").write_text(
        f"task: local_pages\ntest_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\n"
        f"doc_to_target: question\n{local}metric_list: [{{metric: word_perplexity}}]\n"
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
    sweep = plan_sweep(load_inputs(chosen))

    def load(name: str, engine: EngineConfig) -> DecodingModel:
        loaded = load_engine(model_folder(name), engine)
        return DecodingModel(loaded.engine, loaded.tokenizer)

    work = SweepRun.of(sweep, shard=SweepShard(), timing=Timing(problems=0))
    work.run(
        place,
        lambda: nullcontext(LocalExecutor(load, sweep.engine, Grading(), concurrency=1)),
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


def test_a_task_that_counts_sentences_without_nltk_s_rules_is_refused_before_it_is_asked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("langdetect", reason="IFEval's grader needs it")
    monkeypatch.setattr(pytest.importorskip("nltk").data, "path", [])
    kwargs = {"relation": "less than", "num_sentences": 3}
    row = {"key": 0, "prompt": "Say 0", "instruction_id_list": ["length_constraints:number_sentences"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "kwargs": [kwargs]}) + "\n")
    text = (folder / "tasks" / "local_ifeval.yaml").read_text().replace("local_ifeval", "of_sentences")
    text = text.replace(str(folder / "ifeval.jsonl"), str(tmp_path / "rows.jsonl"))
    (tmp_path / "of_sentences.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"nltk\.downloader punkt_tab"):
        load_inputs(options(tmp_path, "of_sentences", form="turn", include_path=str(tmp_path)))


@pytest.mark.parametrize(
    ("task", "form"),
    [
        ("local_mmlu", "plain"),
        pytest.param("local_mmlu", "turn", marks=pytest.mark.slow),
        pytest.param("local_gpqa", "plain", marks=pytest.mark.slow),
        ("local_lambada", "plain"),
        pytest.param("local_information", "plain", marks=pytest.mark.slow),
    ],
)
def test_log_likelihoods_of_a_sweep_are_the_harness_s_own(folder: Path, tmp_path: Path, task: str, form: Any) -> None:
    """Of the forms of MMLU, GPQA (whose choices are shuffled) and LAMBADA, and with an empty context."""
    own = simple_evaluate(
        model=HarnessModel("tiny-mbd", batch_size=4, device="cpu", mc_num=3),
        tasks=[task],
        task_manager=manager_of(str(folder / "tasks")),
        apply_chat_template=form != "plain",
        fewshot_as_multiturn=False,
        bootstrap_iters=0,
    )
    assert own is not None
    chosen = options(folder, task, form=form, methods=None, mc_num=3)
    (row,) = swept(tmp_path / "out", chosen)["rows"]
    (metrics,) = row["harness"]["metrics"].values()
    wanted = {name.partition(",")[0]: value for name, value in own["results"][task].items() if "_stderr" not in name}
    assert metrics == pytest.approx({name: wanted[name] for name in metrics}) and metrics
    assert (row["method"], row["n"], row["harness"]["num_graded"], row["tpf"]) == ("log-likelihood", 7, 7, None)
    samples = sorted(own["samples"][task], key=lambda sample: sample["doc_id"])
    rows = sorted(read_samples(tmp_path / "out"), key=lambda row: row["sample"])
    for found, sample in zip(rows, samples, strict=True):
        theirs = [response[0] for response in sample["resps"]]
        ours = json.loads(found["text"])
        assert [nats for nats, _ in ours] == pytest.approx([nats for nats, _ in theirs], rel=1e-5)
        if task in ("local_lambada", "local_information"):
            assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_tasks_that_score_are_swept_beside_those_that_decode(folder: Path, tmp_path: Path) -> None:
    """One configuration of log-likelihoods, two decoders, one report; and what was there is not computed again."""
    both = ["harness:local_mmlu", "harness:local_gsm8k"]
    chosen = options(folder, "", tasks=both, methods=["single", "multi"], mc_num=1, limit=3)
    sweep = plan_sweep(load_inputs(chosen))
    assert sweep.num_samples == len(list(sweep.rows())) == 3 + 2 * 3
    rows = swept(tmp_path / "out", chosen)["rows"]
    assert [(row["task"].partition(":")[2], row["method"]) for row in rows] == [
        ("local_gsm8k", "SingleBD"),
        ("local_gsm8k", "MBD"),
        ("local_mmlu", "log-likelihood"),
    ]
    assert "log-likelihood" in (tmp_path / "out" / "report.md").read_text()
    assert swept(tmp_path / "out", chosen)["rows"] == rows
    with pytest.raises(ValueError, match=r"no decoder changes them: leave --methods"):
        plan_sweep(load_inputs(options(folder, "local_mmlu", methods=["single"])))
    with pytest.raises(ValueError, match="nothing is drawn: leave --samples out"):
        plan_sweep(load_inputs(options(folder, "", tasks=both, samples=2, temperature=1.0)))
    with pytest.raises(ValueError, match="leave --tensor-parallel out"):
        plan_sweep(load_inputs(options(folder, "local_mmlu", methods=None, tensor_parallel=2)))
    with pytest.raises(ValueError, match="--mc-num is for tasks that compare log-likelihoods"):
        plan_sweep(load_inputs(options(folder, "local_gsm8k", mc_num=1)))


def test_a_text_that_the_model_does_not_hold_is_a_row_with_the_reason(folder: Path, tmp_path: Path) -> None:
    (folder / "tasks" / "local_long.yaml").write_text(
        (folder / "tasks" / "local_mmlu.yaml").read_text().replace("task: local_mmlu", "task: local_long")
        + f"description: {'word ' * 600}\n"
    )
    manager_of.cache_clear()
    (row,) = swept(tmp_path / "out", options(folder, "local_long", methods=None, mc_num=1, limit=2))["rows"]
    assert (row["n"], row["errors"]) == (2, 2)
    assert all("positions" in sample["error"] for sample in read_samples(tmp_path / "out"))


def test_what_is_not_offered_or_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"local_pages.*perplexity of whole documents"):
        plan_sweep(load_inputs(options(folder, "local_pages")))
    with pytest.raises(ValueError, match=r"no task 'absent'.*--include"):
        plan_sweep(load_inputs(options(folder, "absent")))
    with pytest.raises(ValueError, match=r"local_missing.*cannot be loaded.*--include"):
        plan_sweep(load_inputs(options(folder, "local_missing")))


@pytest.mark.parametrize(
    ("metric", "sentence"),
    [
        (
            "{metric: exact_matchh, aggregation: mean, higher_is_better: true}",
            "names the metric 'exact_matchh', which",
        ),
        (
            "{metric: exact_match, aggregation: meen, higher_is_better: true}",
            "an aggregation of the metric 'exact_match'",
        ),
    ],
)
def test_a_misspelt_metric_is_refused_before_any_work(
    folder: Path, tmp_path: Path, metric: str, sentence: str
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local_misspelt.yaml").write_text(
        f"task: local_misspelt\ndataset_path: json\ntest_split: test\noutput_type: generate_until\n"
        f"dataset_kwargs: {{data_files: {{test: {folder}/choices.jsonl}}}}\ndoc_to_text: question\n"
        f"doc_to_target: answer\nmetric_list: [{metric}]\n"
    )
    with pytest.raises(ValueError, match=sentence):
        load_inputs(options(tmp_path, "local_misspelt"))


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
