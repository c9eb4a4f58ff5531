"""A job that failed on the cluster: one sentence for the user, and the traceback for a file."""

import traceback

from ray.data.exceptions import SystemException
from ray.exceptions import RayError, RayTaskError
from ray.train import TrainingFailedError, WorkerGroupError

from cluster.local import ray_lines

CLUSTER_FAILURES = (RayError, TrainingFailedError, SystemException)  # the errors of `fit` and Ray Data
CAUSE_LINE = "\nThe above exception was the direct cause of the following exception:"
MAX_REASON = 300


def failure_text(error: BaseException) -> str:
    """The error's traceback, with the workers' tracebacks, and the last lines of standard error of workers and Ray."""
    text, lines = "".join(traceback.format_exception(error)), ray_lines()
    return f"{text}\nWhat workers and Ray wrote last:\n{lines}" if lines else text


def reason(error: BaseException) -> str:
    """The last line of the error, or of the error that a training worker raised; Ray passes tracebacks on as text.

    In a chain of causes it is the last line of the first cause.
    """
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        error = error.worker_failures[min(error.worker_failures)]
    lines = [line.strip() for line in str(error).partition(CAUSE_LINE)[0].splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:MAX_REASON]


def task_sentence(error: RayError) -> str:
    """The task's own error message if it is a ValueError, RuntimeError or OSError; otherwise `reason(error)`.

    `reason` would give the first cause, which the task's own message explains already.
    """
    cause = error.cause if isinstance(error, RayTaskError) else None
    return str(cause) if isinstance(cause, ValueError | RuntimeError | OSError) else reason(error)
