"""The papers' tables with a sweep's own numbers beside the printed ones, where model, method and benchmark are equal.

The model is the same if its folder has one of the names that `paper_figures.MODELS` lists, the method if the decoding
configuration has all the fields that the paper gives for the row, whatever it is called. Nothing is guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mbd_core.decoding.blocks.methods import Fields
from mbd_core.evaluation.measures.statistics import Z_95, Interval, mean, spread_of_mean
from mbd_core.evaluation.measures.summary import AupMean, AupRow, ReportKey, ReportRow
from mbd_core.evaluation.report.metrics import METRICS
from mbd_core.evaluation.report.paper_figures import MODELS, PAPER_TABLES, Figure, PaperRow, PaperTable
from mbd_core.evaluation.sweep.timed_runs import Speed
from mbd_core.tables import Cell, Table

Verdict = Literal["inside", "outside", "not judged"]

NOTE = (
    "A printed figure is inside or outside the 95 % interval of ours: Wilson's for accuracies, the mean ± 1.96 "
    "standard errors for TPF, NFE and generated tokens, both combined over benchmarks, as of independent "
    "ones, where the figure is an average. "
    "The papers give no intervals, so a figure just outside may still be the same. Speeds are of other machines, and "
    "the anchors and pools of the papers' AUP are not published: these are not judged. Our TPS and latency are those "
    "of requests alone (Batch-1 TPS, Table 3: Batch-1 decode TPS; latency: the median), our AUP is d3LLM's over all "
    "configurations of the model and method here, with its bootstrap interval; an average has that of the "
    "first table, if the tasks there are just the figure's, and else none."
)

NOT_PRINTED = "Not printed, because no row here has the model, the decoding and the benchmark of one of theirs:"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A printed figure, our number for it and its 95 % interval (`None` where it has none), and how they compare.

    n        samples of ours, over all benchmarks of the figure
    configs  the decoding configurations of ours, by task
    """

    head: str
    quantity: str
    printed: float
    ours: float
    low: float | None
    high: float | None
    n: int
    configs: Mapping[str, Any]

    @property
    def verdict(self) -> Verdict:
        if self.quantity == "aup" or self.low is None or self.high is None:
            return "not judged"
        return "inside" if self.low <= self.printed <= self.high else "outside"


@dataclass(frozen=True, kw_only=True)
class BesideRow:
    """A row with at least one number of ours: every printed figure as text, and ours by column."""

    group: str
    name: str
    model: str
    printed: Sequence[str]
    ours: Sequence[Beside | None]


@dataclass(frozen=True, kw_only=True)
class BesideTable:
    table: PaperTable
    rows: Sequence[BesideRow]


@dataclass(frozen=True)
class Own:
    """A sweep's numbers."""

    rows: Sequence[ReportRow]
    aups: Sequence[AupRow]
    times: Mapping[ReportKey, Speed]
    aup_means: Sequence[AupMean]

    @classmethod
    def of(
        cls,
        rows: Sequence[ReportRow],
        aups: Sequence[AupRow],
        times: Sequence[Speed],
        aup_means: Sequence[AupMean] = (),
    ) -> "Own":
        return cls(rows, aups, {ReportKey(s.model, s.method, s.task, s.config): s for s in times}, aup_means)

    def aup_interval(self, rows: Sequence[ReportRow]) -> Interval | None:
        """The AUP over the tasks of these rows; `None` if none was drawn over just these."""
        curves, tasks = {(row.key.model, row.key.method) for row in rows}, {row.key.task for row in rows}
        drawn = [((one.model, one.method), {one.task}, one.d3llm) for one in self.aups]
        drawn += [((one.model, one.method), set(one.tasks), one.d3llm) for one in self.aup_means]
        return next((found for curve, over, found in drawn if curves == {curve} and over == tasks), None)

    def row(self, figure: Figure, task: str, method: Fields) -> ReportRow | None:
        """The first row of the sweep that is the figure's on a task."""
        names = MODELS[figure.model]
        return next(
            (
                row
                for row in self.rows
                if row.key.task == task and row.key.model in names and has_fields(row.config, method)
            ),
            None,
        )


def has_fields(config: Mapping[str, Any], fields: Fields) -> bool:
    """Whether a configuration has these values, those of its parts among them; lists and tuples are alike, and a range
    stands for one of its numbers."""
    for name, wanted in fields.items():
        found = config.get(name)
        if isinstance(wanted, Mapping):
            if not isinstance(found, Mapping) or not has_fields(found, wanted):
                return False
        elif isinstance(wanted, range):
            if found not in wanted:
                return False
        elif (list(found) if isinstance(found, list | tuple) else found) != wanted:
            return False
    return True


def beside_tables(own: Own) -> list[BesideTable]:
    """The tables of which a row is here."""
    tables = []
    for table in PAPER_TABLES:
        rows = [found for row in table.rows if (found := _beside_row(table, row, own)) is not None]
        if rows:
            tables.append(BesideTable(table=table, rows=rows))
    return tables


def _beside_row(table: PaperTable, row: PaperRow, own: Own) -> BesideRow | None:
    ours = [
        None if figure is None else _beside(head, figure, own)
        for head, figure in zip(table.heads, row.figures, strict=True)
    ]
    if not any(ours):
        return None
    printed = ["-" if figure is None else figure.printed for figure in row.figures]
    model = next(figure.model for figure, found in zip(row.figures, ours, strict=True) if figure and found)
    return BesideRow(group=row.group, name=row.name, model=model, printed=printed, ours=ours)


