"""A real model and its own base side by side on one machine: right answers, tokens a forward, tokens a second.

`make real` asks fifty unseen questions, and times fifteen of them. The study asks more arms more questions, and keeps
the rows: `python -m research compare --limit 200 --out out/real/compare`. `--report-only` prints their table again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tqdm import tqdm

from mbd_core.command_line import command, refuse_given
from mbd_core.engine.config import Dtype
from mbd_core.fields import DATA, DECODING, ENGINE, MODEL, OUTPUT, Flag, Ge, load
from mbd_core.files import check_target_folder, folder_beside, write_text
from research.real.arms import ARMS, BASE, LLAMA_CPP, Answered, Arm
from research.real.data import EXTRACT, NO_ROWS, PackageFields, Row, streams
from research.real.grading import GRADERS, has_schema
from research.real.others import ArmReply, by_llama_cpp, by_transformers, llama_cpp_file
from research.real.report import report
from research.tables import rows_of

if TYPE_CHECKING:
    from mbd_core import LLM

KIND, ROWS = "comparison of a real model with its base", "rows.jsonl"
MAX_TOKENS = 128
WITH_SCHEMA = "package-fields"


@dataclass(frozen=True, kw_only=True)
class AskedArm:
    """An arm as it is asked. `tau` is its threshold `tau_m2t`, `None` its own or none; `settings` are the keywords of
    its `LLM`."""

    name: str
    arm: Arm
    tau: float | None
    settings: Mapping[str, Any]

    @property
    def label(self) -> str:
        return self.name if self.tau is None else f"{self.name}, tau_m2t {self.tau:g}"


def run(
    *,
    limit: Annotated[int, Ge(1), Flag("Questions, spread over the tasks that this machine has.", DATA)] = 50,
    gsm8k_folder: Annotated[
        Path | None, Flag("GSM8K's folder, for a fourth task.", DATA, name="--gsm8k", metavar="DIR")
    ] = None,
    tasks: Annotated[
        tuple[str, ...], Flag("Questions of these tasks alone.", DATA, metavar="LIST", default="all", commas=True)
    ] = (),
    split: Annotated[Literal["valid", "test"], Flag("Split of the questions.", DATA)] = "test",
    arms: Annotated[
        dict[str, Any] | None,
        Flag('More arms, as {"control": {"model": "DIR", "decoding": {}, "dtype": "int8"}}.', MODEL, metavar="JSON"),
    ] = None,
    only: Annotated[bool, Flag("Ask the arms of --arms alone.", MODEL)] = False,
    at_once: Annotated[
        int, Ge(1), Flag("Questions that an arm answers at once; above 1 those of --timed alone are timed.", ENGINE)
    ] = 1,
    timed: Annotated[
        int, Ge(0), Flag("With --at-once: the first questions, which are asked one at a time and timed.", ENGINE)
    ] = 0,
    tau_m2t: Annotated[
        tuple[float, ...],
        Flag(
            "Thresholds of the arms that have one; with several the table of each arm's AUP is printed, too.",
            DECODING,
            metavar="X,...",
            default="each folder's own",
            commas=True,
        ),
    ] = (),
    dtype: Annotated[Dtype, Flag("As mbd serve takes it.", ENGINE)] = "auto",
    transformers: Annotated[bool, Flag("Ask the base by transformers' generate, too.", MODEL)] = False,
    llama_cpp: Annotated[
        Path | None,
        Flag(
            "The GGUF file that llama.cpp reads. Where llama-cpp-python is installed, it is asked, too.",
            MODEL,
            metavar="FILE",
            default="the base's; none with --only",
        ),
    ] = None,
    likelihood: Annotated[bool, Flag("Measure how likely the answers are to the base, too.", MODEL)] = False,
    out: Annotated[
        Path | None,
        Flag("Folder that keeps the rows; DIR-partial, DIR-partial-2, ..., if an arm fails.", OUTPUT, metavar="DIR"),
    ] = None,
    overwrite: Annotated[bool, Flag("Replace a folder that this command wrote before.", OUTPUT)] = False,
    report_only: Annotated[
        Path | None, Flag("Ask nothing; print the table of the rows in this folder.", OUTPUT, metavar="DIR")
    ] = None,
) -> None:
    """Asks a real model and its own base the same unseen questions, and prints one table.

    The models are fetched at first use. Every arm runs in the same engine and precision on the same cores.
    """
    from mbd_core import LLM

    if report_only is not None:
        refuse_given(
            run,
            "with --report-only, which asks nothing",
            limit=limit,
            gsm8k_folder=gsm8k_folder,
            tasks=tasks,
            split=split,
            arms=arms,
            only=only,
            at_once=at_once,
            timed=timed,
            tau_m2t=tau_m2t,
            dtype=dtype,
            transformers=transformers,
            llama_cpp=llama_cpp,
            likelihood=likelihood,
            out=out,
            overwrite=overwrite,
        )
        print("\n".join(report(kept_rows(report_only))))
        return
    if out is None:
        refuse_given(run, "without --out", overwrite=overwrite)
    if at_once == 1:
        refuse_given(run, "with --at-once 1, which times all questions", timed=timed)
    if only and not arms:
        raise ValueError("--only needs --arms; leave it out or name some")
    if tasks and "gsm8k" not in tasks:
        refuse_given(run, f"with --tasks {','.join(tasks)}", gsm8k_folder=gsm8k_folder)
    chosen = {**({} if only else ARMS), **_given_arms(arms or {})}
    if out is not None:
        check_target_folder(out, KIND, overwrite=overwrite)
        check_target_folder(_free_beside(out), KIND)
    questions = drawn_questions(limit, gsm8k_folder, split, tasks)
    if any(arm.schema for arm in chosen.values()) and not any(task == WITH_SCHEMA for task, _ in questions):
        raise ValueError(f"an arm's schema is that of {WITH_SCHEMA}, of which there is no question; leave it out")
    asked_arms = [asked for name, arm in chosen.items() for asked in _asked_arms(name, arm, tau_m2t, dtype)]
    for asked in asked_arms:
        check_arm(asked)
    if transformers or likelihood:
        check_arm(AskedArm(name="the base", arm=ARMS[BASE], tau=None, settings={}))
    gguf, without = None, ""
    try:
        gguf = None if only and llama_cpp is None else llama_cpp_file(llama_cpp, ARMS[BASE].model)
    except (ValueError, RuntimeError, OSError) as error:
        if llama_cpp is not None:
            raise
        without = str(error)
    num_alone = len(questions) if at_once == 1 else timed
    with _keeping(out, overwrite=overwrite) as rows:
        for asked in asked_arms:
            opened = partial(LLM, asked.arm.model, **asked.settings)
            own = _engines_answers(asked.label, opened, asked.arm, questions, at_once=at_once, num_alone=num_alone)
            rows += [replace(row, arm=asked.name, tau=asked.tau) for row in own]
        if transformers:
            ask = by_transformers(ARMS[BASE].model, dtype, max_tokens=MAX_TOKENS)
            rows += list(answers_of("base, transformers' generate", ask, questions, num_timed=num_alone))
        if gguf is not None:
            try:
                with by_llama_cpp(gguf, max_tokens=MAX_TOKENS) as ask:
                    rows += list(answers_of(LLAMA_CPP, ask, questions, num_timed=num_alone))
            except RuntimeError as error:
                without = str(error)
        if likelihood:
            rows[:] = read_by_base(rows)
    if without and llama_cpp is not None:
        raise RuntimeError(without)
    if without:
        print(without)


def _engines_answers(
    label: str,
    opened: Callable[..., LLM],
    arm: Arm,
    questions: Sequence[tuple[str, Row]],
    *,
    at_once: int,
    num_alone: int,
) -> Iterator[Answered]:
    """An arm's answers: the first `num_alone` from an engine of one row, the others from one of `at_once` rows."""
    alone, beside = questions[:num_alone], questions[num_alone:]
    if alone:
        with opened(max_rows=1) as llm:
            yield from answers_of(label, partial(_ask_engine, llm, arm), alone)
    if beside:
        print(label, file=sys.stderr)
        with opened(max_rows=at_once) as llm:
            replies = _ask_at_once(llm, arm, [row["question"] for _, row in beside])
        yield from (answered(label, task, row, replies[row["question"]], seconds=0.0) for task, row in beside)


