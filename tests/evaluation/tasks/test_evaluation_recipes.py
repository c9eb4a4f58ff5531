"""The evaluation recipes: complete, honest about their words, and with the numbers that the papers print."""

import itertools
import re
from pathlib import Path

import pytest

from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.methods import NAMED_METHODS
from mbd_core.evaluation.sweep.grid import parse_grid, plan_variants
from mbd_core.evaluation.tasks.benchmarks import TASKS
from mbd_core.evaluation.tasks.recipes import HARNESS, OWN_CHAT, RECIPES, THIS_PROJECT, TaskPrompt, find_recipe
from mbd_core.tasks.generated import GENERATED_TASKS

PAPERS = Path(__file__).resolve().parents[4] / "shared" / "papers"
PROMPTS = {(r.name, task): prompt for r in RECIPES.values() for task, prompt in r.prompts.items()}
EVERY = pytest.mark.parametrize(("recipe", "task"), PROMPTS, ids="/".join)
OURS = ("own", "bare")
NO_DECODER = (*OURS, "lcb-runner")  # recipes that say nothing of one
REAL_TASKS = [name for name, task in TASKS.items() if task.generate is None]


def paper(name: str) -> str:
    path = PAPERS / name
    if not path.exists():
        pytest.skip(f"no {path}")
    return path.read_text()


def test_recipes_are_found_by_name_and_ours_has_every_task() -> None:
    assert all(find_recipe(name).name == name for name in RECIPES)
    with pytest.raises(ValueError, match="known: own, bare"):
        find_recipe("bd3lm")
    assert set(OWN_CHAT.prompts) == set(REAL_TASKS)
    with pytest.raises(ValueError, match="it has gsm8k, math"):
        find_recipe("blockbatch").task_prompt("mbpp-plus")


@pytest.mark.parametrize("name", RECIPES)
def test_generated_tasks_are_asked_as_the_models_were_trained(name: str) -> None:
    prompt = find_recipe(name).task_prompt("gsm-mini")
    assert (prompt.wording.text, prompt.max_tokens, prompt.num_examples) == ("{question}", 128, 0)


@pytest.mark.parametrize("name", GENERATED_TASKS)
def test_a_right_answer_to_a_generated_problem_is_shorter_than_its_limit(name: str) -> None:
    task, tokenizer = GENERATED_TASKS[name], read_folder(model_folder("tiny-bd")).tokenizer
    rows = itertools.islice(task.generate(split="test", seed=0), 300)
    longest = max(len(tokenizer(row[task.answer_column], add_special_tokens=False)["input_ids"]) for row in rows)
    assert longest + 1 < OWN_CHAT.task_prompt(name).max_tokens, "with its EOS, and room for one that is drawn longer"


@EVERY
def test_a_setting_asks_the_problem_once_and_says_where_it_comes_from(recipe: str, task: str) -> None:
    prompt = PROMPTS[recipe, task]
    text = prompt.wording.text.format(question="<Q>", tests="<T>")
    assert text.count("<Q>") == 1
    assert text.count("<T>") == task.startswith(("mbpp", "livecodebench")), "MBPP's tests, LiveCodeBench's form"
    assert prompt.wording.answer.format(answer="<A>").count("<A>") == 1
    assert prompt.source and prompt.extraction and task in REAL_TASKS
    assert prompt.num_examples >= 0 and 1 <= prompt.max_tokens <= 4096
    if recipe not in OURS and prompt.text_by == THIS_PROJECT:
        assert re.search(r"not in our sources|is ours|limit is MBD-LMs'|EvalPlus, 512", prompt.source), prompt.source


@EVERY
def test_only_words_of_the_task_files_are_said_to_be_theirs(recipe: str, task: str) -> None:
    prompt = PROMPTS[recipe, task]
    ours = {s.wording.text for name in OURS for s in find_recipe(name).prompts.values() if s.text_by == THIS_PROJECT}
    raw = prompt.text_by == HARNESS and task == "humaneval"  # its prompt is the problem alone, too
    assert (prompt.wording.text in ours) == (prompt.text_by == THIS_PROJECT or raw)


@pytest.mark.parametrize(
    ("task", "known"),
    [("humaneval-plus", "'Write a solution ...'"), ("mbpp-plus", "'You are an expert Python programmer, and here is")],
)
def test_the_parts_of_mbd_lms_code_prompts_that_are_known_are_named(task: str, known: str) -> None:
    for recipe in ("mbd-lms", "mbd-lms-sdar"):
        assert known in find_recipe(recipe).task_prompt(task).source


