"""A report on BlockBatch's analyses: report.json with all numbers, report.md, and the plots."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mbd_core.files import write_json, write_text
from research.block_batch.caches import CacheRecord
from research.block_batch.outputs import (
    BoundCheck,
    BranchStudy,
    MeanRun,
    Oracle,
    StudiedPrompt,
    bifurcation_lengths,
    bifurcation_matrix,
    checks_of,
    mean_consensus,
    oracle_of,
)
from research.block_batch.plots import draw_bifurcations, draw_consensus, draw_forwards, draw_shares, draw_trajectories
from research.tables import table_lines

RUN_LABELS = {"single": "one block length", "block_batch": "BlockBatch"}


def write_branch_report(study: BranchStudy, folder: Path, *, draw: int, settings: Mapping[str, object]) -> str:
    """Write PNG files (of the first `draw` prompts), report.md and report.json into `folder`; returns the Markdown."""
    oracle, checks = oracle_of(study.prompts), checks_of(study.prompts, rounding=study.rounding)
    plots = _draw(study, oracle, folder, draw=draw)
    text = render_markdown(study, oracle, checks, plots=plots, settings=settings)
    write_text(folder / "report.md", text)
    write_json(folder / "report.json", {"settings": dict(settings), **_content(study, oracle, checks, plots)})
    return text


def method_means(study: BranchStudy, oracle: Oracle) -> dict[str, MeanRun]:
    """Mean forwards and accuracy of every method, in the order of the report."""
    block_batch = [s.block_batch for s in study.prompts]
    return {
        **{f"B = {n}": oracle.fixed[n] for n in study.block_lengths},
        "BlockBatch": MeanRun(
            accuracy=float(np.mean([r.accuracy or 0.0 for r in block_batch])),
            num_forwards=float(np.mean([r.num_forwards for r in block_batch])),
        ),
        "oracle": oracle.oracle,
    }


def _draw(study: BranchStudy, oracle: Oracle, folder: Path, *, draw: int) -> list[str]:
    lengths, outputs = study.block_lengths, [s.outputs for s in study.prompts]
    names = ["forwards.png", "bifurcation.png"]
    draw_forwards(method_means(study, oracle), folder / names[0], graded=study.graded)
    draw_bifurcations(bifurcation_matrix(outputs), lengths, folder / names[1])
    if any(tokens for tokens_by_method in outputs for tokens in tokens_by_method.values()):
        names.append("consensus.png")
        draw_shares(mean_consensus(outputs), lengths, folder / names[-1], title=f"mean over {len(outputs)} prompts")
    for number, sample in enumerate(study.prompts[:draw]):
        if any(sample.outputs.values()):
            names.append(f"consensus_{number}.png")
            draw_consensus(sample.outputs, folder / names[-1])
        if sample.caches is not None:
            names.append(f"trajectory_{number}.png")
            draw_trajectories(sample.caches, lengths, folder / names[-1], title=f"prompt {sample.name}")
    return names


def render_markdown(
    study: BranchStudy,
    oracle: Oracle,
    checks: Sequence[BoundCheck],
    *,
    plots: Sequence[str],
    settings: Mapping[str, object],
) -> str:
    """The tables of the analyses, the plots, and the definitions."""
    lines = ["# Block lengths side by side", "", "## Forwards", ""]
    methods: list[list[str]] = []
    for name, point in method_means(study, oracle).items():
        n = int(name.removeprefix("B = ")) if name.startswith("B = ") else None
        accuracy = f"{100 * point.accuracy:.1f} %" if study.graded else "not graded"
        choice = f"{oracle.chosen[n]}" if n is not None else ""
        methods.append([name, accuracy, f"{point.num_forwards:.2f}", choice])
    if study.graded:
        mixed = [f"{100 * oracle.mixed.accuracy:.1f} %", f"{oracle.mixed.num_forwards:.2f}", ""]
        methods.append(["oracle, as released (best accuracy and least NFE apart)", *mixed])
    lines += table_lines(["method", "accuracy", "NFE", "chosen by the oracle"], methods)
    lines += ["", ORACLE_GRADED if study.graded else ORACLE_UNGRADED]
    lines += ["", "## Bifurcation lengths (model tokens)", ""]
    matrix = zip(study.block_lengths, bifurcation_matrix([s.outputs for s in study.prompts]), strict=True)
    lengths = [[n, *(f"{value:.1f}" for value in row)] for n, row in matrix]
    lines += table_lines(["", *map(str, study.block_lengths)], lengths)
    lines += ["", *_branch_table(study)]
    records = [s.caches for s in study.prompts if s.caches is not None]
    if records:
        lines += ["", *_cache_tables(records), "", *_check_table(checks)]
    lines += ["", *(f"![{Path(p).stem.replace('_', ' ')}]({p})" for p in plots), "", NOTES]
    lines += [f"- {name}: {value}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


ORACLE_GRADED = "The oracle takes, for every prompt, the most accurate block length (the cheapest of several)."
ORACLE_UNGRADED = "No answer could be graded, so accuracies are unknown and the oracle takes each prompt's least NFE."
NOTES = """Single runs use Fast-dLLM's dual cache: a full forward at the start of a block, then the block alone. NFE
counts forwards; BlockBatch's packed forward of all branches is one. A bifurcation length is the number of tokens
before two outputs first differ; on the diagonal, the mean length of an output. The consensus maps show the share of
the block lengths that have the same token at a position.

