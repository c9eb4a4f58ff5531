"""The report of the study of verified decoding, from its rows alone: settings chosen on `valid`, compared on `test`.

Shape legend: P problems; W weightings of problems, the first of which counts each once, the others draws; K points.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mbd_core.evaluation.measures.aup import aup_d3llm
from mbd_core.evaluation.measures.statistics import (
    Interval,
    bootstrap,
    mean_interval,
    p_text,
    percent_right,
    sign_test,
    wins_and_losses,
)
from mbd_core.tables import Cell
from research.tables import table_lines
from research.verified.settings import (
    BY_SLOTS,
    SUBJECTS,
    SettingFamily,
    Width,
    family_of,
    settings,
    width_of,
)

ROWS = {"valid": "valid.parquet", "test": "test.parquet"}
TURNS, REPORT = "turns.parquet", "study.md"
MARGIN = 1.0  # points of accuracy
FAMILIES: tuple[SettingFamily, ...] = ("threshold", "verified")
WIDTHS: tuple[Width, ...] = ("one slot", "several slots")
COUNTS = ("num_tokens", "num_forwards", "num_drafted_tokens", "num_confirmed_tokens", "num_positions")
PairVerdict = Literal["shown", "contradicted", "not shown"]
SettingKind = tuple[SettingFamily, Width]

RULES = f"""For each model, family and number of slots, a setting is chosen on the valid split. It is the fastest (all
tokens / all forwards) of the settings whose accuracy is at most {MARGIN:g} point below the best. Differences are of
the test split, paired by problem, with 95 % intervals over problems. A claim is shown if every interval lies above its
bound, and contradicted if an interval lies below it. The bound is 0, or -{MARGIN:g} point for an accuracy that must
not fall."""
TERMS = """TPF: useful tokens a forward, the mean over answers; a judgement is a forward. Judged: drafted tokens a
forward that judgements looked at. Confirmed: drafted tokens a forward that judgements accepted. Positions: all
positions that the forwards computed, with the copies of masks. Positions a token are the cost of a step that FLOPs
bound. Alone right: the number of problems that only the first setting answers, the number that only the second
answers, and the exact sign test."""


def read_rows(path: Path) -> pa.Table:
    """The rows that a stage wrote. Raises `ValueError` if the file holds none."""
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no {path.name}: run {path.stem} first") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} cannot be read as the rows of a stage: {str(error).splitlines()[0]}") from None
    if not {"model", "setting"} <= {*table.column_names}:
        raise ValueError(f"{path} holds no rows of a stage: its columns are {', '.join(table.column_names)}")
    return table


@dataclass(frozen=True, eq=False)
class SettingAnswers:
    """A setting's answers to the problems (P), in their order."""

    problems: tuple[str, ...]
    correct_P: np.ndarray
    tokens_P: np.ndarray
    forwards_P: np.ndarray
    judged_P: np.ndarray
    confirmed_P: np.ndarray
    positions_P: np.ndarray

    @property
    def accuracy(self) -> float:
        return 100.0 * float(self.correct_P.mean())

    @property
    def tpf(self) -> float:
        """All tokens / all forwards."""
        return float(self.tokens_P.sum() / self.forwards_P.sum())

    @property
    def tpf_P(self) -> np.ndarray:
        return self.tokens_P / self.forwards_P

    def a_forward(self, counts_P: np.ndarray) -> float:
        return float(counts_P.sum() / self.forwards_P.sum())


@dataclass(frozen=True)
class SplitAnswers:
    """The answers of a split by model and setting; every setting of a model has the same problems."""

    of: Mapping[str, Mapping[str, SettingAnswers]]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises `ValueError` if the file cannot be read, or if a model's settings are not whole."""
        table = read_rows(path)
        found: dict[str, dict[str, list[int]]] = {}
        for number, (model, name) in enumerate(
            zip(*(table[c].to_pylist() for c in ("model", "setting")), strict=True)
        ):
            found.setdefault(model, {}).setdefault(name, []).append(number)
        problems, correct = table["problem"].to_pylist(), table["correct"].to_numpy()
        columns = [table[name].to_numpy() for name in COUNTS]
        of = {
            model: {
                name: SettingAnswers(
                    tuple(problems[n] for n in at),
                    correct[at].astype(float),
                    *(column[at].astype(float) for column in columns),
                )
                for name, at in by_setting.items()
            }
            for model, by_setting in found.items()
        }
        for model, by_setting in of.items():
            if set(by_setting) != set(settings()) or len({cell.problems for cell in by_setting.values()}) > 1:
                raise ValueError(f"{path}: the settings of {model} are not whole; decode its sweep to the end")
        return cls({model: of[model] for model in SUBJECTS if model in of})


