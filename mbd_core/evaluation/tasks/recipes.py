"""Recipes of prompts by name: the prompts that gave the papers' numbers, as far as their sources say.

A recipe is named after the project whose numbers it repeats, and has a prompt for each task that the project reports.
A prompt says where each part of it comes from. Where a source names a prompt's style and not its text, the text is
ours and the prompt says so (`text_by="this project"`); nobody else's text is made up. Sources are the papers
(BlockBatch, D2F, MBD-LMs), lm-evaluation-harness 0.4.13, whose task files several projects use, and the scripts and
benchmark files that the projects released.

Every recipe decodes greedily. Which value grades an answer does not depend on the recipe, so that scores of different
recipes can be compared: `Task.grader` decides, and strict and flexible values are recorded side by side.
`extraction` says what the source counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.kinds.livecodebench import NAME as LIVE_CODE_BENCH
from mbd_core.evaluation.tasks.kinds.task import Task
from mbd_core.evaluation.tasks.prompts import ExampleChoice, Wording

LONGEST_ANSWER = 4096  # MBD-LMs, Table 4: "Max New" of every row


@dataclass(frozen=True, kw_only=True)
class TaskPrompt:
    """How a recipe asks one task.

    num_examples   number of solved problems before the question; `choice` says which problems of the user's file
    max_tokens     most tokens of an answer
    stop           strings that end an answer; they are cut off
    text_by        who wrote the prompt's words
    source         where the numbers and the style come from
    extraction     how the source takes the answer from the text
    """

    wording: Wording
    max_tokens: int
    source: str
    extraction: str
    text_by: str
    num_examples: int = 0
    choice: ExampleChoice = "first"
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Prompts by task. Every recipe asks generated tasks as this project's models were trained, and shows functions as
    the model's own chat template does."""

    name: str
    source: str
    prompts: Mapping[str, TaskPrompt]
    remark: str = ""

    def task_prompt(self, task: str) -> TaskPrompt:
        """How a task is asked; `ValueError` names the tasks that the recipe has."""
        standard_task = find_task(task)
        if standard_task.generate is not None:
            return replace(GENERATED, max_tokens=standard_task.max_tokens)
        if standard_task.asks_calls:
            return CALLS
        if standard_task.benchmark not in self.prompts:
            raise ValueError(f"recipe '{self.name}' has no prompt for task '{task}'; it has {', '.join(self.prompts)}")
        return self.prompts[standard_task.benchmark]


THIS_PROJECT = "this project"
BY_VALUE = "the task's own rule: the answer's value (math-verify), or the tests"

# -- Wordings of this project ----------------------------------------------------------------------------------------

BARE = Wording(form="turn", text="{question}")
BARE_WITH_TESTS = Wording(form="turn", text="{question}\n{tests}")
STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{{}}."
FUNCTION = Wording(
    form="turn",
    text="Complete this Python function. Answer with the whole function in one fenced block of Python.\n"
    "```python\n{question}\n```",
)
FUNCTION_FOR_TESTS = Wording(
    form="turn",
    text="{question}\nThe function must pass these tests:\n```python\n{tests}\n```\n"
    "Answer with the whole function in one fenced block of Python.",
)
OWN_MATH = Wording(form="turn", text="{question}\nSolve it step by step. End with the answer alone in \\boxed{{}}.")
GENERATED = TaskPrompt(
    wording=BARE,
    max_tokens=Task.max_tokens,
    source="this project's generated tasks, asked as its models were trained",
    extraction="the number after ####, or the tests",
    text_by=THIS_PROJECT,
)

CALLS = TaskPrompt(
    wording=BARE,
    max_tokens=512,
    source="the leaderboard's function-calling mode: its messages, and the functions as the chat template shows them",
    extraction="the calls in the model's own form",
    text_by="the model's chat template",
)


def _own_prompt(wording: Wording, *, max_tokens: int, source: str, extraction: str = BY_VALUE) -> TaskPrompt:
    return TaskPrompt(
        wording=wording, max_tokens=max_tokens, source=source, extraction=extraction, text_by=THIS_PROJECT
    )


# -- The task files of lm-evaluation-harness, which several projects use ----------------------------------------------

