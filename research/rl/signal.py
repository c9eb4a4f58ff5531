"""How much of an update is signal: gradients of one objective on disjoint sets of answers, and the angle between them.

Two sets of answers to different problems have the same expected gradient. So the cosine between their gradients is the
share of signal in each: 1 without noise, 0 if all is noise. Nothing is trained.

signal.json   the gradients' numbers, set by set and pair by pair, with the settings
signal.md, signal.png
              the report of them
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any

from jobs.command_line import OutFolder, OwnThreads
from mbd_core.command_line import command, refuse_given
from mbd_core.fields import DATA, OUTPUT, Flag, Ge, configuration
from mbd_core.files import check_writable, file_beside, write_json, write_text
from mbd_core.json_text import parse_json
from mbd_core.multitf.step.objective import PolicyObjective
from mbd_core.rl.groups import GroupConfig
from mbd_core.rl.parts import CORRECT, TPF
from mbd_core.rl.recipes import LEDGER_OPD, LEDGER_RL
from research.tables import table_lines

if TYPE_CHECKING:
    from torch import Tensor

    from mbd_core.models.decoder import Decoder
    from mbd_core.multitf.states.answer import ReplayedAnswer
    from mbd_core.multitf.step.distiller import Distiller
    from mbd_core.multitf.step.learner import Learner
    from mbd_core.rl.rows import ScoredRow

RECORD, REPORT, PLOT = "signal.json", "signal.md", "signal.png"
BOTH = {CORRECT: 1.0, TPF: 1.0}
REWARDS: dict[str, tuple[dict[str, float], GroupConfig]] = {
    "correctness": ({CORRECT: 1.0}, GroupConfig()),
    "tokens per forward": ({TPF: 1.0}, GroupConfig()),
    "both": (BOTH, GroupConfig()),
    "both, shuffled": (BOTH, GroupConfig(advantages="shuffled")),
    "likelihood of right answers": ({CORRECT: 1.0}, GroupConfig(advantages="correct")),
}
TEACHER = "the teacher at one slot"


@configuration(panel=DATA)
class SignalSize:
    """The sets of answers. Set `s` has problems of its own, as the first iteration of a run with seed `s`."""

    sets: Annotated[int, Ge(2)] = 4
    """Disjoint sets, which are compared in pairs."""
    problems: Annotated[int, Ge(2)] = 64
    """Problems of a set, with 8 answers each."""


@dataclass(frozen=True)
class Gradient:
    """A set's gradient.

    values    flat
    answers   number of answers that it is of
    sharpens  its cosine with the gradient of the labels' entropy: if positive, a descent along it makes a model surer
    """

    values: Tensor
    answers: int
    sharpens: float


def run(
    *,
    out: OutFolder,
    size: SignalSize,
    threads: OwnThreads = None,
    report_only: Annotated[bool, Flag("Write the report again, from the numbers that are there.", OUTPUT)] = False,
) -> None:
    """Compare the gradients of ledger-mbd's objectives on disjoint sets of its answers."""
    if report_only:
        refuse_given(run, "with --report-only", threads=threads, **vars(size))
        if not (out / RECORD).is_file():
            raise ValueError(f"{out} holds no {RECORD}: measure first, without --report-only")
    else:
        import torch

        check_writable(out, out)
        if (out / RECORD).exists():
            raise ValueError(f"{out / RECORD} is there already: give another folder, or --report-only")
        if threads is not None:
            torch.set_num_threads(threads)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / RECORD, {"size": asdict(size), "objectives": measure(size)})
    print(report(out))


