"""The tables and sentences of the comparison of a real model with its base, from its rows alone."""

import itertools
import json
from collections.abc import Mapping, Sequence

from mbd_core.evaluation.measures.aup import ALPHA
from mbd_core.evaluation.measures.rates import GradedSample, SampleCounts
from mbd_core.evaluation.measures.statistics import NUM_DRAWS, Interval, p_text, sign_test, wins_and_losses
from mbd_core.evaluation.measures.summary import ReportKey, build_aup, build_rows, task_areas
from mbd_core.tables import Cell
from research.real.arms import ARMS, BASE, CONTROL, DRAFTED, LLAMA_CPP, NAIVE, OWN, SINGLE, TRAINED, Answered
from research.tables import table_lines


def report(rows: Sequence[Answered]) -> list[str]:
    """One table. Then five sentences if the rows have all `ARMS` and were timed, one more if they have llama.cpp. Else
    the arms' AUPs, if they have several thresholds, or the arms' sign tests."""
    has_thresholds = len({row.tau for row in rows} - {None}) > 1
    of: dict[str, list[Answered]] = {}
    for row in rows:
        name = f"{row.arm}, tau_m2t {row.tau:g}" if has_thresholds and row.tau is not None else row.arm
        of.setdefault(name, []).append(row)
    table = _table(of)
    if set(ARMS) <= set(of) and all(any(row.seconds for row in own) for own in of.values()):
        return [*table, "", *_sentences(of)]
    # a kept arm may have failed midway
    num_asked = max(map(len, of.values()), default=0)
    whole = {name: own for name, own in of.items() if len(own) == num_asked}
    if has_thresholds:
        return [*table, "", *_aups(whole)]
    pairs = [
        f"- {one} alone is right in {_against(of[one], of[other], other)}. "
        f"{_same(of[one], of[other])} answers are the same."
        for one, other in itertools.combinations(whole, 2)
    ]
    return [*table, *(["", "Exact sign tests:", "", *pairs] if pairs else [])]


def _table(of: Mapping[str, Sequence[Answered]]) -> list[str]:
    rows = [row for own in of.values() for row in own]
    tasks = list(dict.fromkeys(row.task for row in rows))
    has_valid = any(row.is_valid is not None for row in rows)
    has_nats = any(row.nats is not None for row in rows)
    lines: list[list[Cell]] = []
    for name, own in of.items():
        right = [_percent([row.is_right for row in own if row.task == task]) for task in tasks]
        lines.append([name, *right, _percent([row.is_right for row in own]), f"{_tpf(own):.2f}", _tps_text(own)])
        lines[-1] += [_percent([row.is_valid for row in own if row.is_valid is not None])] if has_valid else []
        lines[-1] += [_nats_text(own)] if has_nats else []
    heads = ["", *(f"{task}, right (%)" for task in tasks), "all", "tokens a forward", "tokens a second"]
    heads += ["JSON of the schema (%)"] if has_valid else []
    heads += ["nats a token under the base"] if has_nats else []
    return table_lines(heads, lines, num_text=1)


def _aups(of: Mapping[str, Sequence[Answered]]) -> list[str]:
    """A table of each arm's AUPs over its thresholds, then the differences of both AUPs. The intervals are of a
    bootstrap over the questions, with the same draws for all arms."""
    samples = {
        ReportKey(model=own[0].arm, method="", task="", config=json.dumps({"tau_m2t": own[0].tau})): [
            _graded(number, row) for number, row in enumerate(own)
        ]
        for own in of.values()
        if own[0].tau is not None
    }
    rows = build_aup(build_rows(samples))
    areas = task_areas(samples, [(row.model, "", None) for row in rows], ALPHA, num_draws=NUM_DRAWS)
    drawn = [(row, *areas_2D) for row, areas_2D in zip(rows, areas, strict=True)]
    lines = [
        [
            row.model,
            Interval.of_draws(row.eq41.value, eq41_D).text(".0f"),
            Interval.of_draws(row.d3llm.value, d3llm_D).text(".0f"),
            ", ".join(f"{accuracy:.0f} % at {tpf:.2f}" for tpf, accuracy in row.points),
        ]
        for row, eq41_D, d3llm_D in drawn
    ]
    differences = [
        f"- {one.model} less {other.model}: Eq. 4.1 "
        + Interval.of_draws(one.eq41.value - other.eq41.value, one_D - other_D).text("+.0f")
        + ", d3LLM "
        + Interval.of_draws(one.d3llm.value - other.d3llm.value, one_weighted_D - other_weighted_D).text("+.0f")
        for (one, one_D, one_weighted_D), (other, other_D, other_weighted_D) in itertools.combinations(drawn, 2)
    ]
    table = table_lines(["", "AUP, Eq. 4.1", "AUP, d3LLM", "right, at mean tokens a forward"], lines)
    return [*table, *(["", "Differences:", "", *differences] if differences else [])]