def _given_arms(arms: Mapping[str, Any]) -> dict[str, Arm]:
    return {name: load(Arm, values, noun="field", path=f"{name}.") for name, values in arms.items()}


def _asked_arms(name: str, arm: Arm, thresholds: Sequence[float], dtype: Dtype) -> Iterator[AskedArm]:
    """The arm with each threshold; with its own decoding, if it has no threshold or none are named."""
    own = {**arm.decoding, "dtype": arm.dtype or dtype}
    own |= {} if arm.draft_model is None else {"draft_model": arm.draft_model}
    if not thresholds or not arm.decoding or "causal" in arm.decoding or arm.draft_model is not None:
        yield AskedArm(name=name, arm=arm, tau=None, settings=own)
    else:
        yield from (AskedArm(name=name, arm=arm, tau=tau, settings={**own, "tau_m2t": tau}) for tau in thresholds)


def check_arm(asked: AskedArm) -> None:
    """Raises `ValueError` that names the arm, if its model's folder or its decoding will be refused by the engine.

    No weights are read; a shipped model's folder is made at its first use.
    """
    from jobs.api.call_options import unknown
    from jobs.api.keywords import DECODING as FIELDS
    from jobs.api.llm import read_settings

    known = {*FIELDS, "method"}
    try:
        for name in sorted(asked.arm.decoding.keys() - known):
            raise unknown("decoding field", name, known)
        read_settings(asked.arm.model, asked.settings)
    except ValueError as error:
        raise ValueError(f"{asked.label}: {error}") from None


