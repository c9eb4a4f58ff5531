"""The papers' tables with a sweep's own numbers beside the printed ones, where model, method and benchmark are equal.

Two models are equal if the folder has one of the names in `paper_figures.MODELS`. Two methods are equal if the
decoding configuration has all the fields that the paper gives for the row, whatever its name. Nothing is guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mbd_core.decoding.blocks.methods import MethodFields
from mbd_core.evaluation.measures.speed import MeasuredSpeed
from mbd_core.evaluation.measures.statistics import Z_95, Interval, mean, spread_of_mean
from mbd_core.evaluation.measures.summary import AupMean, AupRow, ReportKey, ReportRow
from mbd_core.evaluation.report.metrics import METRICS
from mbd_core.evaluation.report.paper_figures import MODELS, PAPER_TABLES, Figure, PaperRow, PaperTable
from mbd_core.tables import Cell, Table

PaperVerdict = Literal["inside", "outside", "not judged"]

NOTE = (
    "A printed figure is inside or outside the 95 % interval of ours: Wilson's for accuracies, the mean ± 1.96 "
    "standard errors for TPF, NFE and generated tokens. For an average, both are combined over the benchmarks as if "
    "these were independent. "
    "The papers give no intervals, so a figure just outside may still be the same. Speeds are of other machines, and "
    "the anchors and pools of the papers' AUP are not published: these are not judged. Our TPS and latency are those "
    "of requests alone (Batch-1 TPS, Table 3: Batch-1 decode TPS; latency: the median), our AUP is d3LLM's over all "
    "configurations of the model and method here, with its bootstrap interval; an average has the interval of the "
    "first table if that table has exactly the figure's tasks, else none."
)

NOT_PRINTED = "Not printed, because no row here has the model, the decoding and the benchmark of one of their rows:"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A printed figure, our number for it, our number's 95 % interval if it has one, and how they compare.

    n        our samples, over all benchmarks of the figure
    configs  our decoding configurations, by task
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
    def verdict(self) -> PaperVerdict:
        if self.quantity == "aup" or self.low is None or self.high is None:
            return "not judged"
        return "inside" if self.low <= self.printed <= self.high else "outside"


@dataclass(frozen=True, kw_only=True)
class BesideRow:
    """A row with at least one number of ours: every printed figure as text, and our numbers by column."""

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
    """The numbers of a sweep, to be compared with the papers' numbers."""

    rows: Sequence[ReportRow]
    aups: Sequence[AupRow]
    times: Mapping[ReportKey, MeasuredSpeed]
    aup_means: Sequence[AupMean]

    @classmethod
    def of(
        cls,
        rows: Sequence[ReportRow],
        aups: Sequence[AupRow],
        times: Sequence[MeasuredSpeed],
        aup_means: Sequence[AupMean] = (),
    ) -> "Own":
        return cls(rows, aups, {ReportKey(s.model, s.method, s.task, s.config): s for s in times}, aup_means)

    def aup_interval(self, rows: Sequence[ReportRow]) -> Interval | None:
        """The interval of the AUP over exactly the tasks of these rows; `None` if the sweep has no such AUP."""
        curves, tasks = {(row.key.model, row.key.method) for row in rows}, {row.key.task for row in rows}
        intervals = [((area.model, area.method), {area.task}, area.d3llm) for area in self.aups]
        intervals += [((area.model, area.method), set(area.tasks), area.d3llm) for area in self.aup_means]
        return next((interval for curve, names, interval in intervals if curves == {curve} and names == tasks), None)

    def row(self, figure: Figure, task: str, method: MethodFields) -> ReportRow | None:
        """The first row of the sweep with the figure's model, the task and the method."""
        names = MODELS[figure.model]
        return next(
            (
                row
                for row in self.rows
                if row.key.task == task and row.key.model in names and has_fields(row.config, method)
            ),
            None,
        )


def has_fields(config: Mapping[str, Any], fields: MethodFields) -> bool:
    """Whether a configuration has these values, nested ones included. Lists equal tuples, and a range equals each of
    its numbers."""
    for name, value in fields.items():
        setting = config.get(name)
        if isinstance(value, Mapping):
            if not isinstance(setting, Mapping) or not has_fields(setting, value):
                return False
        elif isinstance(value, range):
            if setting not in value:
                return False
        elif (list(setting) if isinstance(setting, list | tuple) else setting) != value:
            return False
    return True


def beside_tables(own: Own) -> list[BesideTable]:
    """The papers' tables with at least one row in this sweep."""
    tables = []
    for table in PAPER_TABLES:
        rows = [figures for row in table.rows if (figures := _beside_row(table, row, own)) is not None]
        if rows:
            tables.append(BesideTable(table=table, rows=rows))
    return tables


def _beside_row(table: PaperTable, row: PaperRow, own: Own) -> BesideRow | None:
    numbers = [
        None if figure is None else _own_number(head, figure, own)
        for head, figure in zip(table.heads, row.figures, strict=True)
    ]
    if not any(numbers):
        return None
    texts = ["-" if figure is None else figure.printed for figure in row.figures]
    model = next(figure.model for figure, number in zip(row.figures, numbers, strict=True) if figure and number)
    return BesideRow(group=row.group, name=row.name, model=model, printed=texts, ours=numbers)


