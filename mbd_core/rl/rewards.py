"""Rewards of answers: the evaluation's graders, tokens per forward, a Python function, an HTTP service.

A recipe gives weights to the parts of the reward, which have these names:

    correct               1 for an answer that the task's grader accepts as right, else 0
    tpf                   its useful tokens per forward
    MODULE:NAME           a function of a module beside the run, or of a file (FILE.py:NAME), in processes of its own
    http://, https://     a service that takes {"prompt", "text", "reference", "problem_id"} and answers {"reward": X}

A part gives a finite number, or nothing (`None`) if it does not apply; then only the other parts count. A part that
raises, does not answer in time, or gives anything else drops the answer, which has the reason in `failure`; with
`on_reward_error` stop it ends the run in one sentence (`RewardFailed`). The rollouts stay in the run's folder, and the
resumed run continues with them.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Literal, Self

import pyarrow as pa

from mbd_core.evaluation.sweep.grading.part_grading import grade_table
from mbd_core.fields import UPDATES, Flag, Ge, Gt, configuration
from mbd_core.rl.functions import FunctionReward
from mbd_core.rl.parts import CORRECT, TPF, Failure, RewardFailed, RewardOutcome, failed, first_error
from mbd_core.rl.rows import SCORES, JudgedRow, ScoreColumns
from mbd_core.rl.services import HttpReward, has_host, key_in

FUNCTION = re.compile(r"([A-Za-z_][\w.]*|.+\.py):[A-Za-z_][\w.]*")
HTTP = ("http://", "https://")


@configuration(panel=UPDATES)
class RewardConfig:
    """The parts of the reward, and their limits."""

    rewards: Annotated[dict[str, float], Flag(metavar="JSON")] = field(
        default_factory=lambda: {CORRECT: 1.0, TPF: 1.0}
    )
    """The parts of the reward and their weights: correct, tpf, MODULE:NAME or FILE.py:NAME of a function, or the URL
    of a service; weight 0 leaves a part out."""
    overlong_is_wrong: bool = True
    """An answer that met its limit of tokens is wrong, whatever it says."""
    reward_seconds: Annotated[float, Gt(0)] = 30.0
    """Seconds that a function or a service has for one answer."""
    judge_patience: Annotated[float, Gt(0)] = 120.0
    """Seconds within which a service that is busy, fails or cannot be reached is asked again about an answer."""
    judge_concurrency: Annotated[int, Ge(1)] = 32
    """Concurrent questions to a function or a service, for each part of rollouts."""
    judge_key: Annotated[dict[str, str], Flag(metavar="JSON")] = field(default_factory=dict)
    """Services that want a key, as {URL: VARIABLE}: the environment variable that holds it."""
    on_reward_error: Literal["drop", "stop"] = "drop"
    """If a function or a service fails: drop the answer, or stop the run."""

    def __post_init__(self) -> None:
        for name in self.rewards:
            if name.startswith(HTTP):
                if not has_host(name):
                    raise ValueError(f"reward '{name}' is no URL of a service; give http(s)://HOST[:PORT]/PATH")
            elif name not in (CORRECT, TPF) and not FUNCTION.fullmatch(name):
                raise ValueError(
                    f"unknown reward '{name}'; known: {CORRECT}, {TPF}, MODULE:FUNCTION, FILE.py:FUNCTION, http(s)://..."
                )
        if not self.weights:
            raise ValueError("rewards has no part with a weight other than 0; give at least one")
        for url, variable in self.judge_key.items():
            if url not in self.rewards:
                raise ValueError(f"judge_key names '{url}' for {variable}, which is no URL of rewards")

    @property
    def weights(self) -> dict[str, float]:
        """The parts that count."""
        return {name: weight for name, weight in self.rewards.items() if weight}

    @property
    def judges(self) -> list[str]:
        """The names of the functions and services that count."""
        return [name for name in self.weights if name not in (CORRECT, TPF)]


class Scorer:
    """Scores tables of rollouts. The processes of functions end with its context. `isolated` as in a sweep."""

    def __init__(self, config: RewardConfig, *, isolated: bool = False) -> None:
        self._config, self._isolated = config, isolated
        self._runner = asyncio.Runner()
        self._judges = {name: _judge(name, config) for name in config.judges}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for judge in self._judges.values():
            self._runner.run(judge.close())
        self._runner.close()

    def __call__(self, table: pa.Table) -> pa.Table:
        """`SCORES` of a table, a row each; an answer that was not decoded is wrong and has no rewards.

        Raises `RewardFailed`, and `ValueError` as `grade_table`.
        """
        graded, groups = grade_table(table, isolated=self._isolated).to_pylist(), table["group"].to_pylist()
        rows = [row | {"group": group} for row, group in zip(graded, groups, strict=True)]
        decoded = [row for row in rows if row["error"] is None]
        judged = iter(self._runner.run(self._ask(decoded)) if self._judges and decoded else [{}] * len(decoded))
        return pa.Table.from_pylist(
            [self._score(row, next(judged) if row["error"] is None else None) for row in rows], schema=SCORES
        )

    async def _ask(self, rows: Sequence[JudgedRow]) -> list[dict[str, RewardOutcome]]:
        """The outcomes of each judge for each row; all judges work at once."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {name: group.create_task(judge.judge(rows)) for name, judge in self._judges.items()}
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return [{name: task.result()[place] for name, task in tasks.items()} for place in range(len(rows))]

    def _score(self, row: JudgedRow, judged: Mapping[str, RewardOutcome] | None) -> ScoreColumns:
        overlong = row["finish_reason"] == "length"
        correct = bool(row["correct"]) and not (overlong and self._config.overlong_is_wrong)
        score = ScoreColumns(correct=correct, overlong=overlong, reason=row["reason"], rewards=None, failure=None)
        if judged is None:
            return score
        known = {CORRECT: float(correct), TPF: row["num_tokens"] / max(1, row["num_forwards"])}
        for name, outcome in judged.items():
            if isinstance(outcome, Failure):
                return {**score, "failure": str(failed(name, outcome, row))}
        return {**score, "rewards": json.dumps({name: {**known, **judged}[name] for name in self._config.weights})}


def score_table(table: pa.Table, config: RewardConfig, *, isolated: bool = False) -> pa.Table:
    """`SCORES` of one table, as a `Scorer` gives them."""
    with Scorer(config, isolated=isolated) as scorer:
        return scorer(table)


def check_judges(config: RewardConfig) -> None:
    """Raises `ValueError`, one sentence, if a function cannot be imported or asked, or a key is not set."""

    async def resolve() -> None:
        for name in config.judges:
            judge = _judge(name, config)
            try:
                await judge.resolve()
            finally:
                await judge.close()

    try:
        asyncio.run(resolve())
    except RewardFailed as error:
        raise ValueError(str(error)) from None


def _judge(name: str, config: RewardConfig) -> FunctionReward | HttpReward:
    seconds, concurrency, stops = config.reward_seconds, config.judge_concurrency, config.on_reward_error == "stop"
    if not name.startswith(HTTP):
        return FunctionReward(name, seconds=seconds, concurrency=concurrency, stops=stops)
    key = key_in(config.judge_key[name], name) if name in config.judge_key else None
    return HttpReward(
        name, seconds=seconds, patience=config.judge_patience, concurrency=concurrency, key=key, stops=stops
    )