def _graded(number: int, row: Answered) -> GradedSample:
    """A row as a sweep's sample: its question's number names the problem."""
    counts = SampleCounts(
        num_prompt_tokens=None,
        num_tokens=row.tokens,
        num_forwards=row.forwards,
        num_store_forwards=None,
        num_prefill_forwards=None,
    )
    return GradedSample(problem=f"{number}", correct=row.is_right, counts=counts)


def _sentences(of: Mapping[str, Sequence[Answered]]) -> list[str]:
    accuracy = {arm: _percent([row.is_right for row in own]) for arm, own in of.items()}
    return [
        f"The base writes {_tps(of[BASE]):.1f} tokens a second, and {accuracy[BASE]} % of its answers are right: "
        "it was never trained on these tasks.",
        f"Adapted to blocks it writes {_tps(of[SINGLE]) / _tps(of[BASE]):.2f} times as many a second block by block "
        f"({accuracy[SINGLE]} % right), and {_tps(of[NAIVE]) / _tps(of[BASE]):.2f} times with four blocks at once "
        f"({accuracy[NAIVE]} %).",
        f"After MultiTF four blocks at once give {_tps(of[TRAINED]) / _tps(of[BASE]):.2f} times the base's tokens a "
        f"second, {_tpf(of[TRAINED]):.2f} tokens a forward, and {accuracy[TRAINED]} % right answers.",
        f"Token by token the same weights are right in {accuracy[OWN]} %, the base fine-tuned on the same samples in "
        f"{accuracy[CONTROL]} %. Drafted in blocks these answers come {_tps(of[DRAFTED]) / _tps(of[OWN]):.2f} times "
        f"as fast: {_same(of[DRAFTED], of[OWN])} are the same, letter by letter.",
        "Of the same questions (exact sign test), MultiBD after MultiTF alone is right in "
        f"{_against(of[TRAINED], of[NAIVE], 'MultiBD before it')}, in "
        f"{_against(of[TRAINED], of[SINGLE], 'SingleBD')}, and in "
        f"{_against(of[TRAINED], of[CONTROL], 'the fine-tuned base')}.",
        *(
            f"The base by llama.cpp writes {_tps(own):.1f} tokens a second, MultiBD after MultiTF "
            f"{_tps(of[TRAINED]) / _tps(own):.2f} times as many."
            for arm, own in of.items()
            if arm == LLAMA_CPP
        ),
    ]


def _against(first: Sequence[Answered], second: Sequence[Answered], other: str) -> str:
    """How often only one of two arms is right. Both arms' rows have the same questions in the same order."""
    pairs = zip(first, second, strict=True)
    wins, losses = wins_and_losses((str(i), int(a.is_right) - int(b.is_right)) for i, (a, b) in enumerate(pairs))
    return f"{wins} and {other} in {losses} (p {p_text(sign_test(wins, losses), equals='= ')})"


def _same(first: Sequence[Answered], second: Sequence[Answered]) -> str:
    """How many of two arms' answers have the same text."""
    return f"{sum(a.digest == b.digest for a, b in zip(first, second, strict=True))} of {len(first)}"


def _percent(values: Sequence[bool]) -> str:
    return f"{100 * sum(values) / len(values):.0f}" if values else ""


def _tpf(rows: Sequence[Answered]) -> float:
    return sum(row.tokens for row in rows) / sum(row.forwards for row in rows)


def _tps_text(rows: Sequence[Answered]) -> str:
    return f"{_tps(rows):.1f}" if any(row.seconds for row in rows) else ""


def _nats_text(rows: Sequence[Answered]) -> str:
    nats, tokens = [row.nats for row in rows if row.nats is not None], sum(row.tokens_read for row in rows)
    return f"{sum(nats) / tokens:.2f}" if len(nats) == len(rows) and tokens else ""


def _tps(rows: Sequence[Answered]) -> float:
    """Of the rows that were timed."""
    return sum(row.tokens for row in rows if row.seconds) / sum(row.seconds for row in rows)
