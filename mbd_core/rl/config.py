"""A run of reinforcement learning as a value: its problems, its drawn answers, its rewards, and its learner."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, field, replace
from typing import Annotated, Any, Literal

from mbd_core.evaluation.tasks.benchmarks import TASKS, find_task
from mbd_core.evaluation.tasks.kinds.harness import HARNESS_PREFIX
from mbd_core.evaluation.tasks.recipes import OWN_CHAT
from mbd_core.evaluation.tasks.recipes import RECIPES as PROMPT_RECIPES
from mbd_core.fields import CLUSTER, DATA, DECODING, MODEL, OUTPUT, STATES, UPDATES, Flag, Ge, Gt, configuration
from mbd_core.json_text import differing_fields, merge_fields
from mbd_core.multitf.config import ReplayStates, TrainConfig, check_learning
from mbd_core.multitf.step.objective import PolicyObjective
from mbd_core.rl.groups import GroupConfig
from mbd_core.rl.rewards import RewardConfig

FRESH_STREAMS = 1_000_000
"""Added to a run's seed for the stream of its generated problems: recipes of training count their seeds from 0."""

RampShape = Literal["cos", "sin", "linear"]
RLSchedule = Literal["sync", "one-step-off"]


@configuration(panel=DATA)
class RolloutConfig:
    """The problems of an iteration, and the sampling of their answers.

    An iteration asks `prompts` problems, `group` times each. `decoding` holds fields beside the fields of the model's
    `generation_config.json`. Log-probabilities are those of temperature 1: at any other temperature the learner is
    off-policy.
    """

    task: Annotated[
        str, Flag(help=f"The task whose answers are drawn and graded: {', '.join(TASKS)}.", metavar="NAME")
    ] = "ledger-mini"
    data: Annotated[str | None, Flag(metavar="PATH", opened_by="job")] = None
    """The problems of a task that is not generated: a file of JSON lines, or hub:NAME[:CONFIGURATION[:SPLIT]]."""
    fresh_problems: bool = True
    """Draw a generated task's problems from a stream that no recipe of training reads. Otherwise they come from the
    stream of the seed, on which models were trained."""
    prompt_recipe: Annotated[
        str, Flag(help=f"How the task is asked: {', '.join(PROMPT_RECIPES)}.", metavar="NAME")
    ] = OWN_CHAT.name
    prompts: Annotated[int, Ge(1)] = 8
    """Problems of an iteration."""
    group: Annotated[int, Ge(1), Flag(panel=DECODING)] = 8
    """Answers drawn to each problem, which are compared; 1 only with a teacher."""
    part_rows: Annotated[int, Ge(1)] = 32
    """Answers that an engine gets and writes together, in whole groups."""
    temperature: Annotated[float, Gt(0), Flag(panel=DECODING, metavar="T")] = 1.0
    """Sampling temperature; at 1 the rollouts follow the learner's policy."""
    max_tokens: Annotated[int | None, Ge(1), Flag(panel=DECODING, default="the prompt recipe's, the task's own")] = (
        None
    )
    """New tokens of an answer."""
    first_tokens: Annotated[int | None, Ge(1), Flag(panel=DECODING, default="--max-tokens")] = None
    """New tokens of an answer in the first iteration, from which the limit grows to --max-tokens."""
    ramp: Annotated[int, Ge(1), Flag(panel=DECODING)] = 100
    """Iterations in which the limit grows."""
    ramp_shape: Annotated[RampShape, Flag(panel=DECODING)] = "cos"
    """How the limit grows: slowly at first (cos), fast at first (sin), or evenly (linear)."""
    decoding: Annotated[dict[str, Any], Flag(panel=DECODING, metavar="JSON")] = field(default_factory=dict)
    """Decoding fields that differ from the model's own."""
    record_experts: Annotated[bool, Flag(panel=DECODING)] = False
    """Record the experts that the engine chose, and learn with the same experts (R3)."""

    def __post_init__(self) -> None:
        if self.task.startswith(HARNESS_PREFIX):
            raise ValueError(
                f"task '{self.task}' has no grader of one answer: lm-evaluation-harness grades its own runs; choose "
                f"one of {', '.join(TASKS)}"
            )
        if find_task(self.task).asks_calls:
            raise ValueError(
                f"task '{self.task}' asks for calls of functions, which are not read out of rollouts; choose one of "
                f"{', '.join(TASKS)}"
            )
        for name in ("ramp", "ramp_shape"):
            if self.first_tokens is None and (value := getattr(self, name)) != getattr(RolloutConfig, name):
                raise ValueError(f"{name}={value} has no meaning without first_tokens: the limit does not grow")

    def tokens_at(self, iteration: int, *, most: int, block_size: int) -> int:
        """The limit of new tokens in an iteration, counted from 0: whole blocks while the limit grows to `most`."""
        if self.first_tokens is None:
            return most
        if self.first_tokens > most:
            raise ValueError(
                f"first_tokens={self.first_tokens} is more than the limit of {most} tokens that it grows to"
            )
        share = min((iteration + 1) / self.ramp, 1.0)
        grown = {"linear": share, "sin": math.sin(math.pi / 2 * share), "cos": 1 - math.cos(math.pi / 2 * share)}
        tokens = self.first_tokens + (most - self.first_tokens) * grown[self.ramp_shape]
        return min(most, max(1, round(tokens / block_size)) * block_size)