def measure(size: SignalSize) -> dict[str, dict[str, Any]]:
    """For each objective the cosines of all pairs of sets, and for each set the gradient's norm, the answers learned
    from, and how far its descent sharpens."""
    import torch
    from tqdm import tqdm

    from mbd_core.checkpoint.loading import load_model
    from mbd_core.checkpoint.shipped import model_folder

    model = load_model(model_folder(LEDGER_RL.model), dtype=torch.float32)
    found: dict[str, list[Gradient]] = {}
    for seed in tqdm(range(size.sets), desc="gradients", unit="set"):
        for name, gradient in gradients(model, answers_of(seed, size.problems)):
            found.setdefault(name, []).append(gradient)
    return {
        name: {
            "cosines": [cosine(a.values, b.values) for a, b in combinations(each, 2)],
            "norms": [gradient.values.norm().item() for gradient in each],
            "answers": [gradient.answers for gradient in each],
            "sharpens": [gradient.sharpens for gradient in each],
        }
        for name, each in found.items()
    }


def answers_of(seed: int, problems: int) -> list[ScoredRow]:
    """The scored answers of the first iteration of `ledger-rl` with this seed and number of problems."""
    from contextlib import closing

    from mbd_core.engine.config import EngineConfig
    from mbd_core.rl.rewards import score_table
    from mbd_core.rl.rollouts import RolloutEngine, RolloutPlan, decided

    recipe = replace(
        LEDGER_RL,
        seed=seed,
        iterations=1,
        rollouts=replace(LEDGER_RL.rollouts, prompts=problems),
        held_out=replace(LEDGER_RL.held_out, evaluate_every=0),
    )
    plan, rows = RolloutPlan.of(recipe, EngineConfig()), []
    with closing(RolloutEngine(recipe.model, plan.engine)) as engine:
        for _, asked in plan.parts(0):
            table = engine.decode(asked)
            scores = score_table(table, recipe.rewards)
            rows += [row | score for row, score in zip(table.to_pylist(), scores.to_pylist(), strict=True)]
    return [row for row in rows if decided(row)]


def gradients(model: Decoder, rows: Sequence[ScoredRow]) -> Iterable[tuple[str, Gradient]]:
    """The gradient of each objective on these answers."""
    from mbd_core.multitf.step.distiller import Distiller
    from mbd_core.multitf.step.learner import Learner
    from mbd_core.rl.groups import advantages
    from mbd_core.rl.loop import rewarded_answer
    from mbd_core.rl.rollouts import replayed

    judged = [rewarded_answer(row) for row in rows]
    every = [replayed(row, advantage=1.0, correct=answer.correct) for row, answer in zip(rows, judged, strict=True)]
    entropy = entropy_gradient(model, every)
    train = replace(LEDGER_RL.train, steps=1, batch_size=len(rows), clip=1e6)
    lessons = {}
    for name, (weights, config) in REWARDS.items():
        taught, _ = advantages(judged, weights, config, seed=0)
        if not any(taught.values()):
            raise ValueError(f"no group of {len(rows)} answers has a signal of {name}: give more --problems")
        lessons[name] = [replace(every[place], advantage=value) for place, value in taught.items()]
    for name, answers in lessons.items():
        values = gradient_of(Learner(deepcopy(model), train, PolicyObjective()), answers)
        yield name, Gradient(values, len(answers), cosine(values, entropy))
    taught_by = replace(train, teacher=LEDGER_OPD.train.teacher)
    student = Distiller(deepcopy(model), taught_by, deepcopy(model).requires_grad_(False))
    values = gradient_of(student, every)
    yield TEACHER, Gradient(values, len(every), cosine(values, entropy))


def gradient_of(learner: Learner | Distiller, answers: Sequence[ReplayedAnswer]) -> Tensor:
    """The flat gradient of a learner's first update on these answers."""
    import torch

    found: list[Tensor] = []

    def read(*_: object) -> None:
        found.append(torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]))

    learner.optimizers[0].register_step_pre_hook(read)
    learner.update(answers)
    return found[0]