HARNESS = "lm-evaluation-harness 0.4.13"
_TURN_ENDS = ("</s>", "<|im_end|>")
HARNESS_GSM8K = TaskPrompt(
    wording=Wording(form="plain", text="Question: {question}\nAnswer:"),
    num_examples=5,
    choice="drawn",
    max_tokens=256,
    stop=("Question:", *_TURN_ENDS),
    source=f"{HARNESS}, task gsm8k",
    extraction="flexible-extract (the last number) or strict-match (the number after ####)",
    text_by=HARNESS,
)
HARNESS_GSM8K_COT = TaskPrompt(
    wording=Wording(form="plain", text="Q: {question}\nA:"),
    num_examples=8,
    max_tokens=256,
    stop=("Q:", *_TURN_ENDS),
    source=f"{HARNESS}, task gsm8k_cot",
    extraction="flexible-extract (the last number) or strict-match (the number after 'The answer is')",
    text_by=HARNESS,
)
HARNESS_MATH = TaskPrompt(
    wording=Wording(form="plain", text="Problem:\n{question}\n\nSolution:"),
    num_examples=4,
    max_tokens=256,
    stop=("Problem:",),
    source=f"{HARNESS}, task minerva_math",
    extraction="math_verify of the whole text, or exact_match of the closing sentence's answer",
    text_by=HARNESS,
)
HARNESS_HUMANEVAL = TaskPrompt(
    wording=Wording(form="plain", text="{question}"),
    max_tokens=256,
    source=f"{HARNESS}, task humaneval, without its stop strings: they cut right programs, and the projects lift them",
    extraction="the program, sanitised, and the tests",
    text_by=HARNESS,
)
HARNESS_MBPP = TaskPrompt(
    wording=Wording(
        form="plain",
        text="You are an expert Python programmer, and here is your task: {question} "
        "Your code should pass these tests:\n\n{tests}\n[BEGIN]\n",
        answer="{answer}\n[DONE]",
        joint="",
    ),
    num_examples=3,
    max_tokens=256,
    stop=("[DONE]",),
    source=f"{HARNESS}, task mbpp",
    extraction="the program, sanitised, and the tests",
    text_by=HARNESS,
)


def _as(prompt: TaskPrompt, form: str, **changes: object) -> TaskPrompt:
    """A task's prompt in another form, with changes."""
    return replace(prompt, wording=replace(prompt.wording, form=form), **changes)  # type: ignore[arg-type]


# -- LiveCodeBench's own prompt --------------------------------------------------------------------------------------

LIVE_CODE_BENCH_PROMPT = TaskPrompt(
    wording=Wording(
        form="turn",
        system="You are an expert Python programmer. You will be given a question (problem specification) and will "
        "generate a correct Python program that matches the specification and passes all tests.",
        text="### Question:\n{question}\n\n### Format: {tests}\n\n"
        "### Answer: (use the provided format with backticks)\n\n",
    ),
    max_tokens=2000,
    source="LiveCodeBench's lcb_runner (2025), its prompt of chat models; its defaults are 2,000 tokens and 10 "
    "answers at temperature 0.2, top_p 0.95",
    extraction="the text between the last two lines with a fence, and all public and private tests",
    text_by="LiveCodeBench's lcb_runner",
)


# -- The recipes ----------------------------------------------------------------------------------------------------

OWN_CHAT = Recipe(
    name="own",
    source="this project",
    remark="Zero-shot chat in our own words, for models without a recipe.",
    prompts={
        **dict.fromkeys(
            ("gsm8k", "gsm8k-cot", "math500", "math"), _own_prompt(OWN_MATH, max_tokens=LONGEST_ANSWER, source="own")
        ),
        **dict.fromkeys(
            ("humaneval", "humaneval-plus"), _own_prompt(FUNCTION, max_tokens=LONGEST_ANSWER, source="own")
        ),
        **dict.fromkeys(
            ("mbpp", "mbpp-plus"), _own_prompt(FUNCTION_FOR_TESTS, max_tokens=LONGEST_ANSWER, source="own")
        ),
        LIVE_CODE_BENCH: replace(LIVE_CODE_BENCH_PROMPT, max_tokens=LONGEST_ANSWER),
    },
)

LCB_RUNNER = Recipe(
    name="lcb-runner",
    source="LiveCodeBench's own evaluation",
    prompts={LIVE_CODE_BENCH: LIVE_CODE_BENCH_PROMPT},
)