@contextmanager
def _keeping(out: Path | None, *, overwrite: bool) -> Iterator[list[Answered]]:
    """Rows, to which the block adds. At its end their table is printed, and they are kept in `out`.

    If the block or the keeping fails, the rows that there are lie in a new folder beside `out`.
    """
    rows: list[Answered] = []
    try:
        try:
            yield rows
        finally:
            if rows:
                print("\n".join(report(rows)))
        if out is not None:
            _keep(rows, out, overwrite=overwrite)
    except BaseException:
        if out is not None and rows:
            _keep_beside(rows, out)
        raise


def _keep_beside(rows: Sequence[Answered], out: Path) -> None:
    place = _free_beside(out)
    try:
        _keep(rows, place, overwrite=False)
    except (OSError, ValueError) as error:  # what failed before it is the command's error
        print(f"the finished answers cannot be kept in {place}: {error}", file=sys.stderr)
    else:
        print(f"the finished answers are kept in {place}", file=sys.stderr)


def _free_beside(out: Path) -> Path:
    """The first of DIR-partial, DIR-partial-2, ... that is not there yet: rows of an earlier failure stay."""
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    places = (out.with_name(f"{out.name}-partial{number}") for number in numbers)
    return next(place for place in places if not os.path.lexists(place))


def _keep(rows: Sequence[Answered], out: Path, *, overwrite: bool) -> None:
    with folder_beside(out, KIND, overwrite=overwrite) as folder:
        write_text(folder / ROWS, "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows))


def kept_rows(folder: Path) -> list[Answered]:
    """The rows that a comparison kept. Raises `ValueError` if the folder has none, and for a bad row."""
    if not (folder / ROWS).is_file():
        raise ValueError(f"{folder} holds no {ROWS}; name the --out of an earlier comparison")
    return rows_of(folder / ROWS, Answered)


def drawn_questions(
    limit: int, gsm8k_folder: Path | None, split: Literal["valid", "test"], tasks: Sequence[str] = ()
) -> list[tuple[str, Row]]:
    """Questions of the tasks in turn; of all tasks, if none are named.

    Raises `ValueError` for a named task of which this machine has no questions; an unnamed one is left out, and stderr
    says so. A machine without Debian's package lists has no questions of `package-fields`.
    """
    possible = streams(gsm8k_folder)
    if shutil.which("apt-cache") is None:
        del possible[WITH_SCHEMA]
    if not set(tasks) <= set(possible):
        raise ValueError(f"--tasks {','.join(tasks)}: this machine has questions of {', '.join(possible)}")
    found = {
        name: [*itertools.islice(possible[name](split), limit)] for name in possible if not tasks or name in tasks
    }
    for task in (task for task in streams(gsm8k_folder) if not found.get(task) and (not tasks or task in tasks)):
        if tasks:
            raise ValueError(f"--tasks {','.join(tasks)}: this machine has no questions of {task}: {NO_ROWS[task]}")
        print(f"no questions of {task} are asked: {NO_ROWS[task]}", file=sys.stderr)
    found = {task: rows for task, rows in found.items() if rows}
    share = math.ceil(limit / len(found))
    by_task = [[(task, row) for row in rows[:share]] for task, rows in found.items()]
    in_turn = [pair for group in itertools.zip_longest(*by_task) for pair in group if pair is not None]
    return in_turn[:limit]


def answers_of(
    arm: str, ask: Callable[[str], ArmReply], questions: Sequence[tuple[str, Row]], *, num_timed: int | None = None
) -> Iterator[Answered]:
    """The arm's answers, one request at a time, of which the first `num_timed` are timed (`None`: all). The first
    question is asked once before the clock runs."""
    ask(questions[0][1]["question"])
    for number, (task, row) in enumerate(tqdm(questions, desc=f"{arm:<28}", unit="answer")):
        began = time.perf_counter()
        reply = ask(row["question"])
        seconds = time.perf_counter() - began if num_timed is None or number < num_timed else 0.0
        yield answered(arm, task, row, reply, seconds=seconds)


def answered(arm: str, task: str, row: Row, reply: ArmReply, *, seconds: float) -> Answered:
    """A reply as a row; its seconds are 0 if it was not timed."""
    return Answered(
        arm=arm,
        task=task,
        question=row["question"],
        wanted=row["answer"],
        text=reply.text,
        is_right=GRADERS[task](row["answer"], reply.text),
        is_valid=has_schema(reply.text) if task == WITH_SCHEMA else None,
        schema=reply.schema,
        tokens=reply.tokens,
        forwards=reply.forwards,
        seconds=round(seconds, 4),
        digest=hashlib.sha256(reply.text.encode()).hexdigest()[:16],
    )


def read_by_base(rows: Sequence[Answered]) -> list[Answered]:
    """The rows with their answers' likelihood under the base."""
    from research.real.likelihood import read_by

    read = read_by(ARMS[BASE].model)
    read_rows = []
    for row in tqdm(rows, desc=f"{'read by the base':<28}", unit="answer"):
        nats, tokens = read(row.question, row.text)
        read_rows.append(replace(row, nats=round(nats, 3), tokens_read=tokens))
    return read_rows


def _ask_engine(llm: LLM, arm: Arm, question: str) -> ArmReply:
    return _ask_at_once(llm, arm, [question], use_tqdm=False)[question]


def _ask_at_once(llm: LLM, arm: Arm, questions: Sequence[str], *, use_tqdm: bool = True) -> dict[str, ArmReply]:
    """The reply to each question; those under the arm's schema are asked after the others."""
    held = [question for question in questions if arm.schema and question.startswith(EXTRACT)]
    free = [question for question in questions if question not in held]
    answers = llm.chat(free, max_tokens=MAX_TOKENS, use_tqdm=use_tqdm) if free else []
    answers += llm.chat(held, max_tokens=MAX_TOKENS, use_tqdm=use_tqdm, schema=PackageFields) if held else []
    return {
        question: ArmReply(
            text=answer.text, tokens=len(answer.tokens), forwards=answer.forwards, schema=question in held
        )
        for question, answer in zip([*free, *held], answers, strict=True)
    }


main = command(run, "python -m research compare")
