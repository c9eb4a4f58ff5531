"""The table of accuracies by each rule that judged the samples: strict and flexible, base and plus."""

from collections.abc import Mapping, Sequence

from mbd_core.evaluation.markdown_sections import table_line
from mbd_core.evaluation.rates import RULES, RuleAccuracy
from mbd_core.evaluation.sweep_report import ReportRow

DEFINITIONS = (
    "Percent right with the 95 % Wilson interval; a dash where the rule is none of the task's, or judged nothing. "
    "Strict: the answer stands where the task wants it, behind its mark or in \\boxed. Flexible: the answer is found "
    "anywhere (of the project's own tasks the last number, else by math-verify). Base: the program passes the "
    "benchmark's own inputs. Plus: these and EvalPlus's further inputs. Acc of the other tables is flexible for GSM8K "
    "and MATH, strict for the project's own tasks, and plus for EvalPlus's. A sample that was not judged is wrong."
)


def rule_lines(rows: Sequence[ReportRow], labels: Mapping[str, str]) -> list[str]:
    """The section; nothing where no rule but the task's own judged a sample."""
    judged = [row for row in rows if row.summary.by_rule]
    rules = [rule for rule in RULES if any(rule in row.summary.by_rule for row in judged)]
    if not rules:
        return []
    heads = ["Model", "Method", "Task", "Config", "n", *(f"{rule.capitalize()} [95 %]" for rule in rules)]
    lines = ["## Accuracy by rule", "", f"| {' | '.join(heads)} |", "|---|---|---|---|" + "---:|" * (1 + len(rules))]
    for row in judged:
        found = [row.summary.by_rule.get(rule) for rule in rules]
        subject = (row.key.model, row.key.method, labels[row.key.task], row.varied or "-", row.summary.n)
        lines.append(table_line([*subject, *map(_accuracy_text, found)]))
    return [*lines, "", DEFINITIONS, ""]


def _accuracy_text(found: RuleAccuracy | None) -> str:
    return "-" if found is None else f"{found.accuracy:.2f} [{found.low:.1f}, {found.high:.1f}]"