NOTHING_ADDED = Recipe(
    name="bare",
    source="this project",
    remark="The problem alone, in one turn of the user; MBPP's with its tests, which name the function, and "
    "LiveCodeBench's with the form of the answer.",
    prompts={
        **dict.fromkeys(OWN_CHAT.prompts, _own_prompt(BARE, max_tokens=LONGEST_ANSWER, source="own")),
        **dict.fromkeys(
            ("mbpp", "mbpp-plus", LIVE_CODE_BENCH),
            _own_prompt(BARE_WITH_TESTS, max_tokens=LONGEST_ANSWER, source="own"),
        ),
    },
)

_MBD_TABLE = "MBD-LMs, Appendix D, Table 4 (0-shot, 4,096 new tokens, temperature 0)"
_MBD_MATH = TaskPrompt(
    wording=Wording(form="turn", text="{question}\nLet's think step by step\n"),
    max_tokens=LONGEST_ANSWER,
    source=f"{_MBD_TABLE}; the benchmark files of its engine, LLaDA2's",
    extraction="GSM8K: right if either of the two likeliest numbers is; MATH500: math_verify of the boxed answer",
    text_by="the benchmark files of MBD-LMs' engine",
)
_MBD_SDAR_MATH = replace(
    _MBD_MATH,
    wording=Wording(form="turn", text=f"{{question}}\n{STEP_BY_STEP}"),
    source=f"{_MBD_TABLE}; the benchmark files of its engine, SDAR's; what stands between problem and request is ours",
    extraction="the last boxed answer, compared by value",
)
_MBD_CODE = _own_prompt(
    FUNCTION,
    max_tokens=LONGEST_ANSWER,
    source=f"{_MBD_TABLE}; a chat that asks for the function in a fence. Of its text 'Write a solution ...', the "
    "problem in a fence and 'Please enclose your code within ...' are known; the rest is not in our sources",
    extraction="the last block that is Python, and EvalPlus's tests",
)
_MBD_TESTS = replace(
    _MBD_CODE,
    wording=FUNCTION_FOR_TESTS,
    source=f"{_MBD_TABLE}; a chat that names the task and, as for sanitised MBPP, its tests. Of its text 'You are an "
    "expert Python programmer, and here is your task: ...' is known; the rest is not in our sources",
)
MBD_LMS = Recipe(
    name="mbd-lms",
    source="MBD-LMs, Tables 1 to 4: the LLaDA2 rows",
    remark="The system turn 'detailed thinking off' is the chat template's own matter. The source also has a limit of "
    "2,048 tokens for MATH500 in its benchmark files; Table 4 has 4,096.",
    prompts={
        **dict.fromkeys(("gsm8k", "math500", "math"), _MBD_MATH),
        **dict.fromkeys(("humaneval", "humaneval-plus"), _MBD_CODE),
        **dict.fromkeys(("mbpp", "mbpp-plus"), _MBD_TESTS),
    },
)
MBD_LMS_SDAR = Recipe(
    name="mbd-lms-sdar",
    source="MBD-LMs, Tables 1 to 4: the SDAR rows",
    prompts={**MBD_LMS.prompts, **dict.fromkeys(("gsm8k", "math500", "math"), _MBD_SDAR_MATH)},
)

_D2F_TABLE = "D2F, Tables 1 and 8"
D2F_LLADA = Recipe(
    name="d2f-llada",
    source="D2F, Tables 1 and 8: LLaDA-Instruct",
    remark="Examples are turns of a chat, as in the released scripts; HumanEval is plain text.",
    prompts={
        "gsm8k": _as(HARNESS_GSM8K, "turns", num_examples=4, max_tokens=512, source=f"{_D2F_TABLE}; 4-shot"),
        "math": _as(
            HARNESS_MATH, "turns", max_tokens=512, source=f"{_D2F_TABLE}; 4-shot (the released script has 0-shot)"
        ),
        "humaneval": replace(HARNESS_HUMANEVAL, max_tokens=512, source=f"{_D2F_TABLE}; 0-shot, no stop strings"),
        "mbpp": _as(HARNESS_MBPP, "turns", max_tokens=512, source=f"{_D2F_TABLE}; 3-shot"),
    },
)
_D2F_DREAM = "D2F, Tables 2 and 8"
D2F_DREAM = Recipe(
    name="d2f-dream",
    source="D2F, Tables 2 and 8: Dream-Base",
    remark="The released script puts Dream-Base's prompts into a chat template too. For HumanEval our sources do not "
    "say it; plain text, as for LLaDA.",
    prompts={
        "gsm8k-cot": _as(HARNESS_GSM8K_COT, "turns", source=f"{_D2F_DREAM}; 8-shot"),
        "math": _as(HARNESS_MATH, "turns", source=f"{_D2F_DREAM}; 4-shot"),
        "humaneval": replace(HARNESS_HUMANEVAL, source=f"{_D2F_DREAM}; 0-shot, no stop strings"),
        "mbpp": _as(HARNESS_MBPP, "turns", source=f"{_D2F_DREAM}; 3-shot"),
    },
)

