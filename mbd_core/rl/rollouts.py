"""Rollouts: which answers an iteration asks for, the engine that makes them, and the answers that a learner replays.

The requests of an iteration depend only on the recipe and the iteration's number. An engine decodes a part of them
from an empty state, with the weights of one version. So a part has the same answers whenever and wherever it is
decoded.
"""

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from torch import Tensor

from mbd_core.batch.decoding import DecodeStage, sample_requests
from mbd_core.batch.decoding_model import DecodingModel, ModelRefused
from mbd_core.batch.parts import NumberedTable, cut, in_turns
from mbd_core.batch.rows import config_text
from mbd_core.checkpoint.chat import decode_text
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.answers.piece import ForwardExperts, Piece
from mbd_core.decoding.blocks.config import decoding_config, read_decoding
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.evaluation.sweep.loading import load_inputs
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.evaluation.sweep.plan import plan_sweep
from mbd_core.evaluation.sweep.sweep import Sweep
from mbd_core.evaluation.tasks.asking import TaskInputs, ask
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.kinds.task import Problem
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.evaluation.tasks.recipes import find_recipe
from mbd_core.multitf.run.teachers import find_teacher
from mbd_core.multitf.states.answer import ReplayedAnswer, replay_refused
from mbd_core.rl.config import FRESH_STREAMS, HeldOutConfig, RLRecipe
from mbd_core.rl.rewards import check_judges
from mbd_core.rl.rows import ASKED_COLUMNS, ROLLOUT_COLUMNS, AskedRow, OutputColumns, RolloutRow
from mbd_core.serving.tokens.load import default_device, load_engine
from mbd_core.storage.models import fetch_model

METHOD = "rollout"
HELD_OUT = "held-out"


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """The requests of every iteration. `start` is the folder of the recipe's model on this machine; `source` names
    the origin of the problems; `engine` has the slots that rollouts and held-out sweeps take."""

    recipe: RLRecipe
    start: Path
    problems: tuple[Problem, ...]
    source: str
    inputs: TaskInputs
    config: str
    engine: EngineConfig
    held_out: Sweep | None

    @classmethod
    def of(cls, recipe: RLRecipe, engine: EngineConfig) -> Self:
        """Loads and checks all inputs of a run; raises `ValueError`, one sentence, for an input it cannot honour."""
        check_judges(recipe.rewards)
        if engine.dtype == "auto" and recipe.train.precision == "bfloat16":
            engine = replace(engine, dtype="bfloat16")  # the learner's precision
        place = fetch_model(recipe.model)
        start = model_folder(place)
        contents = read_folder(start)
        if contents.config.prefix_methods:
            raise ValueError(
                f"model '{recipe.model}' decodes with {' or '.join(contents.config.prefix_methods)}, and a learner "
                "scores answers that were decoded in blocks; give a block-diffusion model, which mbd convert --to "
                "block-diffusion and a training make of this one"
            )
        if recipe.train.teacher is not None:
            find_teacher(recipe.train.teacher, contents, lora=recipe.train.lora is not None, fetch=fetch_model)
        rollouts = recipe.rollouts
        task, prompt_recipe = find_task(rollouts.task), find_recipe(rollouts.prompt_recipe)
        prompt = prompt_recipe.task_prompt(task.name)
        if prompt.num_examples or prompt.stop:
            raise ValueError(
                f"prompt recipe '{prompt_recipe.name}' shows solved problems or ends answers of {task.name} at stop "
                "strings, after which their states are not known; choose one that does neither, as own or bare"
            )
        if prompt.wording.needs_chat and not contents.tokenizer.chat_template:
            raise ValueError(f"model '{recipe.model}' has a tokenizer without a chat template, which prompts need")
        limit = recipe.iterations * rollouts.prompts if task.generate is not None else None
        stream = recipe.seed + FRESH_STREAMS * rollouts.fresh_problems
        problem_set = load_problems(task, split="train", seed=stream, limit=limit, data=rollouts.data)
        if len(problem_set.problems) < rollouts.prompts:
            raise ValueError(
                f"{problem_set.source} has {len(problem_set.problems)} problems, fewer than prompts={rollouts.prompts}"
            )
        decoding = decoding_config(contents.defaults, rollouts.decoding, block_size=contents.config.block_size)
        if (why := replay_refused(decoding)) is not None:
            raise ValueError(why)
        if rollouts.record_experts and contents.config.moe is None:
            raise ValueError(f"model '{recipe.model}' has no experts that record_experts could record")
        inputs = ask(problem_set, prompt_recipe, examples=None, max_tokens=rollouts.max_tokens)
        rollouts.tokens_at(0, most=inputs.max_tokens, block_size=decoding.block_size)
        slots = decoding.buffer_size if engine.buffer_size is None else max(engine.buffer_size, decoding.buffer_size)
        return cls(
            recipe=recipe,
            start=start,
            problems=problem_set.problems,
            source=problem_set.source,
            inputs=inputs,
            config=config_text(decoding),
            engine=replace(engine, buffer_size=slots),
            held_out=_held_out(recipe, place, engine) if recipe.held_out.evaluate_every else None,
        )

    def describe(self) -> str:
        """The source of the problems, and the source of the held-out problems, with the number of held-out problems
        that the run learns from too."""
        if find_task(self.recipe.rollouts.task).generate is None:
            learned = f"{self.source}, {len(self.problems)} of them, in a new order each time they are through"
        else:
            learned = f"{self.source}, {self.recipe.rollouts.prompts} new ones in each iteration"
        if self.held_out is None:
            return f"problems: {learned}; none are held out"
        sources = {each.problem_set.source for each in self.held_out.tasks}
        prompts = {problem.prompt for problem in self.problems}
        held_out = [problem.prompt for each in self.held_out.tasks for problem in each.problems]
        shared = sum(prompt in prompts for prompt in held_out)
        note = f", of whose {len(held_out)} problems {shared} are learned from too" if shared else ""
        return f"problems: {learned}; held out: {', '.join(sorted(sources))}{note}"

    @property
    def model_name(self) -> str:
        return self.start.resolve().name

    def parts(self, iteration: int) -> list[NumberedTable]:
        """An iteration's requests (`ASKED_COLUMNS`) in parts of whole groups, with the parts' numbers."""
        rollouts = self.recipe.rollouts
        rows: list[AskedRow] = []
        limit = self.tokens_at(iteration)
        for number in range(rollouts.prompts):
            group = iteration * rollouts.prompts + number
            place = self._place(group)
            problem = self.problems[place]
            for draw in range(rollouts.group):
                subject = json.dumps([self.recipe.seed, group, problem.problem_id, draw])
                seed = int.from_bytes(hashlib.sha256(subject.encode()).digest()[:4], "little")
                rows.append(
                    {
                        "sample": group * rollouts.group + draw,
                        "model": self.model_name,
                        "method": METHOD,
                        "task": rollouts.task,
                        "problem_id": problem.problem_id,
                        "prompt": problem.prompt,
                        "reference": problem.reference,
                        "entry_point": problem.entry_point,
                        "config": self.config,
                        **self.inputs.columns(place),
                        "max_tokens": limit,
                        "seed": self.recipe.seed,
                        "draw": draw,
                        "sampling": json.dumps({"temperature": rollouts.temperature, "seed": seed}),
                        "iteration": iteration,
                        "group": group,
                        "record_experts": rollouts.record_experts,
                    }
                )
        parts = cut(rows, rows_per_part=rollouts.part_rows)
        return [(part.number, pa.Table.from_pylist([*part.rows], schema=ASKED_COLUMNS)) for part in parts]

    def tokens_at(self, iteration: int) -> int:
        """The limit of new tokens of an iteration's answers."""
        size = read_decoding(json.loads(self.config)).block_size
        return self.recipe.rollouts.tokens_at(iteration, most=self.inputs.max_tokens, block_size=size)

    def _place(self, group: int) -> int:
        """The index of a group's problem: generated problems come in order, the problems of a file are shuffled anew
        each time."""
        if find_task(self.recipe.rollouts.task).generate is not None:
            return group
        epoch, place = divmod(group, len(self.problems))
        order = list(range(len(self.problems)))
        random.Random(f"problems/{self.recipe.seed}/{epoch}").shuffle(order)
        return order[place]