def _own_number(head: str, figure: Figure, own: Own) -> Beside | None:
    """Our number for a figure; `None` if one of its benchmarks is missing, or was not timed."""
    choices = [own.row(figure, task, method) for task, method in zip(figure.tasks, figure.methods, strict=True)]
    rows = [row for row in choices if row is not None]
    values = [value for row in rows if (value := _value(figure, row, own)) is not None]
    if len(values) < len(figure.tasks):
        return None
    number = mean([value for value, _, _ in values])
    distances = [(value - low, high - value) for value, low, high in values if low is not None and high is not None]
    interval = own.aup_interval(rows) if figure.quantity == "aup" else None
    low, high = (None, None) if interval is None else (interval.low, interval.high)
    if len(distances) == len(values):
        half_below, half_above = map(spread_of_mean, zip(*distances, strict=True))
        low, high = number - half_below, number + half_above
    return Beside(
        head=head,
        quantity=figure.quantity,
        printed=float(figure.printed),
        ours=number,
        low=low,
        high=high,
        n=sum(row.summary.n for row in rows),
        configs={row.key.task: dict(row.config) for row in rows},
    )


def _value(figure: Figure, row: ReportRow, own: Own) -> tuple[float, float | None, float | None] | None:
    """Our number on one benchmark, with its interval if it has one."""
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
        aup = next((area for area in own.aups if (area.model, area.method, area.task) == key), None)
        return (
            None if aup is None else (aup.d3llm.value, None, None)
        )  # intervals of AUPs do not add: `Own.aup_interval`
    speed = own.times.get(row.key)
    number = None if speed is None else METRICS[quantity].of(speed)
    return None if number is None else (number, None, None)


# -- as tables and JSON ---------------------------------------------------------------------------------------------


def paper_section(comparisons: Sequence[BesideTable], *, recipe: str) -> list[Table]:
    """The section of the report: the tables, and what a sweep needs for the missing tables."""
    tables = [Table(title="Beside the papers", lead=[f"Asked here: {recipe}. {NOTE}"] if comparisons else [])]
    for compared in comparisons:
        verdicts = [
            number.verdict for row in compared.rows for number in row.ours if number and number.verdict != "not judged"
        ]
        verdict_text = f"{verdicts.count('inside')} of {len(verdicts)} printed figures are inside our 95 % intervals"
        verdict_text = verdict_text if verdicts else "no figure here is judged"
        recipes = " or ".join(compared.table.recipes)
        heads = compared.table.heads
        rows: list[Sequence[Cell]] = []
        for group in dict.fromkeys(row.group for row in compared.rows):
            rows.append([group])
            rows += [cells for row in compared.rows if row.group == group for cells in _row_cells(row)]
        tables.append(
            Table(
                title=compared.table.title,
                level=3,
                lead=(f"Asked there as by --recipe {recipes}; {verdict_text}.",),
                columns=("Row", "Of", *heads),
                numeric=range(2, 2 + len(heads)),
                rows=rows,
            )
        )
    absent_tables = [table for table in PAPER_TABLES if all(compared.table is not table for compared in comparisons)]
    if absent_tables:
        tables.append(Table(lead=(NOT_PRINTED, [recipes_needed(table) for table in absent_tables]), folded=True))
    return tables


def _row_cells(row: BesideRow) -> list[list[str | None]]:
    """The printed figures, ours below them, and the differences."""
    numbers = [None if number is None else _number_text(number) for number in row.ours]
    differences = [
        None if number is None else f"{number.ours - number.printed:+.2f}, {number.verdict}" for number in row.ours
    ]
    return [
        [row.name, "the paper", *row.printed],
        [row.name, "ours", *numbers],
        [row.name, "difference", *differences],
    ]


def _number_text(number: Beside) -> str:
    interval = "" if number.low is None or number.high is None else f" [{number.low:.2f}, {number.high:.2f}]"
    return f"{number.ours:.2f}{interval}"


def recipes_needed(table: PaperTable) -> str:
    """The models and tasks of a table's rows, in words."""
    figures = table.figures()
    models = dict.fromkeys(name for figure in figures for name in MODELS[figure.model])
    tasks = dict.fromkeys(task for figure in figures for task in figure.tasks)
    return f"{table.title}: a model folder named {' or '.join(models)}, decoded as in its rows, on {', '.join(tasks)}"


def paper_content(tables: Sequence[BesideTable]) -> list[dict[str, Any]]:
    """The figures that have our numbers beside them, for `report.json`."""
    return [
        {
            "table": table.table.title,
            "group": row.group,
            "row": row.name,
            "model": row.model,
            **asdict(number),
            "difference": number.ours - number.printed,
            "verdict": number.verdict,
        }
        for table in tables
        for row in table.rows
        for number in row.ours
        if number is not None
    ]
