"""A report as one HTML page that needs nothing but itself: tables, accuracy over TPF, and samples with their decoding.

Which samples are wrong is read of all rows; prompts, texts and decodings only of the parts that hold a chosen one. So
neither the page nor the memory that it takes grows with the sweep.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow.parquet as pq
from jinja2 import Environment
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mbd_core.batch.rows import COUNTS, REPLAY
from mbd_core.decoding.blocks.methods import SpeedPoint, pareto_points
from mbd_core.evaluation.measures.summary import ReportKey, ReportRow
from mbd_core.evaluation.report.metrics import ACCURACY, NFE, TPF
from mbd_core.evaluation.report.tables import SETTINGS
from mbd_core.evaluation.sweep.folder import part_files, read_record
from mbd_core.tables import Table, anchor, cell_text, script_json

# The samples that a report's page shows: a bounded choice, the same for the same rows, made without reading the rest.

MOST_EACH = 20  # samples of one configuration on one task
MOST_SAMPLES = 2000
MOST_BYTES = 16 * 2**20  # of all of them as JSON, prompts included
LONGEST_REFERENCE = 2000  # characters; the tests of a program are long

SUBJECT = ("model", "method", "task", "config", "problem_id", "seed", "sample", "correct")
GRADE = ("finish_reason", "error", "correct", "reason", "detail", "strict", "flexible")
FLAGS = ("strict_correct", "flexible_correct", "base_correct", "plus_correct")
ANSWER = ("text", *GRADE, *FLAGS, *COUNTS, "seconds", *(f.name for f in REPLAY))
SHOWN = ("sample", "problem_id", "seed", "draw", "reference", *ANSWER)


@dataclass(frozen=True)
class SamplePlace:
    """Where a sample lies: wrong ones come first, then the order of the plans and of each plan's samples."""

    correct: bool
    plan: int
    sample: int
    path: Path = field(compare=False)
    index: int = field(compare=False)

    @property
    def rank(self) -> tuple[bool, int, int]:
        return self.correct, self.plan, self.sample


@dataclass(frozen=True, kw_only=True)
class ShownSamples:
    """What is shown of each configuration, as JSON texts, and how it was chosen.

    samples  JSON objects by configuration, in the order of `SamplePlace.rank`; `prompt` is an index into `prompts`
    prompts  JSON texts: what the model was given
    each     of each configuration on each task, at most so many
    left_out chosen samples for which the page had no room
    """

    samples: Mapping[ReportKey, Sequence[str]]
    prompts: Sequence[str]
    total: int
    each: int
    left_out: int

    @property
    def note(self) -> str:
        """How many of how many are shown, and which."""
        count = sum(map(len, self.samples.values()))
        if count == self.total:
            return f"All {self.total:,} samples are here."
        room = f" {self.left_out:,} more were chosen, for which the page had no room." if self.left_out else ""
        return (
            f"{count:,} of {self.total:,} samples are here: of each configuration on each task at most {self.each}, "
            f"wrong ones first, then right ones, both in the order of the plan.{room} All of them lie in samples/."
        )