Caches are sketched (a seeded random projection). The anchor is the first forward's cache; z is the component along it,
and x and y are the leading directions of the residuals' SVD in its tangent plane. D_t, Γ and the quantities of Props.
1 and 2 are measured on the caches themselves, Prop. 3 on the sketches. E is the distance of a cache from that of a
full forward on the same tokens. Prop. 1's positions are the response's whole blocks.
"""


def _branch_table(study: BranchStudy) -> list[str]:
    """The counts of BlockBatch's branches, as means over the prompts."""
    rows = []
    for number, n in enumerate(study.block_lengths):
        stats = [s.branches[number] for s in study.prompts]
        means = [
            float(np.mean([getattr(b, name) for b in stats]))
            for name in ("num_block", "num_refresh", "num_decoded", "num_merged", "num_copied")
        ]
        means[2] -= means[4]
        rows.append([n, sum(s.winner == n for s in study.prompts), *(f"{m:.2f}" for m in means)])
    heads = ["block length", "won", "block forwards", "refreshes", "own tokens", "merged", "copied"]
    return ["## BlockBatch's branches", "", *table_lines(heads, rows)]


def _cache_tables(records: Sequence[CacheRecord]) -> list[str]:
    rows = []
    for key in sorted({key for r in records for key in r.moves}):
        mean = float(np.mean([r.moves[key] for r in records if key in r.moves]))
        rows.append([f"{RUN_LABELS[key[0]]}, {key[1]}", f"{mean:.4g}"])
    lines = ["## Caches", "", *table_lines(["events", "moved a cache by (mean)"], rows)]
    syncs = [s for r in records for s in r.syncs]
    gammas = _gammas(syncs_of=records)
    lines += ["", f"Watched prompts: {len(records)}. Synchronisations: {len(syncs)}"]
    if gammas:
        lines[-1] += f"; contraction Γ = D_post / D_pre: mean {np.mean(gammas):.3f}, from {min(gammas):.3f} to "
        lines[-1] += f"{max(gammas):.3f}"
    sketch_error = _sketch_error(records)
    lines[-1] += (
        "." if sketch_error is None else f". Sketched distances deviate by {100 * sketch_error:.1f} % (median)."
    )
    return lines


def _check_table(checks: Sequence[BoundCheck]) -> list[str]:
    rows = [
        [
            *(c.proposition, c.statement, "all" if c.block_length is None else c.block_length),
            *(f"{c.value:.4g}", c.relation, f"{c.bound:.4g}", f"{c.held} of {c.count}", c.holds),
        ]
        for c in checks
    ]
    heads = ["Prop.", "statement", "B", "value", "", "bound", "held", "holds"]
    lead = "Value and bound are those of the tightest check."
    return ["## Bounds of Props. 1 to 3", "", lead, "", *table_lines(heads, rows)]


def _gammas(*, syncs_of: Sequence[CacheRecord]) -> list[float]:
    return [g for r in syncs_of for s in r.syncs if (g := s.contraction.gamma) is not None]


def _sketch_error(records: Sequence[CacheRecord]) -> float | None:
    ratios = [ratio for r in records for ratio in r.ratios]
    return float(np.median(np.abs(np.array(ratios) - 1))) if ratios else None


def _content(study: BranchStudy, oracle: Oracle, checks: Sequence[BoundCheck], plots: Sequence[str]) -> dict[str, Any]:
    def point(p: MeanRun) -> dict[str, float | None]:
        return {"accuracy": p.accuracy if study.graded else None, "num_forwards": p.num_forwards}

    outputs = [s.outputs for s in study.prompts]
    return {
        "block_lengths": study.block_lengths,
        "graded": study.graded,
        "methods": {name: point(p) for name, p in method_means(study, oracle).items()},
        "oracle": {
            "num_forwards": oracle.oracle.num_forwards,
            "accuracy": oracle.oracle.accuracy if study.graded else None,
            "as_released": point(oracle.mixed) if study.graded else None,
            "chosen": {str(n): count for n, count in oracle.chosen.items()},
        },
        "bifurcation": bifurcation_matrix(outputs).tolist(),
        "consensus": [[None if np.isnan(v) else round(float(v), 4) for v in row] for row in mean_consensus(outputs)],
        "bounds": [{**asdict(c), "holds": c.holds} for c in checks],
        "prompts": [_sample(s) for s in study.prompts],
        "plots": list(plots),
    }


def _sample(sample: StudiedPrompt) -> dict[str, Any]:
    return {
        "name": sample.name,
        "prompt_length": sample.prompt_length,
        "single": {str(n): asdict(run) for n, run in sample.single.items()},
        "block_batch": {
            **asdict(sample.block_batch),
            "winner": sample.winner,
            "branches": [asdict(b) for b in sample.branches],
        },
        "bifurcation": {f"{a},{b}": n for (a, b), n in bifurcation_lengths(sample.outputs).items()},
        "caches": None if sample.caches is None else _caches(sample.caches),
    }


def _caches(record: CacheRecord) -> dict[str, Any]:
    return {
        "points": [asdict(p) for p in record.points],
        "dispersions": record.dispersions,
        "syncs": [
            {
                "step": s.step,
                "leader": s.leader,
                "overwritten": list(s.overwritten),
                "before": s.contraction.pre,
                "after": s.contraction.post,
                "gamma": s.contraction.gamma,
            }
            for s in record.syncs
        ],
        "moves": {f"{run} {kind}": value for (run, kind), value in record.moves.items()},
        "sketch_error": _sketch_error([record]),
        "errors": {
            str(n): [{"kind": e.kind, "error": e.error, "norm": e.norm} for e in w.events]
            for n, w in record.singles.items()
        },
    }