def valid_answers(out: Path, models: Sequence[str] = ()) -> SplitAnswers:
    """The answers by which settings are chosen. Raises `ValueError` if they lack one of `models`."""
    valid = SplitAnswers.read(out / ROWS["valid"])
    if lacking := [model for model in models if model not in valid.of]:
        raise ValueError(f"{out / ROWS['valid']} has no rows of {lacking[0]}: run valid --models {lacking[0]} first")
    return valid


def chosen_settings(valid: SplitAnswers, model: str) -> dict[SettingKind, str]:
    """The fastest setting of each family and number of slots that is at most `MARGIN` below its best accuracy."""
    chosen = {}
    for family in FAMILIES:
        for width in WIDTHS:
            cells = of_place(valid.of[model], family, width)
            least = max(cell.accuracy for cell in cells.values()) - MARGIN
            chosen[family, width] = max(
                (name for name, cell in cells.items() if cell.accuracy >= least - 1e-9),
                key=lambda name: (cells[name].tpf, cells[name].accuracy),
            )
    return chosen


def most_accurate(valid: SplitAnswers, model: str) -> dict[SettingFamily, str]:
    """The most accurate setting of each family; the fastest of equally accurate ones."""
    return {
        family: max(cells, key=lambda name: (cells[name].accuracy, cells[name].tpf))
        for family in FAMILIES
        for cells in [{n: c for n, c in valid.of[model].items() if family_of(n) == family}]
    }


def of_place(cells: Mapping[str, SettingAnswers], family: SettingFamily, width: Width) -> dict[str, SettingAnswers]:
    return {n: c for n, c in cells.items() if (family_of(n), width_of(n)) == (family, width)}


def report(out: Path) -> str:
    """The Markdown of the rows in a folder. Raises `ValueError` for rows that are missing."""
    test = SplitAnswers.read(out / ROWS["test"])
    valid = valid_answers(out, [*test.of])
    problems = ", ".join(f"{len(next(iter(cells.values())).problems)} of {model}" for model, cells in test.of.items())
    lines = ["# Do drafts that the same weights verify beat a tuned threshold?", "", f"Test problems: {problems}."]
    lines += ["", RULES, "", "## Claims", "", *claim_lines(valid, test), "", "## Chosen settings", ""]
    lines += [*chosen_lines(valid, test, _turns(out)), "", "## By slots", "", *slot_lines(test), ""]
    lines += ["## All settings on the test split", "", *cell_lines(test), "", TERMS, ""]
    return "\n".join(lines)


# -- claims ----------------------------------------------------------------------------------------------------------


def claim_lines(valid: SplitAnswers, test: SplitAnswers) -> list[str]:
    """Every claim for every model: the two settings, the differences, the verdict."""
    rows: list[list[Cell]] = []
    for model, cells in test.of.items():
        chosen, best = chosen_settings(valid, model), most_accurate(valid, model)
        for width in WIDTHS:
            pair = chosen["verified", width], chosen["threshold", width]
            speed, accuracy = _difference(cells, pair, lambda cell: cell.tpf_P), _accuracy(cells, pair)
            texts = [_signed(speed), f"{_signed(accuracy)}; {_alone_right(cells, pair)}"]
            claim = f"faster at equal accuracy, {width}"
            rows.append([model, claim, *pair, *texts, _verdict((speed, 0.0), (accuracy, -MARGIN))])
        pair = best["verified"], best["threshold"]
        accuracy = _accuracy(cells, pair)
        texts = [
            _signed(_difference(cells, pair, lambda cell: cell.tpf_P)),
            f"{_signed(accuracy)}; {_alone_right(cells, pair)}",
        ]
        rows.append([model, "more accurate than any threshold", *pair, *texts, _verdict((accuracy, 0.0))])
        for width in WIDTHS:
            area = _aup_difference(cells, width)
            rows.append(
                [model, f"a larger AUP, {width}", "all", "all", f"AUP {_signed(area, 'd')}", "", _verdict((area, 0.0))]
            )
        for rule, sizes in BY_SLOTS.items():
            for more, fewer in zip(sizes[1:], sizes, strict=False):
                pair = f"{rule} in {more}", f"{rule} in {fewer}"
                gain = _difference(cells, pair, lambda cell: cell.confirmed_P / cell.forwards_P)
                text = f"confirmed {_signed(gain)}"
                rows.append([model, "more slots confirm more a forward", *pair, text, "", _verdict((gain, 0.0))])
    heads = ["Model", "Claim", "Setting", "Against", "TPF [95 %]", "Accuracy [95 %]; alone right", "Verdict"]
    return table_lines(heads, rows)


def _difference(
    cells: Mapping[str, SettingAnswers], pair: Sequence[str], measure: Callable[[SettingAnswers], np.ndarray]
) -> Interval:
    first, second = (cells[name] for name in pair)
    return mean_interval(measure(first) - measure(second), first.problems)


def _accuracy(cells: Mapping[str, SettingAnswers], pair: Sequence[str]) -> Interval:
    return _difference(cells, pair, lambda cell: 100.0 * cell.correct_P)