def _beside(head: str, figure: Figure, own: Own) -> Beside | None:
    """Our number for a figure; `None` if one of its benchmarks is missing, or was not timed."""
    rows = [own.row(figure, task, method) for task, method in zip(figure.tasks, figure.methods, strict=True)]
    found = [row for row in rows if row is not None]
    values = [value for row in found if (value := _value(figure, row, own)) is not None]
    if len(values) < len(figure.tasks):
        return None
    ours = mean([value for value, _, _ in values])
    distances = [(value - low, high - value) for value, low, high in values if low is not None and high is not None]
    drawn = own.aup_interval(found) if figure.quantity == "aup" else None
    low, high = (None, None) if drawn is None else (drawn.low, drawn.high)
    if len(distances) == len(values):
        below, above = map(spread_of_mean, zip(*distances, strict=True))
        low, high = ours - below, ours + above
    return Beside(
        head=head,
        quantity=figure.quantity,
        printed=float(figure.printed),
        ours=ours,
        low=low,
        high=high,
        n=sum(row.summary.n for row in found),
        configs={row.key.task: dict(row.config) for row in found},
    )


def _value(figure: Figure, row: ReportRow, own: Own) -> tuple[float, float | None, float | None] | None:
    """Our number on one benchmark, with its interval where it has one."""
    s, quantity = row.summary, figure.quantity
    if quantity == "accuracy":
        return s.accuracy, s.accuracy_low, s.accuracy_high
    if quantity in ("tpf", "nfe", "tokens"):
        value = METRICS[quantity].of(s)
        if value is None:
            return None
        error = Z_95 * getattr(s, f"{quantity}_stderr")
        return value, value - error, value + error
    if quantity == "aup":
        key = (row.key.model, row.key.method, row.key.task)
        aup = next((one for one in own.aups if (one.model, one.method, one.task) == key), None)
        return None if aup is None else (aup.d3llm.value, None, None)  # its interval is no sum: `Own.aup_interval`
    speed = own.times.get(row.key)
    measured = None if speed is None else METRICS[quantity].of(speed)
    return None if measured is None else (measured, None, None)


# -- as tables and JSON ---------------------------------------------------------------------------------------------


def paper_section(besides: Sequence[BesideTable], *, recipe: str) -> list[Table]:
    """The section of the report: the tables, and what those that are missing need."""
    tables = [Table(title="Beside the papers", lead=[f"Asked here: {recipe}. {NOTE}"] if besides else [])]
    for beside in besides:
        judged = [one.verdict for row in beside.rows for one in row.ours if one and one.verdict != "not judged"]
        inside = f"{judged.count('inside')} of {len(judged)} printed figures are inside our 95 % intervals"
        inside = inside if judged else "no figure here is judged"
        asked = " or ".join(beside.table.recipes)
        heads = beside.table.heads
        rows: list[Sequence[Cell]] = []
        for group in dict.fromkeys(row.group for row in beside.rows):
            rows.append([group])
            rows += [cells for row in beside.rows if row.group == group for cells in _row_cells(row)]
        tables.append(
            Table(
                title=beside.table.title,
                level=3,
                lead=(f"Asked there as by --recipe {asked}; {inside}.",),
                columns=("Row", "Of", *heads),
                numeric=range(2, 2 + len(heads)),
                rows=rows,
            )
        )
    missing = [table for table in PAPER_TABLES if all(beside.table is not table for beside in besides)]
    if missing:
        tables.append(Table(lead=(NOT_PRINTED, [needed(table) for table in missing]), folded=True))
    return tables


def _row_cells(row: BesideRow) -> list[list[str | None]]:
    """The printed figures, ours below them, and the differences."""
    ours = [None if one is None else _number_text(one) for one in row.ours]
    differences = [None if one is None else f"{one.ours - one.printed:+.2f}, {one.verdict}" for one in row.ours]
    return [[row.name, "the paper", *row.printed], [row.name, "ours", *ours], [row.name, "difference", *differences]]


def _number_text(one: Beside) -> str:
    interval = "" if one.low is None or one.high is None else f" [{one.low:.2f}, {one.high:.2f}]"
    return f"{one.ours:.2f}{interval}"


def needed(table: PaperTable) -> str:
    """Which models on which tasks a table has rows of, in words."""
    figures = table.figures()
    models = dict.fromkeys(name for figure in figures for name in MODELS[figure.model])
    tasks = dict.fromkeys(task for figure in figures for task in figure.tasks)
    return f"{table.title}: a model folder named {' or '.join(models)}, decoded as in its rows, on {', '.join(tasks)}"


def paper_content(tables: Sequence[BesideTable]) -> list[dict[str, Any]]:
    """The figures that have ours beside them, for `report.json`."""
    return [
        {
            "table": found.table.title,
            "group": row.group,
            "row": row.name,
            "model": row.model,
            **asdict(one),
            "difference": one.ours - one.printed,
            "verdict": one.verdict,
        }
        for found in tables
        for row in found.rows
        for one in row.ours
        if one is not None
    ]
