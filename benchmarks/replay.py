"""The cost of a rollout for a learner, and the distance of its log-probabilities from the engine's.

An engine draws answers to a task's problems. They are replayed in three kinds of states: those of the engine's
forwards, successive forwards joined into one state, and the states of released learners. Counts are per answer.
Seconds are CPU seconds of a forward and a backward pass over all answers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from benchmarks.commands import BenchmarkOptions, Buffer
from benchmarks.measuring import interleaved, markdown, medians, run_seconds
from jobs.command_line import ModelName, Seed
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.command_line import CommandText, Fields, command
from mbd_core.fields import DATA, STATES, Flag, Ge

if TYPE_CHECKING:
    from mbd_core.decoding.blocks.request import Output
    from mbd_core.models.decoder import Decoder
    from mbd_core.multitf.config import ReplayStates
    from mbd_core.multitf.states.answer import ReplayedAnswer

COLUMNS = {
    "slots": "slots",
    "states": "states",
    "forwards": "forwards|.1f",
    "noisy": "noisy tokens|.0f",
    "clean": "clean tokens|.0f",
    "tokens": "learner's tokens|.0f",
    "trace_rl": "TraceRL's rows|.0f",
    "share": "of TraceRL's|.3f",
    "d_mean": "mean abs d|.2g",
    "d_max": "largest|.2g",
    "d_share": "above 0.1|.4f",
    "seconds": "CPU s|.2f",
}

PHASES = {
    "slots": "slots",
    "answers": "answers",
    "rollouts": "rollouts, CPU s|.2f",
    "dense": "update under a dense mask|.2f",
    "padded": "in padded sequences|.2f",
    "update": "packed|.2f",
    "alone": "without a reference|.2f",
    "bfloat16": "in bfloat16|.2f",
    "distilled": "update from a teacher, in bfloat16|.2f",
    "d_mean": "mean abs d in bfloat16|.2g",
    "ratio": "update in bfloat16 by rollouts|.2f",
}
"""The phases of an iteration of reinforcement learning. Each update differs from the update before it in one thing.
The last update has a teacher's objective."""

THREE_TIMES = BenchmarkOptions()


def run_replay(
    command_line: CommandText,
    *,
    model: ModelName = "ledger-mbd",
    task: Annotated[str, Flag("A generated task, whose problems are answered.", DATA)] = "ledger-mini",
    answers: Annotated[int, Ge(1), Flag("Answers, drawn at temperature 1.", DATA)] = 16,
    slots: Buffer = (1, 2, 4),
    shrink: Annotated[
        tuple[Annotated[int, Ge(1)], ...], Flag("Successive forwards that become one state.", STATES, commas=True)
    ] = (1, 2, 4),
    seed: Seed = 0,
    measuring: Annotated[BenchmarkOptions, Fields("repeats", "threads", "json")] = THREE_TIMES,
) -> None:
    """A learner's tokens and time for the answers of an engine, and its log-probabilities minus the engine's (d).

    TraceRL has a row for each step of an answer's slowest block; each row has the prompt and twice the answer. The
    counts are means over the answers. d is over all tokens of the answers. The learner computes in float32, the engine
    as it serves: in float32 on a CPU. The second table has the seconds of an iteration's phases.
    """
    import torch

    measuring.begin()
    rows, phases = [], []
    for size in slots:
        decoder, drawn, seconds = drawn_answers(model, task, answers, slots=size, seed=seed, repeats=measuring.repeats)
        rows += replay_rows(decoder, drawn, slots=size, shrinks=shrink, repeats=measuring.repeats)
        phases.append({"slots": size, "answers": answers, "rollouts": seconds})
        phases[-1] |= update_seconds(decoder, drawn, rollouts=seconds, repeats=measuring.repeats)
    print(markdown(rows, COLUMNS), markdown(phases, PHASES), sep="\n\n")
    measuring.write(command_line, {"torch": torch.__version__}, rows=rows, phases=phases)


def drawn_answers(
    model: str, task: str, number: int, *, slots: int, seed: int, repeats: int = 1
) -> tuple[Decoder, list[ReplayedAnswer], float]:
    """A model in float32, its answers to problems of a task's valid split, and the seconds of drawing them.

    An engine with `slots` slots draws the answers, in its own precision; the seconds are the median of `repeats`.

    Raises `ValueError` for a task without problems of its own.
    """
    import torch

    from mbd_core.checkpoint.chat import question_prompt
    from mbd_core.checkpoint.loading import load_model
    from mbd_core.decoding.blocks.request import Request
    from mbd_core.decoding.blocks.sampling_config import Sampling
    from mbd_core.engine.config import EngineConfig
    from mbd_core.evaluation.tasks.benchmarks import find_task
    from mbd_core.evaluation.tasks.problems import load_problems
    from mbd_core.multitf.states.answer import ReplayedAnswer
    from mbd_core.serving.tokens.load import load_engine

    found = find_task(task)
    if found.generate is None:
        raise ValueError(f"--task {task} needs a file of problems; give a generated task, as ledger-mini")
    problems = load_problems(found, split="valid", seed=seed, limit=number).problems
    with load_engine(model_folder(model), EngineConfig(max_rows=16, buffer_size=slots)) as loaded:
        decoding = loaded.decoding({"buffer_size": slots})
        requests = [
            Request(
                request_id=problem.problem_id,
                prompt=tuple(question_prompt(loaded.tokenizer, problem.prompt)),
                max_tokens=found.max_tokens,
                decoding=decoding,
                sampling=Sampling(temperature=1.0, seed=seed + place),
                rollout=True,
            )
            for place, problem in enumerate(problems)
        ]
        outputs: Sequence[Output] = ()

        def draw() -> None:
            nonlocal outputs
            loaded.engine.forget_prefixes()  # as between two parts of a run
            outputs = loaded.engine.generate(requests)

        seconds = statistics.median(run_seconds(draw, clock=time.process_time) for _ in range(repeats))
        device = loaded.engine.model.model.norm.weight.device
    decoder = load_model(model_folder(model), dtype=torch.float32, device=device)
    drawn = []
    for request, output in zip(requests, outputs, strict=True):
        drawn.append(
            ReplayedAnswer(
                prompt=request.prompt,
                answer=output.piece,
                tail=output.tail,
                experts=output.experts,
                decoding=decoding,
                max_tokens=request.max_tokens,
                advantage=1.0,
                correct=True,
            )
        )
    return decoder, drawn, seconds