def _alone_right(cells: Mapping[str, SettingAnswers], pair: Sequence[str]) -> str:
    first, second = (cells[name] for name in pair)
    wins, losses = wins_and_losses(zip(first.problems, (first.correct_P - second.correct_P).tolist(), strict=True))
    return f"{wins} and {losses}, p {p_text(sign_test(wins, losses), equals='= ')}"


def _aup_difference(cells: Mapping[str, SettingAnswers], width: Width) -> Interval:
    """d3LLM's AUP of the verified settings minus that of the thresholds; y_max is the best accuracy of all."""
    problems = len(next(iter(cells.values())).problems)
    blocks = bootstrap(np.zeros(problems, dtype=int), seed=0)
    weights_WP = np.concatenate([np.ones((1, problems)), *blocks])
    y_max_W = np.max([100.0 * weights_WP @ cell.correct_P / problems for cell in cells.values()], axis=0)
    areas = []
    for family in FAMILIES:
        points = [
            [weights_WP @ cell.tpf_P / problems, 100.0 * weights_WP @ cell.correct_P / problems]
            for cell in of_place(cells, family, width).values()
        ]
        areas.append(aup_d3llm(np.array(points), y_max=y_max_W))
    return Interval.of_weightings(areas[1] - areas[0])


def _verdict(*judged: tuple[Interval, float]) -> PairVerdict:
    if any(difference.is_below(bound) for difference, bound in judged):
        return "contradicted"
    return "shown" if all(difference.is_above(bound) for difference, bound in judged) else "not shown"


def _signed(interval: Interval, form: Literal["d", ".2f"] = ".2f") -> str:
    low, high = interval.bounds
    if form == "d":
        return f"{round(interval.value):+d} [{round(low):+d}, {round(high):+d}]"
    return f"{interval.value:+.2f} [{low:+.2f}, {high:+.2f}]"


# -- tables ----------------------------------------------------------------------------------------------------------


def chosen_lines(valid: SplitAnswers, test: SplitAnswers, turns: Mapping[tuple[str, str], float]) -> list[str]:
    """The chosen settings on both splits; tokens a second as a multiple of the threshold's with as many slots."""
    rows: list[list[Cell]] = []
    for model, cells in test.of.items():
        chosen = chosen_settings(valid, model)
        for width in WIDTHS:
            slowest = turns.get((model, chosen["threshold", width]))
            for family in FAMILIES:
                name = chosen[family, width]
                own, speed = cells[name], turns.get((model, name))
                before = valid.of[model][name]
                times = None if speed is None or slowest is None else f"{speed / slowest:.2f}"
                rows.append([model, name, f"{before.accuracy:.1f}, {before.tpf:.2f}", *_cells(own), times])
    return table_lines(["Model", "Setting", "valid: accuracy, TPF", *HEADS, "Tokens a second"], rows, num_text=2)


def slot_lines(test: SplitAnswers) -> list[str]:
    """The settings that verify every draft, by their number of slots: tokens judged and confirmed a forward."""
    rows: list[list[Cell]] = []
    for model, cells in test.of.items():
        for rule, sizes in BY_SLOTS.items():
            for slots in sizes:
                cell = cells[f"{rule} in {slots}"]
                judged, confirmed = cell.a_forward(cell.judged_P), cell.a_forward(cell.confirmed_P)
                share = f"{100 * confirmed / judged:.0f}"
                rows.append([model, f"{rule} in {slots}", *_cells(cell), f"{judged:.2f}", f"{confirmed:.2f}", share])
    return table_lines(["Model", "Setting", *HEADS, "Judged", "Confirmed", "Share (%)"], rows, num_text=2)


def cell_lines(test: SplitAnswers) -> list[str]:
    """Every setting of every model."""
    rows = [[model, name, *_cells(cells[name])] for model, cells in test.of.items() for name in settings()]
    return table_lines(["Model", "Setting", *HEADS], rows, num_text=2)


HEADS = ("Accuracy (%)", "TPF", "Positions a forward", "a token")


def _cells(cell: SettingAnswers) -> tuple[str, ...]:
    accuracy = percent_right([bool(right) for right in cell.correct_P])
    a_token = float(cell.positions_P.sum() / cell.tokens_P.sum())
    tpf, positions = float(cell.tpf_P.mean()), cell.a_forward(cell.positions_P)
    return (accuracy.text(".1f"), f"{tpf:.2f}", f"{positions:.1f}", f"{a_token:.1f}")


def _turns(out: Path) -> dict[tuple[str, str], float]:
    """Tokens a second by model and setting; empty where nothing was timed."""
    path = out / TURNS
    if not path.exists():
        return {}
    sums = read_rows(path).group_by(["model", "setting"]).aggregate([("tokens", "sum"), ("seconds", "sum")])
    return {(row["model"], row["setting"]): row["tokens_sum"] / row["seconds_sum"] for row in sums.to_pylist()}
