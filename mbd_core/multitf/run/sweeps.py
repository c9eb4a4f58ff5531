"""Sweeps while training: at intervals an engine beside the run decodes a small task with the run's weights.

The first worker begins a sweep once the checkpoint of its update is complete. It waits for a sweep only at the end.
Training does not know the engine: it gets a `Sweeper`. A sweep that fails prints a line, and the run goes on.
"""

import time
from concurrent.futures import Future
from typing import Protocol

from mbd_core.multitf.run.checkpoints import Checkpoints, best_step
from mbd_core.multitf.run.log import Log, say

END_SECONDS = 300.0
"""The time that a run waits at its end for the current sweep and the last one, together."""
HeldOutNumbers = dict[str, float]


class Sweeper(Protocol):
    """The process that sweeps, outside this one."""

    def begin(self, step: int) -> Future[HeldOutNumbers]:
        """Begins to sweep the checkpoint of a step. Raises if there is no room for the sweep.

        The results are `sweep_accuracy`, a share, and `sweep_tpf`.
        """

    def reason(self, error: BaseException) -> str:
        """The reason why a sweep did not begin or failed, in one line."""

    def end(self) -> None:
        """Ends the current sweep."""


class Sweeps:
    """The sweeps of a run, one at a time; on the first worker."""

    def __init__(self, sweeper: Sweeper, checkpoints: Checkpoints, log: Log) -> None:
        self.sweeper, self.checkpoints, self.log = sweeper, checkpoints, log
        self._due_step: int | None = None
        self._under_way: tuple[int, Future[HeldOutNumbers]] | None = None

    def request(self, step: int) -> None:
        """Plans a sweep of this step's checkpoint, which is about to be written, unless another sweep is due or
        running."""
        step_under_way = self._due_step if self._under_way is None else self._under_way[0]
        if step_under_way is not None:
            say(f"sweep after step {step} is skipped: the one after step {step_under_way} has not ended")
            return
        self._due_step = self.checkpoints.in_use = step

    def poll(self) -> None:
        """Logs a sweep that has ended, and begins the due sweep, without waiting."""
        if self._under_way is not None and self._under_way[1].done():
            self._collect()
        if self._due_step is not None and self._under_way is None and not self.checkpoints.is_writing(self._due_step):
            step, self._due_step = self._due_step, None
            try:
                self._under_way = step, self.sweeper.begin(step)
            except Exception as error:  # the sweeper may raise anything
                self._forget(f"sweep after step {step} is skipped: {self.sweeper.reason(error)}")

    def finish(self, last_step: int) -> None:
        """Waits for the current sweep, then sweeps the last step's checkpoint, which is complete, and waits again."""
        deadline = time.monotonic() + END_SECONDS
        self._wait(deadline)
        self.request(last_step)
        self._wait(deadline)

    def _wait(self, deadline: float) -> None:
        self.poll()
        if self._under_way is None:
            return
        step, sweep = self._under_way
        try:
            sweep.exception(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            self.sweeper.end()
            self._forget(f"sweep after step {step} is ended: the run waits for {END_SECONDS:.0f} s at most")
        self.poll()

    def _collect(self) -> None:
        assert self._under_way is not None
        step, sweep = self._under_way
        error = sweep.exception()
        if error is not None:
            self._forget(f"sweep after step {step} failed: {self.sweeper.reason(error)}; the run goes on")
            return
        values = sweep.result()
        self.log.amend(step, values)
        is_best = best_step(self.log.curve, self.checkpoints.keep_best) == step
        best = " (the best yet)" * (is_best and self.checkpoints.keep_best in values)
        accuracy, tpf = 100 * values["sweep_accuracy"], values["sweep_tpf"]
        self._forget(f"sweep after step {step}: accuracy {accuracy:.1f} %, TPF {tpf:.2f}{best}")

    def _forget(self, line: str) -> None:
        self._under_way, self.checkpoints.in_use = None, None
        say(line)
