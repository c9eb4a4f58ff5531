"""Rewards of answers: the evaluation's graders, tokens per forward, a Python function, an HTTP service.

A part of the reward is named by what gives it, and a recipe weighs the parts:

    correct               1 for an answer that the task's grader takes as right, else 0
    tpf                   its useful tokens per forward
    MODULE:FUNCTION       a function of (prompt, text, reference), of a module beside the run, in a process of its own
    http://, https://     a service that takes {"prompt", "text", "reference", "problem_id"} and answers {"reward": X}

A reward that raises, does not answer in time, or is no finite number ends the run in one sentence (`RewardFailed`).
The rollouts lie in the run's folder then, and the same run goes on with them.
"""

import asyncio
import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import pyarrow as pa

from mbd_core.errors import error_line, error_sentence
from mbd_core.evaluation.sweep.grading import grade_table
from mbd_core.json_text import parse_json
from mbd_core.options import UPDATES, Option, check
from mbd_core.proxies import is_own, proxy_note

CORRECT, TPF = "correct", "tpf"
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
HTTP = ("http://", "https://")
START_SECONDS = 120.0  # for a function's process to import its libraries
TRIES, PAUSE = 3, 1.0  # of a service that does not answer, and seconds between them
SCORES = pa.schema(
    [("correct", pa.bool_()), ("overlong", pa.bool_()), ("reason", pa.string()), ("rewards", pa.string())]
)
"""What scoring adds to a table: the grade and its reason, whether an answer met its limit of tokens, and the parts of
its reward as JSON."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What an answer is rewarded for."""

    rewards: Annotated[
        dict[str, float],
        Option(
            "The parts of the reward and their weights: correct, tpf, MODULE:FUNCTION, or the URL of a service; "
            "weight 0 leaves one out.",
            UPDATES,
            metavar="JSON",
        ),
    ] = field(default_factory=lambda: {CORRECT: 1.0, TPF: 1.0})
    overlong_is_wrong: Annotated[
        bool, Option("An answer that met its limit of tokens is wrong, whatever it says.", UPDATES)
    ] = True
    reward_seconds: Annotated[
        float, Option("Seconds that a function or a service has for one answer.", UPDATES, above=0)
    ] = 30.0

    def __post_init__(self) -> None:
        check(self)
        for name, weight in self.rewards.items():
            if not (name in (CORRECT, TPF) or FUNCTION.fullmatch(name) or name.startswith(HTTP)):
                raise ValueError(f"unknown reward '{name}'; known: {CORRECT}, {TPF}, MODULE:FUNCTION, http(s)://...")
            if name.startswith(HTTP) and not _has_host(name):
                raise ValueError(f"reward '{name}' is no URL of a service; give http(s)://HOST[:PORT]/PATH")
            if not is_finite(weight):
                raise ValueError(f"the weight of reward '{name}' must be a finite number, not {weight}")
        if not self.weights:
            raise ValueError("rewards has no part with a weight other than 0; give at least one")

    @property
    def weights(self) -> dict[str, float]:
        """The parts that count."""
        return {name: weight for name, weight in self.rewards.items() if weight}


class RewardFailed(RuntimeError):
    """A part of the reward gave none for an answer."""


class Reward(Protocol):
    """A part of the reward that somebody else computes. Raises `RewardFailed`."""

    def __call__(self, row: Mapping[str, Any]) -> float: ...


def score_table(table: pa.Table, config: RewardConfig, *, isolated: bool = False) -> pa.Table:
    """`SCORES` of a table of rollouts, a row each; one without an answer is wrong and has no rewards.

    Raises `RewardFailed`, and `ValueError` as `grade_table`.
    """
    with ExitStack() as stack:
        others: dict[str, Reward] = {}
        for name in config.weights:
            if name.startswith(HTTP):
                others[name] = HttpReward(name, seconds=config.reward_seconds)
            elif name not in (CORRECT, TPF):
                others[name] = stack.enter_context(FunctionReward(name, seconds=config.reward_seconds))
        rows = []
        for row in grade_table(table, isolated=isolated).to_pylist():
            overlong = row["finish_reason"] == "length"
            correct = bool(row["correct"]) and not (overlong and config.overlong_is_wrong)
            rewards = None
            if row["error"] is None:
                known = {CORRECT: float(correct), TPF: row["num_tokens"] / max(1, row["num_forwards"])}
                parts = {name: others[name](row) if name in others else known[name] for name in config.weights}
                rewards = json.dumps(parts)
            rows.append({"correct": correct, "overlong": overlong, "reason": row["reason"], "rewards": rewards})
    return pa.Table.from_pylist(rows, schema=SCORES)


