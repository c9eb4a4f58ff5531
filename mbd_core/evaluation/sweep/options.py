"""A user's options of a sweep: the tasks and how they are asked, models, methods, and how much."""

from typing import Annotated

from mbd_core.batch.inputs import NUM_DRAWS
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.endpoints.endpoint import Endpoint
from mbd_core.evaluation.tasks.benchmarks import TASKS
from mbd_core.evaluation.tasks.prompts import PromptForm
from mbd_core.evaluation.tasks.recipes import OWN_CHAT, RECIPES
from mbd_core.fields import CLUSTER, DATA, DECODING, MODEL, Flag, Ge, Le, Texts, configuration
from mbd_core.tasks.split import Split

LIST = "NAME,..."


@configuration(panel=DATA)
class TaskOptions:
    """Tasks, and how they are asked."""

    tasks: Annotated[
        Texts,
        Flag(
            help=f"Tasks: {', '.join(TASKS)}; in a sweep also bfcl:CATEGORY and harness:NAME.",
            metavar=LIST,
            commas=True,
        ),
    ]
    recipe: Annotated[str, Flag(help=f"How tasks are asked: {', '.join(RECIPES)}.", metavar="NAME")] = OWN_CHAT.name
    examples: Annotated[Texts, Flag(metavar="TASK=PATH", opened_by="job")] = ()
    """Solved problems for a few-shot recipe, as the task's train split; repeatable."""
    data: Annotated[Texts, Flag(metavar="TASK=PATH", opened_by="job")] = ()
    """Where a task that is not generated lies: a file (JSON lines or list, Parquet, Arrow), a folder of one split, or
    hub:NAME[:CONFIGURATION[:SPLIT]]. With one task, PATH is enough; repeatable."""


@configuration(panel=DECODING)
class SweepOptions(TaskOptions):
    """The user's options of a sweep: models or `endpoints`, methods and tasks. `plan_sweep` sets the buffer size of
    `engine` to the largest of all configurations."""

    models: Annotated[Texts, Flag(panel=MODEL, metavar=LIST, commas=True, opened_by="workers")] = ()
    """Shipped models' names, model folders, or their URLs."""
    methods: Annotated[
        Texts | None,
        Flag(metavar=LIST, default="single, multi (models of causal rows: their own), those of --method", commas=True),
    ] = None
    """Methods to run, among them the rows of Table 4, as table-4/LLaDA2-Mini/math/multi."""
    definitions: Annotated[Texts, Flag(name="--method", metavar="NAME=JSON")] = ()
    """Define a method by its decoding fields; repeatable."""
    grid: Annotated[str, Flag(metavar="FIELD=VALUE,...;...")] = ""
    """Decoding fields and their values, all combined. A field is varied under the methods that it concerns:
    buffer_size, tau_add and tau_semi only under methods with several slots."""
    max_tokens: Annotated[int | None, Ge(1), Flag(default="the recipe's, 128 if generated")] = None
    """New tokens a problem."""
    samples: Annotated[int, Ge(1)] = 1
    """Answers to a problem, for pass@k and maj@k; more than one needs a temperature."""
    temperature: Annotated[float, Ge(0.0), Flag(metavar="T")] = 0.0
    """Temperature of drawn tokens; 0: greedy."""
    top_p: Annotated[float, Le(1.0), Flag(metavar="P")] = 1.0
    """Draw among the likeliest tokens, up to this sum of their probabilities."""
    mc_num: Annotated[int, Ge(1), Flag(panel=DATA)] = NUM_DRAWS
    """Draws of a log-likelihood, for tasks of lm-evaluation-harness that compare them."""
    limit: Annotated[int | None, Ge(1), Flag(panel=DATA, default="500 generated, all of a file")] = None
    """Problems a task."""
    seed: Annotated[int, Ge(0), Flag(panel=DATA)] = 0
    """Random seed."""
    split: Annotated[Split, Flag(panel=DATA)] = "test"
    """Split of the generated tasks."""
    include_path: Annotated[str | None, Flag(panel=DATA, name="--include", metavar="DIR", opened_by="job")] = None
    """Folder of task files of lm-evaluation-harness, for harness:NAME."""
    form: Annotated[PromptForm, Flag(panel=DATA)] = "plain"
    """How tasks of lm-evaluation-harness are asked: plain text, one turn, or an example a turn."""
    tensor_parallel: Annotated[int, Ge(1), Flag(panel=CLUSTER)] = 1
    """Ranks over which the model is sharded: GPUs of a node, or processes without GPUs."""
    endpoints: tuple[Endpoint, ...] = ()
    engine: Annotated[EngineConfig, Flag(name=False)] = EngineConfig()
