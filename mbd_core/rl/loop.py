"""The loop of reinforcement learning: rollouts, rewards, groups, an update, new weights, numbers; and again.

    sync           rollouts n | update n | swap n+1 | rollouts n+1 | update n+1 | ...
    one-step-off   rollouts 0 | update 0             | swap 1 | update 1             | swap 2 | ...
                                rollouts 1 (weights 0)          rollouts 2 (weights 1)

Version n of the weights is the learner after n iterations. Rollouts lie in the run's folder before they are scored,
and are learned from once: the learner's newest state says which iterations are done. Whichever process was
killed, the run goes on from this state, and makes only the missing rollouts of the next iteration.
"""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from statistics import fmean
from typing import Any

import torch

from mbd_core.batch.parts import NumberedTable, cut
from mbd_core.checkpoint.base_files import read_base
from mbd_core.checkpoint.chat import decode_text
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import MODEL_KIND, save_model
from mbd_core.evaluation.measures.rates import Summary, summarize
from mbd_core.evaluation.sweep.gathered_samples import graded_sample
from mbd_core.evaluation.sweep.grading.graded_rows import GradedRow
from mbd_core.multitf.recipes.recipe import RL_RECIPE
from mbd_core.multitf.run.log import IDS, say
from mbd_core.multitf.run.log_targets import open_logs
from mbd_core.rl.config import RLRecipe, as_recorded
from mbd_core.rl.executor import LearnerLost, RLExecutor
from mbd_core.rl.folder import BEST, HELD_OUT, ITERATIONS, MODEL, PLOT, RunFolder, state_name
from mbd_core.rl.groups import REASONS, Reason, RewardedAnswer, advantages, weighted_sum, why_idle
from mbd_core.rl.parts import RewardFailed
from mbd_core.rl.record import (
    SINCE_START,
    RecordedNumbers,
    draw_progress,
    ended_by,
    failure_texts,
    failures_text,
    front_line,
    group_numbers,
    progress_line,
    rollout_numbers,
    run_seconds,
    sweeps_since_best,
)
from mbd_core.rl.rollouts import RolloutPlan, decided, replayed
from mbd_core.rl.rows import ScoredRow
from mbd_core.rl.samples import samples_page
from mbd_core.storage.folder import Folder