def entropy_gradient(model: Decoder, answers: Sequence[ReplayedAnswer]) -> Tensor:
    """The flat gradient of the mean entropy at the places that the answers' forwards decided."""
    import torch

    from mbd_core.multitf.data.example import IGNORE
    from mbd_core.multitf.states.packing import packed_together
    from mbd_core.multitf.states.replay import replay_batch
    from mbd_core.multitf.states.replay_cost import replay_cost
    from mbd_core.multitf.states.training_attention import TrainingAttention
    from mbd_core.multitf.step.loss import hidden_states
    from mbd_core.multitf.step.trainer import split_batch

    model, attention = deepcopy(model), TrainingAttention("streams", torch.device("cpu"))
    together = packed_together([replay_cost(answer).tokens for answer in answers], LEDGER_RL.train.pack or 0)
    batch = replay_batch(answers, mask_token_id=model.config.mask_token_id, together=together)
    for part in split_batch(batch, 1):
        at, places = (part.labels != IGNORE).nonzero(as_tuple=True)
        logs = model.logits(hidden_states(model, part, attention, (at, places))).log_softmax(-1)
        (-(logs.exp() * logs).sum(-1) @ part.weights[at, places].float()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def cosine(a: Tensor, b: Tensor) -> float:
    """The cosine of the angle between two flat tensors."""
    return ((a @ b) / (a.norm() * b.norm())).item()


def report(out: Path) -> str:
    """Write signal.md and signal.png from the numbers, and return the Markdown."""
    record = parse_json((out / RECORD).read_bytes(), str(out / RECORD))
    size, objectives = SignalSize(**record["size"]), record["objectives"]
    lines = []
    for name, numbers in objectives.items():
        cosines, answers = numbers["cosines"], round(fmean(numbers["answers"]))
        spread = f"{fmean(cosines):+.2f} [{min(cosines):+.2f}, {max(cosines):+.2f}]"
        lines.append([name, answers, spread, equal_parts(answers, cosines), f"{fmean(numbers['sharpens']):+.2f}"])
    heads = ["Objective", "Answers", "Cosine [least, largest]", "Answers for equal parts", "Sharpens"]
    text = "\n".join(
        [
            "# How much of an update is signal",
            "",
            f"Gradients of `ledger-mbd` on {size.sets} disjoint sets of {8 * size.problems} answers at four slots, in "
            "pairs. Answers: those that a set's groups leave. Answers for equal parts: of n answers with the cosine "
            "c, n (1 - c) / c have as much signal as noise; where c is within two standard errors of 0 (of the pairs, "
            "as if they were independent), the number is above that of two standard errors. Sharpens: the cosine of "
            "the gradient with that of the labels' mean entropy; a descent along a positive one makes a model surer.",
            "",
            *table_lines(heads, lines, num_text=1),
            "",
            f"![cosines between gradients of disjoint sets]({PLOT})",
            "",
        ]
    )
    draw(objectives, out / PLOT)
    write_text(out / REPORT, text)
    return text


def equal_parts(answers: int, cosines: Sequence[float]) -> str:
    """How many answers have as much signal as noise, to two digits, or the least number that the pairs allow.

    A dash if the pairs allow any number, as a single pair does.
    """
    mean = fmean(cosines)
    error = stdev(cosines) / len(cosines) ** 0.5 if len(cosines) > 1 else math.inf
    is_seen = mean > 2 * error
    c = mean if is_seen else mean + 2 * error
    if not 0 < c < 1:
        return "-"
    return f"{'' if is_seen else 'more than '}{float(f'{answers * (1 - c) / c:.1e}'):,.0f}"


def draw(objectives: dict[str, dict[str, Any]], path: Path) -> None:
    """A row of dots for each objective: the cosines of its pairs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot()
    for place, numbers in enumerate(objectives.values()):
        cosines = numbers["cosines"]
        axes.plot(cosines, [place] * len(cosines), "o", alpha=0.6)
        axes.plot([fmean(cosines)], [place], "k|", markersize=18)
    axes.axvline(0, color="0.7", linewidth=1)
    axes.set(xlim=(-0.4, 1.02), xlabel="cosine between the gradients of two disjoint sets of answers")
    axes.set_yticks(range(len(objectives)), list(objectives))
    axes.invert_yaxis()
    with file_beside(path) as new_file, new_file.open("wb") as file:
        figure.savefig(file, format="png", dpi=150)


main = command(run, "python -m research signal")