def _held_out(recipe: RLRecipe, model: str, engine: EngineConfig) -> Sweep:
    """The held-out sweep: the rollouts' decoding, greedily, at each threshold."""
    held_out, rollouts = recipe.held_out, recipe.rollouts
    if find_task(rollouts.task).generate is None and held_out.held_out_data is None:
        raise ValueError(
            f"evaluate_every={held_out.evaluate_every} needs problems of {rollouts.task} that the run does not learn "
            "from: name their file with held_out_data, or evaluate_every 0"
        )
    data = () if held_out.held_out_data is None else (f"{rollouts.task}={held_out.held_out_data}",)
    inputs = load_inputs(
        SweepOptions(
            models=(model,),
            tasks=(rollouts.task,),
            recipe=rollouts.prompt_recipe,
            data=data,
            definitions=(f"{HELD_OUT}={json.dumps(rollouts.decoding)}",),
            methods=(HELD_OUT,),
            grid=f"tau_m2t={','.join(map(str, held_out.thresholds))}",
            max_tokens=rollouts.max_tokens,
            limit=held_out.held_out,
            seed=recipe.seed,
            split="valid",
            engine=engine,
        )
    )
    [task] = inputs.tasks
    if (number := len(task.problem_set.problems)) < held_out.held_out != HeldOutConfig.held_out:
        raise ValueError(
            f"held_out={held_out.held_out} is more than the {number} problems of {task.problem_set.source}; give at "
            f"most {number}"
        )
    return plan_sweep(inputs)


# The engine of rollouts, whose weights are replaced between two parts.


