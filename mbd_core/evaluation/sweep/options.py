"""What a user asks of a sweep: the tasks and how they are asked, models, methods, and how much."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from mbd_core.batch.inputs import NUM_DRAWS
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.endpoint import Endpoint
from mbd_core.evaluation.tasks.benchmarks import TASKS
from mbd_core.evaluation.tasks.prompts import PromptForm
from mbd_core.evaluation.tasks.recipes import OWN_CHAT, RECIPES
from mbd_core.options import CLUSTER, DATA, DECODING, MODEL, Option, check
from mbd_core.tasks.split import Split

LIST = "NAME,..."


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Tasks, and how they are asked."""

    tasks: Annotated[
        Sequence[str],
        Option(f"Tasks: {', '.join(TASKS)}; in a sweep also harness:NAME.", DATA, separator=",", metavar=LIST),
    ]
    recipe: Annotated[str, Option(f"How tasks are asked: {', '.join(RECIPES)}.", DATA, metavar="NAME")] = OWN_CHAT.name
    examples: Annotated[
        Sequence[str],
        Option(
            "Solved problems for a few-shot recipe, as the task's train split; repeatable.", DATA, metavar="TASK=PATH"
        ),
    ] = ()
    data: Annotated[
        Sequence[str],
        Option(
            "Where a task that is not generated lies: a file (JSON lines or list, Parquet, Arrow), a folder of "
            "one split, or hub:NAME[:CONFIGURATION[:SPLIT]]. With one task PATH alone; repeatable.",
            DATA,
            metavar="TASK=PATH",
        ),
    ] = ()

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class SweepOptions(TaskOptions):
    """The user's options of a sweep: models or `endpoints`, methods and tasks. `plan_sweep` sets the buffer size of
    `engine` to the largest of all configurations."""

    models: Annotated[
        Sequence[str],
        Option("Shipped models' names, model folders, or their URLs.", MODEL, separator=",", metavar=LIST),
    ] = ()
    methods: Annotated[
        Sequence[str] | None,
        Option(
            "Methods to run, among them the rows of Table 4, as table-4/LLaDA2-Mini/math/multi.",
            DECODING,
            separator=",",
            metavar=LIST,
            default="single, multi (models of causal rows: their own), those of --method",
        ),
    ] = None
    definitions: Annotated[
        Sequence[str],
        Option("Define a method by its decoding fields; repeatable.", DECODING, flag="--method", metavar="NAME=JSON"),
    ] = ()
    grid: Annotated[
        str,
        Option(
            "Decoding fields and their values, all combined. A field is varied under the methods that it concerns: "
            "buffer_size, tau_add and tau_semi only under those with several slots.",
            DECODING,
            metavar="FIELD=VALUE,...;...",
        ),
    ] = ""
    max_tokens: Annotated[
        int | None,
        Option("New tokens a problem.", DECODING, at_least=1, default="the recipe's, 128 if generated"),
    ] = None
    samples: Annotated[
        int,
        Option("Answers to a problem, for pass@k and maj@k; more than one takes a temperature.", DECODING, at_least=1),
    ] = 1
    temperature: Annotated[float, Option("Of drawn tokens; 0: greedy.", DECODING, metavar="T", at_least=0.0)] = 0.0
    top_p: Annotated[
        float, Option("Draw among the likeliest tokens, up to this share.", DECODING, metavar="P", at_most=1.0)
    ] = 1.0
    mc_num: Annotated[
        int,
        Option("Draws of a log-likelihood, for tasks of lm-evaluation-harness that compare them.", DATA, at_least=1),
    ] = NUM_DRAWS
    limit: Annotated[
        int | None, Option("Problems a task.", DATA, at_least=1, default="500 generated, all of a file")
    ] = None
    seed: Annotated[int, Option("Of whatever is drawn.", DATA, at_least=0)] = 0
    split: Annotated[Split, Option("Split of the generated tasks.", DATA)] = "test"
    include_path: Annotated[
        str | None,
        Option(
            "Folder of task files of lm-evaluation-harness, for harness:NAME.", DATA, flag="--include", metavar="DIR"
        ),
    ] = None
    form: Annotated[
        PromptForm,
        Option("How tasks of lm-evaluation-harness are asked: plain text, one turn, or an example a turn.", DATA),
    ] = "plain"
    tensor_parallel: Annotated[
        int,
        Option("Ranks that the model is cut among: GPUs of a node, or processes without GPUs.", CLUSTER, at_least=1),
    ] = 1
    endpoints: Sequence[Endpoint] = ()
    engine: EngineConfig = EngineConfig()
