"""Task files for lm-evaluation-harness: a recipe's prompts on the user's data, and scores by our graders."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.harness_tasks import main
from mbd_core.decoding.answers.counts import Counts
from mbd_core.evaluation.tasks.benchmarks import TASKS
from mbd_core.harness.scoring import CountedText, metrics_of, score

COUNTS = Counts(
    num_prompt_tokens=5,
    num_tokens=12,
    num_forwards=4,
    num_store_forwards=1,
    num_prefill_forwards=1,
    decode_seconds=0.5,
)


class FunctionLoader(yaml.SafeLoader):
    """YAML in which `!function NAME` is its name."""


FunctionLoader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, numbers in (("test", (1, 2)), ("train", range(10, 40))):
        rows = [{"question": f"{n} + 0?", "answer": f"{n} + 0 = {n}\n#### {n}"} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def read_task(folder: Path, name: str) -> dict[str, Any]:
    return yaml.load((folder / f"{name}.yaml").read_text(), Loader=FunctionLoader)


def test_a_recipe_s_task_has_its_prompt_and_the_rows_of_the_user_s_files(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = data / "tasks of été"
    command = ["--recipe", "d2f-llada", "--tasks", "gsm8k", "--out", str(out)]
    command += ["--data", str(data / "test.jsonl"), "--examples", str(data / "train.jsonl")]
    assert main(command) == 0
    assert capsys.readouterr().out.strip() == (
        f"mbd-lm-eval --model mbd --model_args pretrained=DIR --include_path '{out}' --tasks d2f-llada_gsm8k "
        "--apply_chat_template --fewshot_as_multiturn true"
    )
    task = read_task(out, "d2f-llada_gsm8k")
    assert task["generation_kwargs"] == {
        "until": ["Question:", "</s>", "<|im_end|>"],
        "max_gen_toks": 512,
        "do_sample": False,
    }
    assert (task["num_fewshot"], task["fewshot_config"], task["target_delimiter"]) == (4, {"sampler": "default"}, " ")
    assert task["process_results"] == "mbd_core.harness.scoring.score"
    assert [m["metric"] for m in task["metric_list"]] == list(metrics_of(TASKS["gsm8k"]))
    rows = {
        split: [json.loads(line) for line in Path(path).read_text().splitlines()]
        for split, path in task["dataset_kwargs"]["data_files"].items()
    }
    assert {split: len(found) for split, found in rows.items()} == {"test": 2, "train": 30}
    assert rows["test"][0]["asked"] == "Question: 1 + 0?\nAnswer:" and rows["test"][0]["reference"] == "1"
    assert rows["train"][0]["target"] == "10 + 0 = 10\n#### 10"
    assert {tuple(row) for found in rows.values() for row in found} == {tuple(rows["test"][0])}
    assert main(command) == 2, "a folder that is there is not overwritten"
    assert main([*command, "--overwrite"]) == 0


def test_a_zero_shot_task_has_no_examples_and_a_generated_one_no_file(data: Path) -> None:
    out = data / "tasks"
    command = ["--recipe", "mbd-lms", "--tasks", "gsm8k,gsm-mini", "--data", f"gsm8k={data / 'test.jsonl'}"]
    assert main([*command, "--out", str(out)]) == 0
    task = read_task(out, "mbd-lms_gsm8k")
    assert (task["num_fewshot"], "fewshot_split" in task, task["generation_kwargs"]["max_gen_toks"]) == (
        0,
        False,
        4096,
    )
    assert read_task(out, "mbd-lms_gsm-mini")["generation_kwargs"]["max_gen_toks"] == 128


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tasks", "gsm8k"], "task 'gsm8k' needs the file of its problems"),
        (["--tasks", "gsm-mini", "--recipe", "x"], "unknown recipe 'x'; known: own"),
        (["--tasks", "gsm8k", "--data", "test.jsonl", "--recipe", "fast-dllm"], "shows 5 solved problems before each"),
        (["--tasks", "bfcl:irrelevance", "--data", "."], "lm-evaluation-harness does not read out of an answer"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(
    data: Path,
    options: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(data)
    question = {"id": "0", "question": [[{"role": "user", "content": "Dry?"}]], "function": []}
    (data / "BFCL_v4_irrelevance.json").write_text(json.dumps(question))
    assert main([*options, "--out", "tasks"]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.splitlines()) == 1
    assert not (data / "tasks").exists()


def test_a_score_has_every_rule_of_its_task_and_the_counts_of_the_answer() -> None:
    doc = {"task": "gsm8k", "problem_id": "p", "prompt": "?", "reference": "4", "entry_point": "", "asked": "?"}
    found = score(doc, [CountedText("first 7\n#### 7\nno, \\boxed{4}", COUNTS, "stop")])
    assert found == {
        "accuracy": 1.0,
        "strict": 0.0,
        "flexible": 1.0,
        "nfe": 4.0,
        "tokens": 12.0,
        "tpf": 3.0,
        "tps": 24.0,
        "cut": 0.0,
    }
    assert tuple(found) == metrics_of(TASKS["gsm8k"])
    assert score(doc, ["#### 5"]) == {"accuracy": 0.0, "strict": 0.0, "flexible": 0.0}
    code = {**doc, "task": "code-mini", "entry_point": "f", "prompt": "def f():\n"}
    code["reference"] = json.dumps({"preamble": "", "tests": "def check(f):\n    assert f() == 2\n", "check": "check"})
    assert score(code, ["```python\ndef f():\n    return 2\n```"]) == {"accuracy": 1.0}
