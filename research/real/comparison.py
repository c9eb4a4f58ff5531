"""A real model and its own base side by side on one machine: right answers, tokens a forward, tokens a second.

`make real` asks fifty unseen questions, one at a time. The study asks more arms more questions, and keeps the rows:
`python -m research compare --limit 200 --out out/real/compare`. `--report-only` prints the table of kept rows again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tqdm import tqdm

from mbd_core.command_line import command, refuse_given
from mbd_core.engine.config import Dtype
from mbd_core.evaluation.measures.statistics import p_text, sign_test, wins_and_losses
from mbd_core.fields import DATA, DECODING, ENGINE, MODEL, OUTPUT, Flag, Ge, load
from mbd_core.files import check_target_folder, folder_beside, write_text
from mbd_core.tables import Cell
from research.real.data import EXTRACT, PackageFields, Row, streams
from research.real.grading import GRADERS, has_schema
from research.real.others import ArmReply, by_llama_cpp, by_transformers, llama_cpp_file
from research.tables import table_lines

if TYPE_CHECKING:
    from mbd_core import LLM

KIND, ROWS = "comparison of a real model with its base", "rows.jsonl"
MAX_TOKENS = 128
WITH_SCHEMA = "package-fields"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A model, its decoding, and the dtype of its engine; `None` is the comparison's dtype.

    `draft_model` drafts for the model, if its decoding says so (`verify.draft_model`). With `schema` the JSON of
    `package-fields` is decoded under the schema of its fields, the other tasks' answers freely.
    """

    model: str
    decoding: Mapping[str, Any]
    dtype: Dtype | None = None
    draft_model: str | None = None
    schema: bool = False


ARMS = {
    "base, token by token": Arm(model="smollm2-135m", decoding={}),
    "SingleBD": Arm(model="smollm2-bd", decoding={"buffer_size": 1}),
    "MultiBD on the same model": Arm(model="smollm2-bd", decoding={"buffer_size": 4}),
    "MultiBD after MultiTF": Arm(model="smollm2-mbd", decoding={"buffer_size": 4}),
    "base fine-tuned, token by token": Arm(model="smollm2-ar", decoding={}),
    "MBD, token by token": Arm(model="smollm2-mbd", decoding={"causal": {"method": "ar"}}),
    "the same, drafted 16 at once": Arm(model="smollm2-mbd", decoding={"causal": {"block_length": 16}}),
}
BASE, SINGLE, NAIVE, TRAINED, CONTROL, OWN, DRAFTED = ARMS
LLAMA_CPP = "base, llama.cpp"


@dataclass(frozen=True, kw_only=True)
class Answered:
    """An arm's answer to a question, asked without other requests: its tokens, its forwards, the request's seconds.

    `is_valid` says of JSON whether it has the schema, `schema` whether it was decoded under it.
    `nats` is its negative log-likelihood under the base, which reads it as `tokens_read`. Published rows lack the
    texts, because others own them; a digest tells equal texts.
    """

    arm: str
    task: str
    is_right: bool
    tokens: int
    forwards: int
    seconds: float
    is_valid: bool | None = None
    schema: bool = False
    nats: float | None = None
    tokens_read: int = 0
    digest: str = ""
    question: str = ""
    wanted: str = ""
    text: str = ""


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
        int, Ge(1), Flag("Questions that an arm answers at once; above 1 its tokens a second mean nothing.", ENGINE)
    ] = 1,
    tau_m2t: Annotated[float | None, Flag("The threshold of all arms.", DECODING, default="each folder's own")] = None,
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
    """Asks a real model and its own base the same unseen questions, one at a time, and prints one table.

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
    rows: list[Answered] = []
    try:
        for name, arm in chosen.items():
            decoding = dict(arm.decoding)
            if tau_m2t is not None and decoding and "causal" not in decoding and arm.draft_model is None:
                decoding["tau_m2t"] = tau_m2t
            if arm.draft_model is not None:
                decoding["draft_model"] = arm.draft_model
            with LLM(arm.model, dtype=arm.dtype or dtype, max_rows=at_once, **decoding) as llm:
                if at_once == 1:
                    rows += list(answers_of(name, partial(_ask_engine, llm, arm), questions))
                    continue
                print(name, file=sys.stderr)
                replies = _ask_at_once(llm, arm, [row["question"] for _, row in questions])
                for task, row in questions:
                    rows.append(answered(name, task, row, replies[row["question"]], seconds=0.0))
        if transformers:
            asked = by_transformers(ARMS[BASE].model, dtype, max_tokens=MAX_TOKENS)
            rows += list(answers_of("base, transformers' generate", asked, questions))
        if gguf is not None:
            try:
                with by_llama_cpp(gguf, max_tokens=MAX_TOKENS) as asked:
                    rows += list(answers_of(LLAMA_CPP, asked, questions))
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


def answers_of(arm: str, ask: Callable[[str], ArmReply], questions: Sequence[tuple[str, Row]]) -> Iterator[Answered]:
    """The arm's answers, one request at a time; the first question is asked once before the clock runs."""
    ask(questions[0][1]["question"])
    for task, row in tqdm(questions, desc=f"{arm:<28}", unit="answer"):
        began = time.perf_counter()
        reply = ask(row["question"])
        seconds = time.perf_counter() - began
        yield answered(arm, task, row, reply, seconds=seconds)