def test_the_documents_table_is_the_recipes_own() -> None:
    """Its rows, from the constants: `pytest -rP` prints them where they differ."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "evaluation.md").read_text()
    for recipe in RECIPES.values():
        tasks: dict[str, list[str]] = {}
        for task, prompt in recipe.prompts.items():
            words = "ours" if prompt.text_by == THIS_PROJECT else "theirs"
            how = f"{prompt.num_examples}-shot, {prompt.max_tokens:,}, {prompt.wording.form}, {words}"
            tasks.setdefault(how, []).append(task)
        cells = "; ".join(f"{', '.join(names)}: {how}" for how, names in tasks.items())
        row = f"| `{recipe.name}` | {recipe.source} | {cells} |"
        assert row in text, row


def test_the_documents_methods_and_grids_can_be_decoded_with() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "evaluation.md").read_text()
    rows = [line for line in text.splitlines() if any(line.startswith(f"| `{name}` |") for name in RECIPES)]
    found = [re.findall(r'`--methods (\S+?)(?: --grid "(.+?)")?`', row.split(" | ")[3]) for row in rows]
    assert len(rows) == len(RECIPES) and sum(map(bool, found)) == len(RECIPES) - len(NO_DECODER)
    for methods, grid in itertools.chain.from_iterable(found):
        defaults = {"trained_with": None}
        assert plan_variants(
            parse_grid(grid), methods.split(","), methods=NAMED_METHODS, defaults=defaults, block_size=32
        )


def test_d2f_has_the_shots_and_lengths_of_its_tables() -> None:
    text = paper("d2f.txt")
    for benchmark, recipe, task in (
        ("GSM8K", "d2f-llada", "gsm8k"),
        ("MBPP", "d2f-llada", "mbpp"),
        ("HumanEval", "d2f-llada", "humaneval"),
        ("Math", "d2f-llada", "math"),
        ("GSM8K-CoT", "d2f-dream", "gsm8k-cot"),
        ("MBPP", "d2f-dream", "mbpp"),
        ("HumanEval", "d2f-dream", "humaneval"),
        ("Math", "d2f-dream", "math"),
    ):
        model = {"d2f-llada": "LLaDA-Instruct", "d2f-dream": "Dream-Base"}[recipe]
        shots = re.search(rf"^{benchmark} (\d)-shot\t{model}", text, re.MULTILINE)
        method = {"d2f-llada": "D2F-LLaDA", "d2f-dream": "D2F-Dream"}[recipe]
        rows = text.partition(f"Method: {method}")[2].partition("Method:")[0]
        length = re.search(rf"^{benchmark}\tBaseline.*\s+D2F\t(\d+)\t", rows, re.MULTILINE | re.IGNORECASE)
        assert shots is not None and length is not None, (benchmark, recipe)
        prompt = PROMPTS[recipe, task]
        assert (prompt.num_examples, prompt.max_tokens) == (int(shots[1]), int(length[1])), (benchmark, recipe)


def test_blockbatch_has_the_shots_of_its_appendix() -> None:
    text = paper("blockbatch.txt")
    shots = dict(re.findall(r"(GSM8K|MATH|MBPP|HumanEval) uses (\d)-shot prompting", text))
    length = re.search(r"greedy decoding with \$G = (\d+)\$", text)
    assert len(shots) == 4 and length is not None
    prompts = find_recipe("blockbatch").prompts
    assert {task: s.num_examples for task, s in prompts.items()} == {t.lower(): int(n) for t, n in shots.items()}
    assert {s.max_tokens for s in prompts.values()} == {int(length[1])}


def test_mbd_lms_has_the_new_tokens_of_table_4() -> None:
    rows = re.findall(r"^\S.*\t(?:Math|Code)\t\d+\t\d+\t\d+\t(\d+)\t", paper("mbd_lms.txt"), re.MULTILINE)
    assert len(rows) > 20
    for name in ("mbd-lms", "mbd-lms-sdar"):
        prompts: list[TaskPrompt] = list(find_recipe(name).prompts.values())
        assert {s.max_tokens for s in prompts} == {int(number) for number in rows}
        assert {s.num_examples for s in prompts} == {0}