_BLOCK_BATCH = "BlockBatch, Section 5 and Appendix E.3"
BLOCK_BATCH = Recipe(
    name="blockbatch",
    source="BlockBatch, Table 1 and Appendix E.3",
    remark="The paper names the shots and 256 tokens. That an instruct model gets all examples in one turn of the "
    "user is Fast-dLLM's way, on whose code the release builds; for Dream-Base use fast-dllm-base, which is the same "
    "as plain text.",
    prompts={
        "gsm8k": _as(
            HARNESS_GSM8K, "turn", source=f"{_BLOCK_BATCH}; 5-shot", extraction="flexible-extract (the last number)"
        ),
        "math": _as(
            HARNESS_MATH, "turn", source=f"{_BLOCK_BATCH}; 4-shot", extraction="math_verify of the whole text"
        ),
        "humaneval": _as(HARNESS_HUMANEVAL, "turn", source=f"{_BLOCK_BATCH}; 0-shot, sanitised"),
        "mbpp": _as(HARNESS_MBPP, "turn", source=f"{_BLOCK_BATCH}; 3-shot, sanitised"),
    },
)

_FAST = "Fast-dLLM's released scripts: 256 tokens, all examples in one turn of the user"
FAST_DLLM = Recipe(
    name="fast-dllm",
    source="Fast-dLLM's released scripts: instruct models",
    remark="Our sources name 5-shot GSM8K and 0-shot HumanEval; MATH and MBPP have the task files' own shots.",
    prompts={
        "gsm8k": _as(HARNESS_GSM8K, "turn", source=f"{_FAST}; 5-shot"),
        "math": _as(HARNESS_MATH, "turn", source=f"{_FAST}; 4-shot, the task file's"),
        "humaneval": _as(HARNESS_HUMANEVAL, "turn", source=f"{_FAST}; 0-shot"),
        "mbpp": _as(HARNESS_MBPP, "turn", source=f"{_FAST}; 3-shot, the task file's"),
    },
)
FAST_DLLM_BASE = Recipe(
    name="fast-dllm-base",
    source="Fast-dLLM's released scripts: base models",
    remark="The task files' plain text, without a chat template.",
    prompts={
        "gsm8k": HARNESS_GSM8K,
        "math": HARNESS_MATH,
        "humaneval": HARNESS_HUMANEVAL,
        "mbpp": HARNESS_MBPP,
    },
)