def choose_samples(folders: Sequence[Path], *, most_bytes: int = MOST_BYTES) -> ShownSamples:
    """The samples to show of sweeps whose rows can be joined (`load_samples`)."""
    places = _places(folders)
    each = max(1, min(MOST_EACH, MOST_SAMPLES // max(1, len(places))))
    chosen = {key: sorted(of_key, key=lambda place: place.rank)[:each] for key, of_key in places.items()}
    texts = _texts([place for of_key in chosen.values() for place in of_key])
    prompts: dict[str, int] = {}
    samples: dict[ReportKey, list[str]] = {key: [] for key in chosen}
    room, left_out = most_bytes, 0
    for number in range(each):  # the first of every configuration, then the second: all have their share of the room
        for key, of_key in chosen.items():
            if number >= len(of_key):
                continue
            prompt, sample = texts[of_key[number].path, of_key[number].index]
            size = len(sample) + (0 if prompt in prompts else len(prompt))
            if size > room:
                left_out += 1
                continue
            room -= size
            index = prompts.setdefault(prompt, len(prompts))
            samples[key].append(f'{{"prompt":{index},{sample[1:]}')
    total = sum(map(len, places.values()))
    return ShownSamples(samples=samples, prompts=list(prompts), total=total, each=each, left_out=left_out)


def _places(folders: Sequence[Path]) -> dict[ReportKey, list[SamplePlace]]:
    """Where every sample lies, by its configuration; one that several folders hold, in the first of them."""
    places: dict[ReportKey, list[SamplePlace]] = {}
    plans: list[Any] = []
    keys_so_far: set[tuple[Any, ...]] = set()  # of the configuration's number, for a key is slow to hash
    numbers: dict[tuple[str, ...], int] = {}
    for folder in folders:
        record = read_record(folder)
        if record.plan not in plans:
            plans.append(record.plan)
        plan = plans.index(record.plan)
        for key in record.subjects():
            numbers.setdefault(astuple(key), len(numbers))
            places.setdefault(key, [])
        by_number = list(places.values())
        for path in part_files(folder):
            names = [*SUBJECT, *(["draw"] if "draw" in pq.read_schema(path).names else [])]
            table = pq.read_table(path, columns=names)
            columns = zip(*(table[name].to_pylist() for name in names), strict=True)
            for index, (model, method, task, config, problem, seed, sample, correct, *draw) in enumerate(columns):
                number = numbers[model, method, task, config]
                if (number, problem, seed, *draw) not in keys_so_far:
                    keys_so_far.add((number, problem, seed, *draw))
                    by_number[number].append(SamplePlace(bool(correct), plan, sample, path, index))
    return {key: of_key for key, of_key in places.items() if of_key}


def _texts(places: Sequence[SamplePlace]) -> dict[tuple[Path, int], tuple[str, str]]:
    """The prompt and the sample at each place, as JSON."""
    by_path: dict[Path, list[int]] = {}
    for place in places:
        by_path.setdefault(place.path, []).append(place.index)
    return {
        (path, index): (script_json(_prompt(row)), script_json(_sample_fields(row)))
        for path, indices in by_path.items()
        for index, row in zip(indices, _rows(path, indices), strict=True)
    }


def _rows(path: Path, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of a part; what an earlier version did not write is `None`."""
    file = pq.ParquetFile(path)
    names = (*SHOWN, "prompt", "input")
    table = file.read(columns=[name for name in names if name in file.schema_arrow.names])
    for row in table.take(indices).to_pylist():
        yield {name: row.get(name) for name in names}


def _prompt(row: Mapping[str, Any]) -> Any:
    """The messages or the text that the model was given; the problem alone where a row has no input."""
    return row["prompt"] if row["input"] is None else json.loads(row["input"])


def _sample_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: row[name] for name in SHOWN if row[name] is not None}
    reference = str(row["reference"] or "")
    if len(reference) > LONGEST_REFERENCE:
        cut = f"{reference[:LONGEST_REFERENCE]} ... ({len(reference):,} characters)"
        return {**fields, "reference": cut}
    return fields


# The page is `page.html`, a Jinja template. It opens from file:// and loads nothing. Texts are escaped, or reach it as
# JSON and become text nodes, so that nothing of a prompt or an answer is markup.

TEMPLATE = Path(__file__).with_name("page.html")
LONG = 48  # characters of a cell for which its column is wide


def render_page(
    tables: Sequence[Table],
    rows: Sequence[ReportRow],
    shown: ShownSamples,
    *,
    labels: Mapping[str, str],
    settings: Mapping[str, Any],
) -> bytes:
    """The page. `labels` maps task names to their heads."""
    models = list(dict.fromkeys(row.key.model for row in rows))
    front = {key for task in labels for key in front_of([row for row in rows if row.key.task == task])}
    data = {
        "configurations": [_configuration(row, labels[row.key.task], on_front=row.key in front) for row in rows],
        "tasks": list(labels.values()),
        "axes": {metric.field: metric.axis for metric in (ACCURACY, TPF, NFE)},
    }
    samples = ",".join(f"[{','.join(shown.samples.get(row.key, ()))}]" for row in rows)
    body = script_json(data).removesuffix("}") + f',"prompts":[{",".join(shown.prompts)}],"samples":[{samples}]}}'
    first, *others = _sections([table for table in tables if table.title != SETTINGS])
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "anchor": anchor,
        "cell_text": cell_text,
        "cell_parts": lambda cell: re.split(r" (?=\[)", cell_text(cell)),
        "column_class": _column_class,
    }
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=f"Evaluation sweep: {', '.join(models)} on {', '.join(labels.values())}",
        sections=[first, *others],
        contents=[
            ("results", "Results"),
            ("curves", "Accuracy over tokens per forward"),
            *((section[0].anchor, section[0].title) for section in others),
            ("samples", "Samples"),
            ("settings", SETTINGS),
        ],
        settings=settings,
        note=shown.note,
        data=body,
    )
    return page.encode()


def _sections(tables: Sequence[Table]) -> list[list[Table]]:
    """The tables by the headings of the first two levels."""
    sections: list[list[Table]] = []
    for table in tables:
        if table.title and table.level <= 2:
            sections.append([])
        sections[-1].append(table)
    return sections


def _column_class(table: Table, column: int) -> str:
    if column in table.numeric:
        return "number"
    is_long = any(len(cell_text(row[column])) > LONG for row in table.rows if not table.is_group(row))
    return "long" if is_long else ""


def front_of(rows: Sequence[ReportRow]) -> list[ReportKey]:
    """The rows of one task that no other row beats in accuracy or TPF without losing in the other; none of an endpoint
    that does not say its forwards."""
    points = (
        SpeedPoint(decoding={"row": number}, accuracy=row.summary.accuracy, tpf=row.summary.tpf)
        for number, row in enumerate(rows)
        if row.summary.tpf is not None
    )
    return [rows[point.decoding["row"]].key for point in pareto_points(points)]


def _configuration(row: ReportRow, label: str, *, on_front: bool) -> dict[str, Any]:
    """A point of a curve, and the head of its samples."""
    s = row.summary
    return {
        **{name: getattr(row.key, name) for name in ("model", "method", "config")},
        "task": label,
        "varied": row.varied,
        "front": on_front,
        **{name: getattr(s, name) for name in ("n", "tpf", "tpf_stderr", "nfe", "cut", "errors")},
        **{name: getattr(s, name) for name in ("accuracy", "accuracy_low", "accuracy_high")},
    }


# The accuracy-TPF plot: one panel for each task, one curve for each model and method, with error bars.
#
# An endpoint that does not say its forwards is a line at its accuracy.
# The bars are 95 % Wilson intervals of the accuracy and standard errors of the TPF.


def draw_plot(rows: Sequence[ReportRow], path: Path | BinaryIO, *, labels: Mapping[str, str]) -> None:
    """Write the plot as PNG; `labels` maps task names to panel titles, in panel order."""
    figure = Figure(figsize=(5.0 * len(labels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(labels), squeeze=False)[0]
    curves = list(dict.fromkeys((row.key.model, row.key.method) for row in rows))
    for panel, (task, label) in zip(panels, labels.items(), strict=True):
        for number, (model, method) in enumerate(curves):
            summaries = [r.summary for r in rows if (r.key.model, r.key.method, r.key.task) == (model, method, task)]
            points = [(s.tpf, s.tpf_stderr or 0.0, s) for s in summaries if s.tpf is not None]
            for s in summaries:
                if s.tpf is None:
                    panel.axhline(s.accuracy, color=f"C{number % 10}", linestyle=":", label=f"{model} (no TPF)")
            if not points:
                continue
            points.sort(key=lambda point: point[0])
            curve = [s for _, _, s in points]
            panel.errorbar(
                [tpf for tpf, _, _ in points],
                [s.accuracy for s in curve],
                xerr=[stderr for _, stderr, _ in points],
                yerr=[[s.accuracy - s.accuracy_low for s in curve], [s.accuracy_high - s.accuracy for s in curve]],
                marker="osD^vP*X"[number % 8],
                color=f"C{number % 10}",
                capsize=2,
                linewidth=1.2,
                label=f"{model}, {method}",
            )
        panel.set_title(f"{label} (n={next(r.summary.n for r in rows if r.key.task == task)})")
        panel.set_xlabel(TPF.axis)
        panel.set_ylabel(ACCURACY.axis)
        low, high = panel.get_ylim()
        panel.set_ylim(max(low, -2.0), min(max(high, 5.0), 102.0))
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    figure.savefig(path, format="png", dpi=130)