@configuration(panel=DATA)
class HeldOutConfig:
    """The front of accuracy and TPF, decoded greedily, on problems that the run does not learn from."""

    evaluate_every: Annotated[int, Ge(0), Flag(panel=OUTPUT)] = 10
    """Iterations between two sweeps of held-out problems; 0: none."""
    held_out: Annotated[int, Ge(1)] = 100
    """Held-out problems of a sweep."""
    held_out_data: Annotated[str | None, Flag(metavar="PATH", opened_by="job")] = None
    """The held-out problems of a task that is not generated; a generated task has the split valid."""
    thresholds: Annotated[tuple[float, ...], Flag(panel=DECODING, commas=True)] = (0.8, 0.9, 0.95)
    """Thresholds tau_m2t of the front."""
    keep_best: Annotated[bool, Flag(panel=OUTPUT)] = True
    """Write the model with the best front to `best`: the mean over thresholds of accuracy times TPF."""
    patience: Annotated[int, Ge(0), Flag(panel=UPDATES)] = 0
    """The run ends after this many successive sweeps without a better front; 0: never."""

    def __post_init__(self) -> None:
        if not self.thresholds:
            raise ValueError("thresholds names none; give at least one")
        if self.patience and not self.evaluate_every:
            raise ValueError(
                f"patience={self.patience} counts sweeps of held-out problems, and evaluate_every=0 makes none: give "
                "one of them"
            )

    def check_sweeps(self, given: Collection[str]) -> None:
        """Raise `ValueError` for a given field of sweeps that the run does not make."""
        for name in ("held_out", "held_out_data", "thresholds", "keep_best"):
            if name in given and not self.evaluate_every:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no meaning with evaluate_every=0, which makes no sweeps of "
                    "held-out problems; leave one of them out"
                )