def update_seconds(
    model: Decoder, answers: Sequence[ReplayedAnswer], *, rollouts: float, repeats: int
) -> dict[str, float]:
    """Seconds of an update of copies of the model, by the names of `PHASES`, and the mean distance `d_mean` of the
    learner's log-probabilities in bfloat16 from the engine's.

    The updates `dense`, `padded` and `update` have LightningRL's objective, which compares with a frozen reference.
    The teacher is a copy of the model, which reads block by block.
    """
    from mbd_core.multitf.step.distiller import Distiller
    from mbd_core.multitf.step.learner import Learner
    from mbd_core.rl.recipes import LEDGER_RL, TINY_OPD

    objective, packed = LEDGER_RL.objective, replace(LEDGER_RL.train, batch_size=len(answers))
    padded = replace(packed, pack=None, micro_batch=4)
    bfloat16 = replace(packed, precision="bfloat16")
    without = replace(objective, kl=0.0)
    teacher = deepcopy(model).requires_grad_(False)
    learners: dict[str, Learner | Distiller] = {
        "dense": Learner(deepcopy(model), replace(padded, attention="dense"), objective),
        "padded": Learner(deepcopy(model), padded, objective),
        "update": Learner(deepcopy(model), packed, objective),
        "alone": Learner(deepcopy(model), packed, without),
        "bfloat16": Learner(deepcopy(model), bfloat16, without),
        "distilled": Distiller(deepcopy(model), replace(bfloat16, teacher=TINY_OPD.train.teacher), teacher),
    }
    d_mean = Learner(deepcopy(model), bfloat16, without).update(answers).d_mean
    timer = partial(run_seconds, clock=time.process_time)
    runs = {name: partial(timer, partial(each.update, answers)) for name, each in learners.items()}
    seconds = medians(interleaved(runs, repeats=repeats))
    return seconds | {"d_mean": d_mean, "ratio": seconds["bfloat16"] / rollouts}


def replay_rows(
    model: Decoder, answers: Sequence[ReplayedAnswer], *, slots: int, shrinks: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """A row for each kind of states: the answers' cost, their distance from the engine, and seconds, taken in turn."""
    import torch

    from mbd_core.multitf.data.example import IGNORE
    from mbd_core.multitf.states.replay import ReplayBatch, replay_batch
    from mbd_core.multitf.states.replay_cost import ReplayCost, replay_cost
    from mbd_core.multitf.step.policy_loss import log_probabilities
    from mbd_core.multitf.step.trainer import split_batch

    kinds: dict[str, tuple[ReplayStates, int]] = {
        f"exact, shrink {n}" if n > 1 else "exact": ("exact", n) for n in shrinks
    }
    kinds |= {"block-local": ("block-local", 1), "all-masked": ("all-masked", 1)}
    config, device = model.config, model.model.norm.weight.device
    batches = {
        name: replay_batch(
            answers, mask_token_id=config.mask_token_id, shift=config.shift_logits, states=states, shrink=n
        ).to(device)
        for name, (states, n) in kinds.items()
    }

    def step(batch: ReplayBatch) -> None:
        for part in split_batch(batch, 1):
            log_probabilities(model, part)[0].sum().backward()
        model.zero_grad(set_to_none=True)

    timer = partial(run_seconds, clock=time.process_time)
    runs = {name: partial(timer, partial(step, batch)) for name, batch in batches.items()}
    seconds = medians(interleaved(runs, repeats=repeats))
    rows = []
    for name, (states, n) in kinds.items():
        cost = sum((replay_cost(answer, states=states, shrink=n) for answer in answers), ReplayCost())
        batch = batches[name]
        with torch.no_grad():
            logprobs = torch.cat([log_probabilities(model, part)[0] for part in split_batch(batch, 1)])
        d = (logprobs - batch.logprobs[batch.labels != IGNORE]).abs()
        counts = {key: getattr(cost, key) / len(answers) for key in ("forwards", "noisy", "clean", "tokens")}
        trace_rl = sum(replay_cost(answer).trace_rl for answer in answers)
        rows.append(
            {"slots": slots, "states": name}
            | counts
            | {
                "trace_rl": trace_rl / len(answers),
                "share": cost.tokens / trace_rl,
                "d_mean": d.mean().item(),
                "d_max": d.max().item(),
                "d_share": (d > 0.1).float().mean().item(),
                "seconds": seconds[name],
            }
        )
    return rows


replay = command(run_replay, "python -m benchmarks replay")
