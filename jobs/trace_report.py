"""The command `mbd trace`: a report on decode traces, which it reads from files or records itself."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jobs.command_line import MaxTokens, OutFolder, Overwrite
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.command_line import CommandText, Fields, command, refuse_given
from mbd_core.engine.config import EngineConfig
from mbd_core.fields import DATA, DECODING, MODEL, OUTPUT, Flag, Ge
from mbd_core.files import check_target_folder, folder_beside
from mbd_core.tasks import gsm_mini

if TYPE_CHECKING:
    from mbd_core.trace.traced_run import TracedRun

KIND = "trace report"
NUM_PROMPTS = 16


@dataclass(frozen=True, kw_only=True)
class TraceSource:
    """Runs to report on, and the request that the replay page shows.

    request_id  the request to replay; `None` if the runs have no request in common
    decode      the text of a token; if `None`, the page shows ids
    """

    runs: list[TracedRun]
    settings: dict[str, Any]
    request_id: str | None
    note: str = ""
    eos_token_ids: tuple[int, ...] = ()
    decode: Callable[[int], str] | None = field(default=None, repr=False)


def run(
    command_line: CommandText,
    *,
    traces: Annotated[
        tuple[str, ...],
        Flag("Trace files, or folders of their parts; NAME= is optional.", positional=True, metavar="NAME=TRACE"),
    ] = (),
    model: Annotated[
        str | None,
        Flag(
            "Record traces of this model instead of reading files: a shipped model's name, or a model folder.", MODEL
        ),
    ] = None,
    engine: Annotated[EngineConfig, Fields("draft_model")],
    tokenizer: Annotated[
        str | None,
        Flag("The model of the traces; the replay page then shows text instead of ids.", MODEL, metavar="MODEL"),
    ] = None,
    prompt: Annotated[
        tuple[str, ...], Flag("A question to the model; repeatable.", DATA, default="16 questions of gsm-mini")
    ] = (),
    block_size: Annotated[
        int | None, Ge(1), Flag("Block size of traces that were recorded without tokens and do not state it.", DATA)
    ] = None,
    max_tokens: MaxTokens = 128,
    methods: Annotated[
        tuple[str, ...],
        Flag("The methods to record, as those of `mbd sweep`.", DECODING, default="SingleBD and MultiBD", commas=True),
    ] = (),
    buffer_size: Annotated[
        int | None, Ge(1), Flag("MultiBD's slots.", DECODING, default="the model's, if more than 1, or 4")
    ] = None,
    decoding: Annotated[
        dict[str, Any] | None, Flag('Decoding fields, as {"tau_m2t": 0.8}.', DECODING, metavar="JSON")
    ] = None,
    out: OutFolder,
    request: Annotated[str | None, Flag("Request to replay.", OUTPUT, default="the first of all traces")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write the numbers of decode traces, the plots of Figure 2, and a replay page.

    It reads recorded traces, or with --model decodes prompts under SingleBD and MultiBD, or under --methods, and
    records the traces in detail. DIR gets report.md, report.json, PNG files and, if tokens were recorded, replay.html,
    which works without a server or network. No cluster is needed.
    """
    from mbd_core.trace.report import write_trace_report

    if bool(traces) == bool(model):
        raise ValueError("give traces to read, or --model to record some, and not both")
    if model is None:
        asked: dict[str, object] = {"draft_model": engine.draft_model, "prompt": prompt, "max_tokens": max_tokens}
        asked |= {"methods": methods, "buffer_size": buffer_size, "decoding": decoding}
        refuse_given(run, "without --model", **asked)
    else:
        refuse_given(run, "with --model", request=request, tokenizer=tokenizer, block_size=block_size)
    paths = dict(map(_named, traces))
    if methods and buffer_size:
        raise ValueError("--buffer-size has no meaning with --methods; give buffer_size in --decoding")
    if len(paths) < len(traces):
        raise ValueError(f"two traces have the same name ({', '.join(paths)}); name them with NAME=TRACE")
    check_target_folder(out, KIND, overwrite=overwrite)
    for path in paths.values():
        if path.resolve().is_relative_to(out.resolve()):
            raise ValueError(f"{path} lies in --out {out}, which would be replaced; give another folder")
    with folder_beside(out, KIND, overwrite=overwrite) as folder:
        if model is None:
            source = _read(paths, tokenizer, block_size, request)
        else:
            source = _record(
                model, engine, folder / "traces", prompt, decoding or {}, buffer_size, max_tokens, methods=methods
            )
        settings = {**source.settings, "command": command_line}
        text = write_trace_report(source.runs, folder, settings=settings)
        replay = _replay(source, folder / "replay.html")
    print(text)
    print(f"report: {out / 'report.md'}, with report.json and the pictures beside it")
    print(replay or f"replay: {out / 'replay.html'}")


