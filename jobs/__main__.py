"""The command `mbd`: each job is one of its sub-commands. `python -m jobs` runs the same command."""

import sys
from pathlib import Path

from jobs.command_line import sub_commands

COMMANDS = {
    "doctor": ("jobs.doctor", "what this machine can do, and what a model folder needs"),
    "serve": ("jobs.serve", "serve a model over OpenAI's HTTP API"),
    "prepare": ("jobs.prepare_data", "make training data of conversations"),
    "train": ("jobs.train_multitf", "train a recipe"),
    "rl": ("jobs.train_rl", "train by reinforcement learning on a task's answers"),
    "sweep": ("jobs.eval_sweep", "evaluate models x methods x thresholds over tasks"),
    "report": ("jobs.report_sweep", "report, join and compare sweeps; choose their best points"),
    "grade": ("jobs.grade", "grade anybody's samples without a model"),
    "trace": ("jobs.trace_report", "replay how a request is decoded, forward by forward"),
    "fetch": ("jobs.fetch", "fetch a model from the package index"),
    "convert": ("jobs.convert_checkpoint", "convert a checkpoint, or write one of random weights"),
    "tasks": ("jobs.harness_tasks", "write a recipe's tasks for lm-evaluation-harness"),
    "bench": ("benchmarks.__main__", "measure this machine; the repository has it, the package does not"),
    "demo": ("jobs.demo", "train a little, sweep, serve and ask, in three minutes"),
}

# An editable installation puts only its own packages on the path. `bench` is in `benchmarks`, beside them.
sys.path.append(str(Path(__file__).resolve().parent.parent))

main = sub_commands(
    "mbd",
    COMMANDS,
    about="Train, serve and evaluate multi-block diffusion language models.\n\n"
    "mbd NAME --help shows the options of a command.",
    distribution="mbd-cluster",
)

if __name__ == "__main__":
    sys.exit(main())