def question(row: Mapping[str, Any]) -> dict[str, str]:
    """What a function or a service is asked about an answer."""
    return {name: row[name] for name in ("prompt", "text", "reference", "problem_id")}


def finite(value: Any, name: str, row: Mapping[str, Any]) -> float:
    """The reward, if it is one; else `RewardFailed`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        raise failure(name, row, f"gave {str(value)[:80]}, which is no finite number")
    return float(value)


def is_finite(value: float) -> bool:
    """Whether a float holds it; an integer may be too large for one."""
    return abs(value) <= sys.float_info.max


def failure(name: str, row: Mapping[str, Any], what: str) -> RewardFailed:
    return RewardFailed(f"reward '{name}' {what}, for an answer to {row['problem_id']}")


def _has_host(url: str) -> bool:
    """Whether a request can be sent there: a host, a port that is a number if there is one, no blanks."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0 and url.isprintable() and " " not in url
    except ValueError:
        return False


class HttpReward:
    """A service's reward. One that does not give its whole reply in time is asked again, `TRIES` times in all."""

    def __init__(self, url: str, *, seconds: float) -> None:
        self._url, self._seconds = url, seconds

    def __call__(self, row: Mapping[str, Any]) -> float:
        content = asyncio.run(self._reply(row))
        try:
            reply = parse_json(content, "the reply")
        except ValueError as error:
            raise failure(self._url, row, f"is unreadable: {error}") from None
        if not isinstance(reply, dict) or "reward" not in reply:
            raise failure(self._url, row, "replied without a field 'reward'")
        return finite(reply["reward"], self._url, row)

    async def _reply(self, row: Mapping[str, Any]) -> bytes:
        limit = aiohttp.ClientTimeout(total=self._seconds)  # from the connection to the last byte
        async with aiohttp.ClientSession(timeout=limit, trust_env=not is_own(self._url)) as session:
            for number in range(TRIES):
                if number:
                    await asyncio.sleep(PAUSE)
                try:
                    async with session.post(self._url, json=question(row), allow_redirects=False) as response:
                        content = await response.read()
                except TimeoutError:
                    why = f"no whole reply within {self._seconds:g} s"
                except aiohttp.ClientError as error:  # no connection, a reply that is cut or no HTTP
                    why = error_sentence(error)
                else:
                    if response.status < 300:
                        return content
                    why = f"status {response.status}"
                    if response.status < 500:
                        break
        raise failure(self._url, row, f"does not answer ({why}){proxy_note(self._url, takes_all=False)}")


# A user's function runs in a process of its own, one JSON line in and one out: it may hang, print, or end its process.


class FunctionReward:
    """The reward of MODULE:FUNCTION; a context, whose process ends with it. The next answer after a failure has a new
    process."""

    def __init__(self, name: str, *, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "FunctionReward":
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def __call__(self, row: Mapping[str, Any]) -> float:
        if self._process is None:
            self._process = self._start()
            self._reply(row, START_SECONDS)  # its libraries and the module are imported
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # there is no reply then
            self._process.stdin.write(json.dumps(question(row)).encode() + b"\n")
        return finite(self._reply(row, self._seconds)["reward"], self._name, row)

    def _reply(self, row: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        is_there, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if is_there else b""
        if not line:
            self._end()
            what = "ended its process" if is_there else f"did not answer within {seconds:g} s"
            raise failure(self._name, row, what)
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise failure(self._name, row, f"raised {reply['error']}")
        return reply

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-c", "from mbd_core.rl.rewards import answer_lines; answer_lines()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
        return subprocess.Popen(
            [*command, self._name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with process:  # closes its pipes, which its own children may hold open
                process.kill()


def answer_lines() -> None:
    """The life of a function's process: what the function prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(":")
    reply: dict[str, Any]
    try:
        function = getattr(import_module(module), name)
        reply = {}
    except Exception as error:  # whatever the user's module raises
        reply = {"error": error_line(error)[:300]}
    print(json.dumps(reply), file=replies, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        del asked["problem_id"]
        try:
            value = function(**asked)
            reply = {"reward": float(value) if hasattr(value, "__float__") else str(value)}
        except Exception as error:  # whatever the user's function raises
            reply = {"error": error_line(error)[:300]}
        print(json.dumps(reply), file=replies, flush=True)