def answered(arm: str, task: str, row: Row, reply: ArmReply, *, seconds: float) -> Answered:
    """A reply as a row; its seconds are 0 if it was asked beside others."""
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


def report(rows: Sequence[Answered]) -> list[str]:
    """One table. Then five sentences if the rows have all `ARMS` and were timed, one more if they have llama.cpp; else
    the arms' sign tests."""
    arms, tasks = list(dict.fromkeys(row.arm for row in rows)), list(dict.fromkeys(row.task for row in rows))
    has_valid = any(row.is_valid is not None for row in rows)
    has_nats = any(row.nats is not None for row in rows)
    lines: list[list[Cell]] = []
    for arm in arms:
        own = [row for row in rows if row.arm == arm]
        right = [_percent([row.is_right for row in own if row.task == task]) for task in tasks]
        lines.append([arm, *right, _percent([row.is_right for row in own]), f"{_tpf(own):.2f}", _tps_text(own)])
        lines[-1] += [_percent([row.is_valid for row in own if row.is_valid is not None])] if has_valid else []
        lines[-1] += [_nats_text(own)] if has_nats else []
    heads = ["", *(f"{task}, right (%)" for task in tasks), "all", "tokens a forward", "tokens a second"]
    heads += ["JSON of the schema (%)"] if has_valid else []
    heads += ["nats a token under the base"] if has_nats else []
    of = {arm: [row for row in rows if row.arm == arm] for arm in arms}
    if not set(ARMS) <= set(of) or not all(row.seconds for row in rows):
        # a kept arm may have failed midway
        whole = [arm for arm in arms if len(of[arm]) == len(of[arms[0]])]
        pairs = [
            f"- {one} alone is right in {_against(of[one], of[other], other)}. "
            f"{_same(of[one], of[other])} answers are the same."
            for one, other in itertools.combinations(whole, 2)
        ]
        return [*table_lines(heads, lines, num_text=1), *(["", "Exact sign tests:", "", *pairs] if pairs else [])]
    accuracy = {arm: _percent([row.is_right for row in own]) for arm, own in of.items()}
    return [
        *table_lines(heads, lines, num_text=1),
        "",
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
    return f"{100 * sum(values) / len(values):.0f}"


def _tpf(rows: Sequence[Answered]) -> float:
    return sum(row.tokens for row in rows) / sum(row.forwards for row in rows)


def _tps_text(rows: Sequence[Answered]) -> str:
    return f"{_tps(rows):.1f}" if all(row.seconds for row in rows) else ""


def _nats_text(rows: Sequence[Answered]) -> str:
    nats, tokens = [row.nats for row in rows if row.nats is not None], sum(row.tokens_read for row in rows)
    return f"{sum(nats) / tokens:.2f}" if len(nats) == len(rows) and tokens else ""


def _tps(rows: Sequence[Answered]) -> float:
    return sum(row.tokens for row in rows) / sum(row.seconds for row in rows)


main = command(run, "python -m research compare")