@configuration(panel=STATES)
class RLRecipe:
    """A run of reinforcement learning: its model, its task, and its settings.

    sync          an iteration's rollouts are made with the weights that it updates; on shared devices the engines
                  sleep while the learner works
    one-step-off  while the learner works on iteration n the engines make the rollouts of n + 1, with weights that are
                  one update old when the rollouts are learned from

    An iteration makes `objective.passes` updates. So the run sets three fields of `train`, whatever they were: as many
    steps as all updates, a batch of all answers, and the run's seed. `states` and `shrink` go to `replay_batch`. With
    `train.teacher` the objective is on-policy distillation (`multitf/step/distiller.py`): rewards are measured, and
    teach nothing.
    """

    name: Annotated[str, Flag(name=False)]
    """The name of the run and of its folder."""
    model: Annotated[str, Flag(panel=MODEL, metavar="MODEL", opened_by="workers")]
    """The model to start from: a shipped model's name, a model folder, or its URL."""
    rollouts: RolloutConfig = RolloutConfig()
    rewards: RewardConfig = RewardConfig()
    groups: GroupConfig = GroupConfig()
    objective: PolicyObjective = PolicyObjective()
    states: ReplayStates = "exact"
    """The states in which answers are scored: the engine's states (exact), or the states of released learners."""
    shrink: Annotated[int, Ge(1)] = 1
    """Successive forwards that become one state; exact for 1."""
    train: TrainConfig
    held_out: HeldOutConfig = HeldOutConfig()
    schedule: Annotated[RLSchedule, Flag(panel=CLUSTER)] = "sync"
    """Rollouts and updates in turn (sync), or side by side (one-step-off)."""
    iterations: Annotated[int, Ge(1), Flag(panel=UPDATES)] = 30
    """Iterations of the run, of --passes updates each."""
    most_idle: Annotated[int, Ge(0), Flag(panel=UPDATES)] = 5
    """The run ends after this many successive iterations that taught nothing; 0: never."""
    max_rollouts: Annotated[int, Ge(0), Flag(panel=UPDATES)] = 0
    """The run ends with the iteration in which its answers reach this number; 0: no limit."""
    max_seconds: Annotated[float, Ge(0), Flag(panel=UPDATES, metavar="S")] = 0.0
    """The run ends with the iteration in which its time reaches this number of seconds; 0: no limit."""
    checkpoint_every: Annotated[int, Ge(1), Flag(panel=OUTPUT)] = 1
    """Iterations between two checkpoints of the learner."""
    samples_every: Annotated[int, Ge(0), Flag(panel=OUTPUT)] = 5
    """Iterations between two pages of sample rollouts; 0: none."""
    seed: Annotated[int, Ge(0), Flag(panel=DATA)] = 0
    """Seed of the problems, of drawn tokens, and of the learner."""
    source: str = "this project's own (docs/reference/rl.md)"

    def __post_init__(self) -> None:
        objective = self.objective
        if self.distils:
            self._check_distillation()
        elif self.rollouts.group < 2:
            raise ValueError("group=1 leaves no answers to compare: give at least 2, or a teacher (--teacher)")
        is_corrected = objective.correction is not None or (objective.kind, objective.old) == ("clipped", "rollout")
        if self.schedule == "one-step-off" and not (is_corrected or self.distils):
            raise ValueError(
                "schedule=one-step-off learns from the answers of older weights: give kind=clipped with old=rollout, "
                "or a correction"
            )
        if self.rollouts.record_experts and (self.states, self.shrink) != ("exact", 1):
            raise ValueError(
                "record_experts records the experts of the engine's forwards, and is replayed with states=exact and "
                "shrink=1"
            )
        check_learning(self.train)
        steps = self.iterations * objective.passes
        followed = replace(self.train, steps=steps, batch_size=self.answers, seed=self.seed)
        object.__setattr__(self, "train", followed)

    def _check_distillation(self) -> None:
        if self.objective != PolicyObjective():
            raise ValueError(
                "a teacher is the only objective: take a recipe without another, as tiny-opd, and leave the fields of "
                "objective out"
            )
        if self.rollouts.record_experts:
            raise ValueError(
                "record_experts records the experts of the engine's forwards, and a teacher's rows draw few of them"
            )

    @property
    def distils(self) -> bool:
        """Whether a teacher's judgement is learned, and not a reward."""
        return self.train.teacher is not None

    def check_learners(self, learners: int) -> None:
        """Raises `ValueError` unless the learner's workers divide into groups that share every layer, and the answers
        of an iteration over the groups."""
        groups, remainder = divmod(learners, self.train.tensor_parallel)
        if remainder:
            raise ValueError(
                f"train.tensor_parallel={self.train.tensor_parallel} does not divide --learners {learners}"
            )
        if self.answers % groups:
            raise ValueError(
                f"--prompts {self.rollouts.prompts} and --group {self.rollouts.group} make {self.answers} answers, "
                f"which do not divide over --learners {learners}"
            )

    @property
    def lag(self) -> int:
        """The most updates by which a rollout's weights may be older than the learner's."""
        return 0 if self.schedule == "sync" else 1

    @property
    def answers(self) -> int:
        """Answers of an iteration."""
        return self.rollouts.prompts * self.rollouts.group

    @property
    def end(self) -> int:
        """The most iterations of the run: `iterations`, or the number that `max_rollouts` allows, if it is smaller."""
        return min(self.iterations, math.ceil(self.max_rollouts / self.answers) or self.iterations)


def as_recorded(recipe: RLRecipe) -> dict[str, Any]:
    """The recipe as read from its JSON, with the effective filters of groups."""
    filled = replace(recipe, groups=recipe.groups.filled(recipe.rewards.weights))
    recorded = json.loads(json.dumps(asdict(filled), default=str))
    assert isinstance(recorded, dict)
    return recorded


FREE = ("iterations", "checkpoint_every", "samples_every", "most_idle", "max_rollouts", "max_seconds")
FREE_OF_HELD_OUT = ("keep_best", "patience")
FREE_OF_REWARDS = ("reward_seconds", "judge_patience", "judge_concurrency", "judge_key", "on_reward_error")
"""The fields that a resumed run may change: of the run, of its sweeps, and of its rewards."""


SINCE_ADDED = {
    "rollouts": {"fresh_problems": False, "first_tokens": None, "ramp": 100, "ramp_shape": "cos"},
    "train": {"teacher": None},
}
"""Fields that old records lack."""


def other_settings(recorded: Mapping[str, Any], recipe: RLRecipe) -> str:
    """The fields that make a recorded recipe and this recipe different runs, in words; "" if there are none."""
    theirs, ours = merge_fields(SINCE_ADDED, recorded), as_recorded(recipe)
    for name in FREE:
        theirs.pop(name, None)
        ours.pop(name, None)
    for fields in (theirs, ours):
        fields["rewards"] = {n: value for n, value in fields["rewards"].items() if n not in FREE_OF_REWARDS}
        fields["held_out"] = {n: value for n, value in fields["held_out"].items() if n not in FREE_OF_HELD_OUT}
        fields["train"] = {name: value for name, value in fields["train"].items() if name != "steps"}
    return differing_fields(theirs, ours)