_LLADA = "LLaDA's own evaluation of Instruct and 1.5: 0-shot by OpenCompass, whose prompts are not in our sources"
LLADA = Recipe(
    name="llada",
    source="LLaDA's own evaluation of Instruct and 1.5",
    remark="GSM8K was also reported with 256 tokens and blocks of 8.",
    prompts={
        "gsm8k": _own_prompt(OWN_MATH, max_tokens=512, source=f"{_LLADA}; 512 tokens"),
        "math": _own_prompt(OWN_MATH, max_tokens=512, source=f"{_LLADA}; 512 tokens"),
        "humaneval": _own_prompt(FUNCTION, max_tokens=512, source=f"{_LLADA}; 512 tokens"),
        "mbpp": _own_prompt(FUNCTION_FOR_TESTS, max_tokens=256, source=f"{_LLADA}; 256 tokens"),
    },
)
_DREAM = "Dream's own evaluation of Dream-Base by lm-evaluation-harness"
DREAM = Recipe(
    name="dream",
    source="Dream's own evaluation of Dream-Base",
    prompts={
        "gsm8k-cot": replace(HARNESS_GSM8K_COT, source=f"{_DREAM}; 8-shot, 256 tokens"),
        "math": replace(HARNESS_MATH, max_tokens=512, source=f"{_DREAM}; 4-shot, 512 tokens"),
        "humaneval": replace(HARNESS_HUMANEVAL, max_tokens=512, source=f"{_DREAM}; 0-shot, 512 tokens"),
        "mbpp": replace(HARNESS_MBPP, max_tokens=512, source=f"{_DREAM}; 3-shot, 512 tokens"),
    },
)
_SDAR = "SDAR's own evaluation: 0-shot by OpenCompass, whose prompts and limits are not in our sources"
_SDAR_MATH = TaskPrompt(
    wording=Wording(form="turn", text=f"{{question}}\n{STEP_BY_STEP}"),
    max_tokens=LONGEST_ANSWER,
    source=f"{_SDAR}; the sentence is that of SDAR's rows in MBD-LMs' benchmark files, the limit that of MBD-LMs",
    extraction="the last boxed answer",
    text_by="the benchmark files of MBD-LMs' engine",
)
SDAR = Recipe(
    name="sdar",
    source="SDAR's own evaluation",
    prompts={
        "gsm8k": _SDAR_MATH,
        "math500": _SDAR_MATH,
        "humaneval": _own_prompt(FUNCTION, max_tokens=LONGEST_ANSWER, source=f"{_SDAR}; the limit is MBD-LMs'"),
        "mbpp": _own_prompt(
            FUNCTION_FOR_TESTS, max_tokens=LONGEST_ANSWER, source=f"{_SDAR}; sanitised MBPP; the limit is MBD-LMs'"
        ),
    },
)
_DINFER = "dInfer's task files: 1,024 tokens, chat template"
DINFER = Recipe(
    name="dinfer",
    source="dInfer's task files",
    remark="Its four examples are its own; the user's file must hold them. Its stop at a closing fence is not "
    "applied: the program is taken out of the fence instead.",
    prompts={
        "gsm8k": TaskPrompt(
            wording=Wording(form="turn", text="Question: {question}\nLet's think step by step\nAnswer:"),
            num_examples=4,
            max_tokens=1024,
            source=f"{_DINFER}; 4 examples of its own, in one turn (whether in turns of their own is not said)",
            extraction="flexible-extract (the last number)",
            text_by="dInfer's task files",
        ),
        "mbpp": _own_prompt(
            FUNCTION_FOR_TESTS,
            max_tokens=1024,
            source=f"{_DINFER}; sanitised MBPP, 0-shot with tests. Its text is not in our sources",
        ),
    },
)
_D3LLM = "d3LLM's released scripts: 256 tokens"
D3LLM = Recipe(
    name="d3llm",
    source="d3LLM's released scripts: LLaDA",
    remark="The first 10 samples are left out of its times. It also has a long GSM8K, 5-shot, and 512 tokens for some "
    "MATH runs; our sources do not say which. Dream-Coder's two EvalPlus rows have 512 tokens.",
    prompts={
        "gsm8k-cot": replace(
            HARNESS_GSM8K_COT,
            wording=Wording(form="turn", text="Q: {question}\nA: Let's think step by step."),
            num_examples=0,
            source=f"{_D3LLM}; lm-evaluation-harness's gsm8k_cot_zeroshot; the chat is an assumption",
        ),
        "math": _as(HARNESS_MATH, "turn", source=f"{_D3LLM}; 4-shot; the chat is an assumption"),
        "humaneval": _own_prompt(
            FUNCTION, max_tokens=256, source=f"{_D3LLM}; 0-shot, 'Write a solution ...'; the rest of the text is ours"
        ),
        "mbpp": _as(HARNESS_MBPP, "turn", source=f"{_D3LLM}; 3-shot; the chat is an assumption"),
        "humaneval-plus": _own_prompt(FUNCTION, max_tokens=512, source="d3LLM: Dream-Coder, EvalPlus, 512 tokens"),
        "mbpp-plus": _own_prompt(
            FUNCTION_FOR_TESTS, max_tokens=512, source="d3LLM: Dream-Coder, EvalPlus, 512 tokens"
        ),
    },
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        OWN_CHAT,
        NOTHING_ADDED,
        MBD_LMS,
        MBD_LMS_SDAR,
        D2F_LLADA,
        D2F_DREAM,
        BLOCK_BATCH,
        FAST_DLLM,
        FAST_DLLM_BASE,
        LLADA,
        DREAM,
        SDAR,
        DINFER,
        D3LLM,
        LCB_RUNNER,
    )
}


def find_recipe(name: str) -> Recipe:
    """The recipe with that name; `ValueError` lists the known names."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe '{name}'; known: {', '.join(RECIPES)}")
    return RECIPES[name]
