"""The benchmarks by name."""

from mbd_core.evaluation.tasks.kinds import evalplus, function_calls, livecodebench, mathematics, tested_functions
from mbd_core.evaluation.tasks.kinds.harness import HARNESS_PREFIX, named_task
from mbd_core.evaluation.tasks.kinds.task import Task

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        mathematics.GSM_MINI,
        tested_functions.CODE_MINI,
        mathematics.LEDGER_MINI,
        mathematics.GSM8K,
        mathematics.GSM8K_COT,
        mathematics.MATH500,
        mathematics.MATH,
        tested_functions.HUMANEVAL,
        evalplus.HUMANEVAL_PLUS,
        tested_functions.MBPP,
        evalplus.MBPP_PLUS,
        livecodebench.LIVE_CODE_BENCH,
    )
}


def find_task(name: str) -> Task:
    """The task with that name; `ValueError` lists the known names.

    LiveCodeBench may have a window of contest dates, as in `livecodebench:2024-08..2025-01`. BFCL has a category, as
    in `bfcl:simple_python`.
    """
    if name.startswith(f"{livecodebench.NAME}:"):
        return livecodebench.dated_task(name)
    if name.startswith(HARNESS_PREFIX):
        return named_task(name)
    if name.startswith((f"{function_calls.NAME}:", f"{function_calls.FREE}:")):
        return function_calls.named_task(name)
    if name not in TASKS:
        raise ValueError(
            f"unknown task '{name}'; known: {', '.join(TASKS)}, {function_calls.NAME}:CATEGORY, and in sweeps "
            f"{HARNESS_PREFIX}NAME"
        )
    return TASKS[name]