class RLRun:
    """A run in its folder, on an executor. `log_targets` are the targets of `--log-to`."""

    def __init__(
        self, plan: RolloutPlan, folder: RunFolder, executor: RLExecutor, *, log_targets: Sequence[str] = ()
    ) -> None:
        self.plan, self.folder, self.executor = plan, folder, executor
        self.recipe: RLRecipe = plan.recipe
        self._log_targets = log_targets

    def run(self, *, max_failures: int = 0) -> Folder:
        """Iterate to the end, write the model, and return its folder. The learner may be lost `max_failures` times.

        Raises `RuntimeError`, one sentence, at the next loss, and `RewardFailed`. A repeated run goes on from its
        folder.
        """
        for failures in range(max_failures + 1):
            try:
                return self._run()
            except LearnerLost as error:
                if failures == max_failures:
                    raise
                say(f"{error}; the run goes on from iteration {self.folder.done + 1}")
        raise AssertionError("the last failure is raised")

    def _run(self) -> Folder:
        recipe, folder, executor = self.recipe, self.folder, self.executor
        say(self.plan.describe())
        done = folder.done
        executor.load(folder.folder, state_name(done) if done else None)
        executor.swap(done)
        if dropped := folder.drop_lost(done):
            say(f"{dropped} rollouts of weights that are too old or were lost are made anew")
        lines, fronts = folder.lines(ITERATIONS), folder.lines(HELD_OUT)
        self._began = time.perf_counter() - run_seconds(lines)
        loggers = self._loggers(done)
        try:
            self._hold_out(done, fronts, is_last=self._is_last(lines))
            end = done if self._is_over(lines, fronts) else recipe.end
            waiting = self._begin(done) if done < end else iter(())
            num_idle, ends = 0, False
            for iteration in range(done, end):
                line, waiting = self._iterate(iteration, waiting)
                lines.append(line)
                folder.write_lines(ITERATIONS, lines)
                after = iteration + 1
                num_idle = num_idle + 1 if line["idle"] else 0
                ends = num_idle == recipe.most_idle > 0
                is_last = self._is_last(lines)
                if (
                    is_last
                    or ends
                    or after % recipe.checkpoint_every == 0
                    or (recipe.held_out.patience and self._sweeps(after))
                ):
                    folder.check_ours()
                    executor.save(folder.folder, state_name(after))
                    folder.drop_older_states(after)
                seconds = fmean(line["seconds"] for line in lines[done:])
                say(progress_line(line, recipe.end, seconds))
                if num_idle:
                    say(f"iteration {after} taught nothing: {self._why_idle([line])}")
                values = {name: float(value) for name, value in line.items() if name not in ("iteration", "failures")}
                for logger in loggers:
                    logger.add(iteration, values)
                new_points = self._hold_out(after, fronts, is_last=is_last)
                for logger in loggers:
                    logger.amend(iteration, new_points) if new_points else None
                    logger.flush()
                if ends or self._is_over(lines, fronts):
                    break
        finally:
            for logger in loggers:
                logger.close()
        if lines:
            with folder.folder.staged_file(PLOT) as path:
                draw_progress(lines, fronts, path, title=f"{recipe.name}: {len(lines)} iterations")
        if ends:
            raise RuntimeError(
                f"{num_idle} iterations in a row taught nothing (--most-idle {recipe.most_idle}): "
                f"{self._why_idle(lines[-num_idle:])}"
            )
        if lines and all(line.get("idle") for line in lines):
            limit = ended_by(recipe, lines, fronts) or f"all are done (--iterations {recipe.iterations})"
            raise RuntimeError(
                f"none of its {len(lines)} iterations taught anything, and the model is as it was: "
                f"{self._why_idle(lines)}; going on needs a higher limit, since {limit}"
            )
        return self._write_model()

    def _iterate(
        self, iteration: int, waiting: Iterator[NumberedTable]
    ) -> tuple[RecordedNumbers, Iterator[NumberedTable]]:
        """One iteration: its line of numbers, and the rollouts of the next one, which may be under way."""
        recipe, executor = self.recipe, self.executor
        began = time.perf_counter()
        rows, seconds = self._scored(iteration, waiting)
        usable = [row for row in rows if decided(row)]
        if not usable:
            why = next((row["error"] for row in rows if row["error"]), "no forward decided a token")
            raise RuntimeError(f"no answer of iteration {iteration + 1} was decoded: {why}")
        self._check_failures(iteration, usable)
        waiting = iter(())
        is_last = iteration + 1 == recipe.end
        if recipe.lag and not is_last:
            waiting = self._begin(iteration + 1)  # with the present weights
        answers = [rewarded_answer(row) for row in usable]
        dropped: Counter[Reason]
        if recipe.distils:
            taught, dropped = dict.fromkeys(range(len(answers)), 0.0), Counter[Reason]()
        else:
            taught, dropped = advantages(
                answers, recipe.rewards.weights, recipe.groups, seed=recipe.seed * 1_000_003 + iteration
            )
        # groups without an answer
        dropped["undecoded"] += recipe.rollouts.prompts - len({answer.group for answer in answers})
        lessons = [
            replayed(usable[place], advantage=advantage, correct=answers[place].correct)
            for place, advantage in taught.items()
        ]
        began_update = time.perf_counter()
        report = dict(executor.update(lessons)) if lessons else {}
        seconds["update"] = time.perf_counter() - began_update
        if recipe.lag and not is_last:
            began_rollouts = time.perf_counter()
            deque(waiting, maxlen=0)  # all rollouts must be in the folder before the weights change
            waiting = iter(())
            seconds["rollouts"] += time.perf_counter() - began_rollouts
        began_swap = time.perf_counter()
        executor.swap(iteration + 1)
        seconds["swap"] = time.perf_counter() - began_swap
        since_start = round(time.perf_counter() - self._began, 3)
        is_last |= 0 < recipe.max_seconds <= since_start
        if not recipe.lag and not is_last:
            waiting = self._begin(iteration + 1)
        self._write_samples(iteration, rows)
        for name in ("step", "answers", "seconds"):
            report.pop(name, None)
        line = {
            "iteration": iteration,
            **rollout_numbers(rows, answers, recipe.rewards.weights),
            **group_numbers(answers, dropped, taught, num_groups=recipe.rollouts.prompts),
            "idle": not (
                (recipe.distils and lessons)
                or any(taught.values())
                or (recipe.objective.nll and any(each.correct for each in lessons))
            ),
            "version_lag": fmean(iteration - row["version"] for row in rows),
            **report,
            **{f"seconds_{name}": round(value, 3) for name, value in seconds.items()},
            "seconds": round(time.perf_counter() - began, 3),
            SINCE_START: since_start,
        }
        return line, waiting

    def _check_failures(self, iteration: int, rows: Sequence[ScoredRow]) -> None:
        """Say which rewards of decoded answers failed. If all failed, removes the scores, so that a resumed run asks
        anew, and raises `RewardFailed`."""
        failures = failure_texts(rows)
        if not failures:
            return
        num_failed = sum(failures.values())
        if num_failed == len(rows):
            self.folder.drop_scores(iteration)
            raise RewardFailed(
                f"no answer of iteration {iteration + 1} got a reward, {num_failed} of {num_failed} failed: "
                f"{failures_text(failures)}"
            )
        say(
            f"iteration {iteration + 1}: {num_failed} of {len(rows)} answers are dropped, since their reward failed "
            f"(--on-reward-error stop ends the run there): {failures_text(failures)}"
        )

    def _why_idle(self, lines: Sequence[RecordedNumbers]) -> str:
        """Why iterations taught nothing, and the remedies."""
        reasons = {reason: sum(line[f"groups_dropped_{reason}"] for line in lines) for reason in REASONS}
        even, groups = (sum(line[name] for line in lines) for name in ("groups_even", "groups"))
        return f"of {groups} groups, {why_idle(reasons, even, self.recipe.rewards.weights, self.recipe.groups)}"

    # Rollouts and their scores

    def _begin(self, iteration: int) -> Iterator[NumberedTable]:
        """The rollouts that an iteration lacks, as they come. Each is written to the folder before it is yielded."""
        missing = [
            (number, table)
            for number, table in self.plan.parts(iteration)
            if not self.folder.has(iteration, "part", number)
        ]
        decoded = self.executor.rollouts(missing)  # the engines begin now

        def written() -> Iterator[NumberedTable]:
            for number, table in decoded:
                self.folder.write(iteration, "part", number, table)
                yield number, table

        return written()

    def _scored(self, iteration: int, waiting: Iterator[NumberedTable]) -> tuple[list[ScoredRow], dict[str, float]]:
        """All rollouts of an iteration with their scores, in the order of the plan, and the seconds of both steps."""
        folder, began, in_rollouts = self.folder, time.perf_counter(), 0.0
        numbers = [number for number, _ in self.plan.parts(iteration)]

        def unscored() -> Iterator[NumberedTable]:
            nonlocal in_rollouts
            for number in numbers:
                if folder.has(iteration, "part", number) and not folder.has(iteration, "scores", number):
                    yield number, folder.read(iteration, "part", number)
            while True:
                began_part = time.perf_counter()
                part = next(waiting, None)
                in_rollouts += time.perf_counter() - began_part
                if part is None:
                    return
                yield part

        for number, scores in self.executor.scores(unscored()):
            folder.write(iteration, "scores", number, scores)
        rows: list[ScoredRow] = []
        for number in numbers:
            table, scores = folder.read(iteration, "part", number), folder.read(iteration, "scores", number)
            pairs = zip(table.to_pylist(), scores.to_pylist(), strict=True)
            rows += [row | score for row, score in pairs]
        rows.sort(key=lambda row: row["sample"])
        total = time.perf_counter() - began
        return rows, {"rollouts": in_rollouts, "scores": total - in_rollouts}

    # Numbers and pages that are written

    def _hold_out(self, version: int, fronts: list[RecordedNumbers], *, is_last: bool) -> dict[str, float]:
        """Sweeps the held-out problems if a sweep is due and not done yet, and returns its numbers.

        It is due after some iterations, and after the last.
        """
        sweep = self.plan.held_out
        is_due = self._sweeps(version) or is_last
        if sweep is None or not is_due or any(line["iteration"] == version for line in fronts):
            return {}
        parts = cut(list(sweep.rows()), rows_per_part=sweep.engine.max_rows)
        rows: dict[float, list[GradedRow]] = {}
        for _, table in self.executor.sweep([(part.number, part.table()) for part in parts]):
            for row in table.to_pylist():
                rows.setdefault(json.loads(row["config"])["tau_m2t"], []).append(row)
        values: dict[str, float] = {}
        for threshold, of_threshold in sorted(rows.items()):
            summary: Summary = summarize([graded_sample(row) for row in of_threshold])
            fronts.append(front_line(version, threshold, summary))
            values |= {f"sweep_{name}_{threshold:g}": fronts[-1][name] for name in ("accuracy", "tpf")}
        if version and self.recipe.held_out.keep_best and not sweeps_since_best(fronts):
            best = self._write_model(BEST)  # before the lines, which tell a resumed run that it is written
            say(f"the best front until now: its model is {best}")
        self.folder.write_lines(HELD_OUT, fronts)
        points = "  ".join(
            f"{line['accuracy']:.3f} at TPF {line['tpf']:.2f} (tau {line['tau_m2t']:g})"
            for line in fronts[-len(rows) :]
        )
        say(f"held out after {version} iterations: {points}")
        return values

    def _sweeps(self, version: int) -> bool:
        """Whether held-out problems are swept after this number of iterations, even if more iterations follow."""
        every = self.recipe.held_out.evaluate_every
        return bool(every) and version % every == 0

    def _is_over(self, lines: Sequence[RecordedNumbers], fronts: Sequence[RecordedNumbers]) -> bool:
        """Whether a limit of the recipe ends the run before its last iteration; prints the limit."""
        limit = ended_by(self.recipe, lines, fronts)
        if limit is not None:
            say(f"the run ends: {limit}")
        return limit is not None

    def _is_last(self, lines: Sequence[RecordedNumbers]) -> bool:
        """Whether these iterations are the last, whatever their sweeps say."""
        return len(lines) == self.recipe.iterations or ended_by(self.recipe, lines, ()) is not None

    def _write_samples(self, iteration: int, rows: Sequence[ScoredRow]) -> None:
        every = self.recipe.samples_every
        if every and (iteration % every == 0 or iteration + 1 == self.recipe.end):
            rewards = [total_reward(row, self.recipe.rewards.weights) if decided(row) else None for row in rows]
            if page := samples_page(rows, rewards, decode=self._decoder):
                self.folder.folder.write_text(f"samples/{iteration:05d}.html", page)

    @property
    def _decoder(self) -> Callable[[int], str]:
        tokenizer = read_folder(self.plan.start).tokenizer
        return lru_cache(maxsize=None)(lambda token: decode_text(tokenizer, [token], special=True))

    def _loggers(self, start: int) -> list[Any]:
        folder = self.folder.folder
        ids: dict[str, str] = json.loads(folder.read_text(IDS) or "{}")
        loggers = open_logs(
            self._log_targets,
            folder,
            start=start,
            ids=ids,
            name=folder.name,
            settings=as_recorded(self.recipe),
        )
        if ids:
            folder.write_text(IDS, json.dumps(ids))
        return list(loggers)

    def _write_model(self, name: str = MODEL) -> Folder:
        """Write the model of the learner's weights, with the other files of the folder that the run started from."""
        folder, start = self.folder.folder / name, self.plan.start
        model = load_model(start, dtype=torch.float32)
        model.load_state_dict(self.executor.weights())
        base = read_base(start)
        recipe = json.dumps(asdict(self.recipe), indent=2, default=str) + "\n"
        is_there = folder.exists()
        self.folder.check_ours()
        with folder.staged(MODEL_KIND, overwrite=is_there) as path:
            save_model(
                path,
                model,
                base=base,
                generation=dict(base.generation),
                dtype=torch.bfloat16,
                extra={RL_RECIPE: recipe},
                overwrite=is_there,
            )
        return folder


def rewarded_answer(row: ScoredRow) -> RewardedAnswer:
    """A row's rewards, correctness and TPF, which groups compare."""
    return RewardedAnswer(
        group=row["group"],
        correct=row["correct"],
        tpf=row["num_tokens"] / max(1, row["num_forwards"]),
        rewards=json.loads(row["rewards"] or "{}"),
    )


def total_reward(row: ScoredRow, weights: Mapping[str, float]) -> float | None:
    """The weighted sum of the parts of a row's reward; `None` if the row has no reward."""
    answer = rewarded_answer(row)
    return weighted_sum(answer.rewards, weights) if answer.is_rewarded else None