class RolloutEngine:
    """One engine that makes rollouts. `close()` it, or use it as a context."""

    def __init__(self, model: str, engine: EngineConfig, *, tensor_parallel: int = 1) -> None:
        if engine.dtype == "auto" and default_device().type == "cpu":
            engine = replace(engine, dtype="float32")  # as exact as a learner in float32
        self._loaded = load_engine(model_folder(model), engine, tensor_parallel=tensor_parallel)
        self._loaded.prepare()
        self._model = DecodingModel(self._loaded.engine, self._loaded.tokenizer)
        self._sweeps: DecodeStage | None = None

    @property
    def version(self) -> int:
        """The version of the engine's weights: the number of iterations since the start."""
        return self._model.engine.weights_version

    def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Decodes with these weights from now on, and empties the prefix cache. The engine is woken up first."""
        self.wake_up()
        self._model.engine.check_idle("take")  # so that no answer mixes versions
        self._model.engine.update_weights(weights.items(), mode="wait", version=version)

    def decode(self, table: pa.Table) -> pa.Table:
        """A part's rows as `ROLLOUT_COLUMNS`. A row that the engine refuses has the reason in `error`."""
        self.wake_up()
        asked: list[AskedRow] = table.to_pylist()
        rows, engine = in_turns(asked), self._model.engine
        engine.forget_prefixes()
        admitted: list[Request] = []
        decoded_rows: list[RolloutRow] = []
        for row, plain_request in zip(rows, sample_requests(self._model, rows), strict=True):
            assert isinstance(plain_request, Request), "tasks of calls are refused"
            request = replace(plain_request, rollout=True, experts=row["record_experts"])
            decoded_row: RolloutRow = {**row, "version": self.version, "prompt_tokens": list(request.prompt)}
            decoded_row["max_tokens"] = request.max_tokens
            try:
                engine.admission.check(request)
                admitted.append(request)
            except RequestRefused as error:
                decoded_row["error"] = str(error)
            decoded_rows.append(decoded_row)
        outputs = {output.request_id: output for output in engine.generate(admitted)}
        for decoded_row in decoded_rows:
            if (output := outputs.get(str(decoded_row["sample"]))) is not None:
                decoded_row.update(output_columns(output, decode_text(self._model.tokenizer, output.tokens)))
        decoded_rows.sort(key=lambda row: row["sample"])
        return pa.Table.from_pylist(decoded_rows, schema=ROLLOUT_COLUMNS)

    def sweep(self, table: pa.Table) -> pa.Table:
        """A part of a sweep, decoded with the current weights (`DECODED_COLUMNS`)."""
        self.wake_up()
        if self._sweeps is None:
            models = iter([self._model])
            self._sweeps = DecodeStage(lambda _: _next(models))
        return self._sweeps(table)

    def sleep(self) -> None:
        """Give the memory back until the next call that needs it."""
        if not self._model.engine.asleep:
            self._model.engine.sleep()

    def wake_up(self) -> None:
        """Take the memory again; does nothing if the engine is awake."""
        if self._model.engine.asleep:
            self._model.engine.wake_up()
            self._loaded.prepare()

    def close(self) -> None:
        self._loaded.close()


def _next(models: Any) -> DecodingModel:
    for model in models:
        assert isinstance(model, DecodingModel)
        return model
    raise ModelRefused("its engine failed in the sweep of held-out problems")


def output_columns(output: Output, text: str) -> OutputColumns:
    """An answer with its counts and the columns that a replay needs."""
    counts, answer, tail = output.counts, output.piece, output.tail
    assert not answer.edits
    return {
        "text": text,
        "finish_reason": output.finish_reason,
        "num_prompt_tokens": counts.num_prompt_tokens,
        "num_tokens": counts.num_tokens,
        "num_forwards": counts.num_forwards,
        "num_store_forwards": counts.num_store_forwards,
        "num_prefill_forwards": counts.num_prefill_forwards,
        "num_drafted_tokens": counts.num_drafted_tokens,
        "num_confirmed_tokens": counts.num_confirmed_tokens,
        "num_positions": counts.num_positions,
        "tokens": list(answer.tokens),
        "steps": list(answer.steps or ()),
        "logprobs": list(answer.logprobs or ()),
        "tail_tokens": list(tail.tokens),
        "tail_steps": list(tail.steps or ()),
        "tail_logprobs": list(tail.logprobs or ()),
        "experts": [record.columns() for record in output.experts],
    }


def replayed(row: RolloutRow, *, advantage: float, correct: bool) -> ReplayedAnswer:
    """The answer in a row, as a learner takes it."""
    return ReplayedAnswer(
        prompt=tuple(row["prompt_tokens"]),
        answer=Piece(tokens=tuple(row["tokens"]), steps=tuple(row["steps"]), logprobs=tuple(row["logprobs"])),
        tail=Piece(
            tokens=tuple(row["tail_tokens"]), steps=tuple(row["tail_steps"]), logprobs=tuple(row["tail_logprobs"])
        ),
        experts=tuple(map(ForwardExperts.of, row.get("experts") or ())),
        decoding=read_decoding(json.loads(row["config"])),
        max_tokens=row["max_tokens"],
        advantage=advantage,
        correct=correct,
    )


def decided(row: RolloutRow) -> bool:
    """Whether a forward decided a token of the row's answer."""
    return row["error"] is None and any((*row["steps"], *row["tail_steps"]))
