"""A real model and its own base side by side on one machine: right answers, tokens a forward, tokens a second.

`make real` asks fifty unseen questions, and times fifteen of them. The study asks more arms more questions, and keeps
the rows: `python -m research compare --limit 200 --out out/real/compare`. `--report-only` prints their table again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tqdm import tqdm

from mbd_core.command_line import command, refuse_given
from mbd_core.engine.config import Dtype
from mbd_core.fields import DATA, DECODING, ENGINE, MODEL, OUTPUT, Flag, Ge, load
from mbd_core.files import check_target_folder, folder_beside, write_text
from research.real.arms import ARMS, BASE, LLAMA_CPP, Answered, Arm
from research.real.data import EXTRACT, PackageFields, Row, streams
from research.real.grading import GRADERS, has_schema
from research.real.others import ArmReply, by_llama_cpp, by_transformers, llama_cpp_file
from research.real.report import report

if TYPE_CHECKING:
    from mbd_core import LLM

KIND, ROWS = "comparison of a real model with its base", "rows.jsonl"
MAX_TOKENS = 128
WITH_SCHEMA = "package-fields"


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
        Path | None, Flag("Folder that keeps the rows; DIR-partial, if an arm fails.", OUTPUT, metavar="DIR")
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
    chosen = {**({} if only else ARMS), **{name: load(Arm, values) for name, values in (arms or {}).items()}}
    if out is not None:
        check_target_folder(out, KIND, overwrite=overwrite)
    gguf, without = None, ""
    try:
        gguf = None if only and llama_cpp is None else llama_cpp_file(llama_cpp, ARMS[BASE].model)
    except (ValueError, RuntimeError, OSError) as error:
        if llama_cpp is not None:
            raise
        without = str(error)
    questions = drawn_questions(limit, gsm8k_folder, split, tasks)
    if any(arm.schema for arm in chosen.values()) and not any(task == WITH_SCHEMA for task, _ in questions):
        raise ValueError(f"an arm's schema is that of {WITH_SCHEMA}, of which there is no question; leave it out")
    num_alone = len(questions) if at_once == 1 else timed
    rows: list[Answered] = []
    try:
        for name, arm in chosen.items():
            for tau, decoding in _decodings(arm, tau_m2t):
                label = name if tau is None else f"{name}, tau_m2t {tau:g}"
                opened = partial(LLM, arm.model, dtype=arm.dtype or dtype, **decoding)
                own = _engines_answers(label, opened, arm, questions, at_once=at_once, num_alone=num_alone)
                rows += [replace(row, arm=name, tau=tau) for row in own]
        if transformers:
            asked = by_transformers(ARMS[BASE].model, dtype, max_tokens=MAX_TOKENS)
            rows += list(answers_of("base, transformers' generate", asked, questions, num_timed=num_alone))
        if gguf is not None:
            try:
                with by_llama_cpp(gguf, max_tokens=MAX_TOKENS) as asked:
                    rows += list(answers_of(LLAMA_CPP, asked, questions, num_timed=num_alone))
            except RuntimeError as error:
                without = str(error)
        if likelihood:
            rows = read_by_base(rows)
    except BaseException:
        if out is not None and rows:
            partial_out = out.with_name(f"{out.name}-partial")
            _keep(rows, partial_out, overwrite=True)
            print(f"the answers of the arms before it are kept in {partial_out}", file=sys.stderr)
        raise
    if out is not None:
        _keep(rows, out, overwrite=overwrite)
    print("\n".join(report(rows)))
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


def _decodings(arm: Arm, thresholds: Sequence[float]) -> Iterator[tuple[float | None, dict[str, Any]]]:
    """The arm's decoding with each threshold; its own, and `None`, if it has no threshold or none are named."""
    own = {**arm.decoding, **({} if arm.draft_model is None else {"draft_model": arm.draft_model})}
    if not thresholds or not arm.decoding or "causal" in arm.decoding or arm.draft_model is not None:
        yield None, own
    else:
        yield from ((tau, {**own, "tau_m2t": tau}) for tau in thresholds)


def _keep(rows: Sequence[Answered], out: Path, *, overwrite: bool) -> None:
    with folder_beside(out, KIND, overwrite=overwrite) as folder:
        write_text(folder / ROWS, "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows))


def kept_rows(folder: Path) -> list[Answered]:
    """The rows that a comparison kept. Raises `ValueError` if the folder has none."""
    if not (folder / ROWS).is_file():
        raise ValueError(f"{folder} holds no {ROWS}; name the --out of an earlier comparison")
    return [load(Answered, json.loads(line)) for line in (folder / ROWS).read_text(encoding="utf-8").splitlines()]


def drawn_questions(
    limit: int, gsm8k_folder: Path | None, split: Literal["valid", "test"], tasks: Sequence[str] = ()
) -> list[tuple[str, Row]]:
    """Questions of the tasks in turn; of all tasks, if none are named. A machine without Debian's package lists has no
    questions of `package-fields`. Raises `ValueError` for a task without questions."""
    found: dict[str, Iterator[Row]] = {name: stream(split) for name, stream in streams(gsm8k_folder).items()}
    if shutil.which("apt-cache") is None:
        del found["package-fields"]
    if not set(tasks) <= set(found):
        raise ValueError(f"--tasks {','.join(tasks)}: this machine has questions of {', '.join(found)}")
    found = {name: rows for name, rows in found.items() if not tasks or name in tasks}
    share = math.ceil(limit / len(found))
    by_task = [[(task, row) for row in itertools.islice(rows, share)] for task, rows in found.items()]
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
