"""How far a sweep is: for each model and task the problems that all its configurations have done, and the time left.

All configurations of a problem are in one part, so that they are equally far.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from mbd_core.evaluation.sweep_parts import Part, Row

SECONDS = 30.0  # between two reports

Subject = tuple[str, str]  # model, task


class SweepProgress:
    """Counts the rows of `parts`, of which those with the numbers `missing` are to come from `num_engines` engines.

    The rate is that of the rows after each engine's first part: engines start together, and the first parts come
    together, after the time that it takes to start them.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        missing: Collection[int],
        *,
        num_engines: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts, self._clock = {part.number: part for part in parts}, clock
        self._planned, self._left = Counter[Subject](), Counter[Subject]()
        self._configurations: dict[Subject, set[tuple[str, str]]] = {}
        for part in parts:
            rows = Counter(map(_subject, part.rows))
            self._planned += rows
            if part.number in missing:
                self._left += rows
            for row in part.rows:
                self._configurations.setdefault(_subject(row), set()).add((row["method"], row["config"]))
        self._said = self._begun = clock()
        self._num_first = num_engines  # parts until the rate begins
        self._num_done = 0  # rows since then

    def done(self, number: int) -> list[str]:
        """Count a part that has come; the lines to show: of a task that a model has ended, or of all after a while."""
        rows = Counter(map(_subject, self._parts[number].rows))
        self._left -= rows
        ended = [subject for subject in rows if not self._left[subject]]
        now = self._clock()
        if self._num_first:
            self._num_first -= 1
            self._begun = now
        else:
            self._num_done += rows.total()
        if now - self._said < SECONDS:
            return [self._line(subject) for subject in ended]
        self._said = now
        return [self._line(subject) for subject in self._planned if self._left[subject] or subject in ended]

    def _line(self, subject: Subject) -> str:
        model, task = subject
        configurations = len(self._configurations[subject])
        num_problems, left = self._planned[subject] // configurations, self._left[subject] // configurations
        text = f"{model} on {task}: {num_problems - left} of {num_problems} problems"
        text += f" by each of {configurations} configurations"
        return text + (f", about {_duration(self._seconds_left(model))} left" if left and self._num_done else "")

    def _seconds_left(self, model: str) -> float:
        """Until the model has ended: models are decoded in their order."""
        models = list(dict.fromkeys(name for name, _ in self._planned))
        before = models[: models.index(model) + 1]
        rows = sum(left for (name, _), left in self._left.items() if name in before)
        return rows * (self._clock() - self._begun) / self._num_done


def _subject(row: Row) -> Subject:
    return (row["model"], row["task"])


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