def _named(text: str) -> tuple[str, Path]:
    name, mark, path = text.partition("=")
    if mark and name and not Path(text).exists():
        return name, Path(path)
    return Path(text).resolve().stem, Path(text)


def _read(paths: dict[str, Path], model: str | None, block_size: int | None, request: str | None) -> TraceSource:
    """The runs in trace files. Raises `ValueError` that names the file and its fault."""
    from mbd_core.checkpoint.config import load_config
    from mbd_core.checkpoint.tokenizer import load_tokenizer
    from mbd_core.trace.replay import shared_request
    from mbd_core.trace.traced_run import read_run

    runs = [read_run(path, name=name, block_size=block_size) for name, path in paths.items()]
    detailed = [run for run in runs if run.detailed]
    if request is not None:
        for run in detailed:
            run.request(request)
        if not detailed:
            raise ValueError(f"request '{request}' cannot be replayed: no trace was recorded with tokens")
    elif detailed:
        request = shared_request(detailed)
    settings = {"traces": ", ".join(map(str, paths.values()))}
    if model is None:
        return TraceSource(runs=runs, settings=settings, request_id=request)
    folder = model_folder(model)
    config = load_config(folder)
    tokenizer = load_tokenizer(folder, config)
    return TraceSource(
        runs=runs,
        settings=settings,
        request_id=request,
        eos_token_ids=config.eos_token_ids,
        decode=lambda token: str(tokenizer.decode([token])),
    )


def _record(
    name: str,
    engine: EngineConfig,
    folder: Path,
    prompts: Sequence[str],
    fields: dict[str, Any],
    buffer_size: int | None,
    max_tokens: int,
    *,
    methods: Sequence[str],
) -> TraceSource:
    """Decode the prompts under each method and trace it. Raises `ValueError` for settings that are not possible."""
    import torch

    from jobs.trace_comparison import compared_decodings, named_decodings, record_run
    from mbd_core.checkpoint.chat import question_prompt
    from mbd_core.checkpoint.folder import read_folder
    from mbd_core.checkpoint.loading import load_model
    from mbd_core.serving.tokens.draft_folder import check_draft_folder, read_draft
    from mbd_core.serving.tokens.load import decoding_defaults, engine_dtype

    if "buffer_size" in fields and not methods:
        raise ValueError("--decoding must not name buffer_size; give --buffer-size instead")
    model_files = read_folder(model_folder(name))
    tokenizer, config = model_files.tokenizer, model_files.config
    draft = read_draft(engine)
    if draft is not None:
        check_draft_folder(model_files, draft, engine)
    defaults, size = decoding_defaults(model_files, engine), config.block_size
    if methods:
        decodings = named_decodings(defaults, fields, methods, block_size=size)
    else:
        decodings = compared_decodings(defaults, fields, block_size=size, buffer_size=buffer_size)
    if not prompts:
        problems = itertools.islice(gsm_mini.generate(split="test", seed=0), NUM_PROMPTS)
        prompts = [problem["question"] for problem in problems]
    ids = [question_prompt(tokenizer, text) for text in prompts]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = engine_dtype("auto", model_files, device)
    model = load_model(model_files.path, dtype=dtype, device=device)
    draft_model = None if draft is None else load_model(draft.path, dtype=dtype, device=device)
    settings: dict[str, Any] = {"model": name, "prompts": len(prompts), "max_tokens": max_tokens}
    if draft is not None:
        settings["draft model"] = draft.path.name
    runs = []
    for method, decoding in decodings.items():
        recorded = record_run(
            model,
            ids,
            folder / f"{method.replace('/', '-')}.parquet",
            method=method,
            decoding=decoding,
            max_tokens=max_tokens,
            vocab_limit=len(tokenizer),
            draft_model=draft_model,
        )
        run = recorded.run
        if draft is not None and decoding.verify is not None and decoding.verify.draft_model:
            run = replace(run, name=f"{run.name}, drafts of {draft.path.name}")
        runs.append(run)
        settings |= recorded.settings
    return TraceSource(
        runs=runs,
        settings=settings,
        request_id="0",
        note=prompts[0],
        eos_token_ids=config.eos_token_ids,
        decode=lambda token: str(tokenizer.decode([token])),
    )


def _replay(source: TraceSource, path: Path) -> str | None:
    """Write the replay page. Returns `None`, or the reason why there is no page."""
    from mbd_core.trace.replay import replay_runs

    detailed = [run for run in source.runs if run.detailed]
    if not detailed:
        return "no replay page: no trace was recorded with tokens (TraceRecorder(detail=True))"
    if source.request_id is None:
        return "no replay page: the traces have no request in common; name one of a single trace with --request"
    replay_runs(
        detailed,
        path,
        request_id=source.request_id,
        note=source.note,
        eos_token_ids=source.eos_token_ids,
        decode=source.decode,
    )
    return None


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
