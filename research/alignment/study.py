"""The options of the study of whether training states match inference. Traces are recorded, or read again."""

from pathlib import Path
from typing import Annotated, Any

from jobs.command_line import OutFolder, Overwrite, Seed
from mbd_core.command_line import CommandText, command, refuse_given
from mbd_core.fields import DATA, DECODING, MODEL, OUTPUT, Flag, Ge
from mbd_core.files import check_target_folder, folder_beside
from mbd_core.tasks.generated import GENERATED_TASKS

KIND = "alignment report"
SCHEDULES = (
    "chain_uniform",
    "sorted_uniform",
    "power_law",
    "stratified",
    "independent_uniform",
    "linear@one_group",
    "d2f_monotonic@one_group",
    "fitted",
)


def run(
    command_line: CommandText,
    *,
    models: Annotated[
        tuple[str, ...] | None,
        Flag(
            "Models to decode with: shipped models' names, or model folders (default: tiny-bd,tiny-mbd)",
            MODEL,
            metavar="MODEL,...",
            commas=True,
        ),
    ] = None,
    traces: Annotated[
        Path | None,
        Flag("Take the traces that an earlier run wrote to this folder; no model is loaded.", MODEL, metavar="DIR"),
    ] = None,
    schedules: Annotated[
        tuple[str, ...],
        Flag(
            "Noise-schedules, each with a layout or the recipe's: NAME or NAME@LAYOUT. `fitted` is fitted here.",
            DATA,
            default=", ".join(SCHEDULES),
            commas=True,
        ),
    ] = SCHEDULES,
    recipe: Annotated[
        str, Flag("The recipe that gives all other settings of the training states.", DATA)
    ] = "tiny-mbd",
    task: Annotated[
        str | None, Flag(f"What is asked: {' or '.join(GENERATED_TASKS)} (default: gsm-mini)", DATA)
    ] = None,
    limit: Annotated[int | None, Ge(2), Flag("Problems, half of them for `fitted` (default: 64)", DATA)] = None,
    draws: Annotated[int, Ge(1), Flag("Draws of each problem's layouts.", DATA)] = 8,
    bootstrap: Annotated[int, Ge(20), Flag("Samples of the intervals.", OUTPUT)] = 500,
    seed: Seed = 0,
    max_tokens: Annotated[int | None, Ge(1), Flag("Tokens of an answer, at most (default: 128)", DECODING)] = None,
    buffer_size: Annotated[
        int | None, Ge(2), Flag("Slots (default: the model's, if more than 1, or 4)", DECODING)
    ] = None,
    decoding: Annotated[
        dict[str, Any] | None, Flag('Decoding fields, as {"tau_m2t": 0.8}.', DECODING, metavar="JSON")
    ] = None,
    out: OutFolder,
    overwrite: Overwrite = False,
) -> None:
    """How far the states of training are from the states of MultiBD inference.

    Every model decodes the same problems under MultiBD, and its steps are traced. They are compared with the training
    states of noise-schedules and layouts: mask ratios by slot, running-set sizes, and their distances (MBD-LMs Section
    4.4, Appendix A). DIR gets alignment.md, alignment.json, the plots, the traces, and for each model a noise-schedule
    fitted to them, which train_multitf.py takes as --set fitted_noise=FILE. It needs no cluster.
    """
    from mbd_core.multitf.recipes.by_name import recipe_named
    from research.alignment.distances import check_schedules, compare_models
    from research.alignment.report import write_alignment
    from research.alignment.states import TracingPlan, check_models, read_models, record_models

    if traces is not None:
        asked: dict[str, object] = {"models": models, "task": task, "limit": limit, "max_tokens": max_tokens}
        asked |= {"buffer_size": buffer_size, "decoding": decoding}
        refuse_given(run, "with --traces: nothing is decoded", **asked)
    states = recipe_named(recipe).states
    check_schedules(schedules, states)
    plan = TracingPlan(
        task=task or "gsm-mini",
        num_problems=limit or 64,
        seed=seed,
        max_tokens=max_tokens or 128,
        buffer_size=buffer_size,
        decoding=decoding or {},
    )
    check_target_folder(out, KIND, overwrite=overwrite)
    settings: dict[str, Any] = {"command": command_line, "recipe": recipe, "draws": draws, "seed": seed}
    settings["bootstrap samples"] = bootstrap
    if traces is not None:
        if traces.resolve().is_relative_to(out.resolve()):
            raise ValueError(f"{traces} lies in --out {out}, which would be replaced; give another folder")
        recorded, of_record = read_models(traces)
        settings |= {"traces": str(traces), "asked": of_record}
    else:
        folders = check_models(models or ("tiny-bd", "tiny-mbd"), plan)
    with folder_beside(out, KIND, overwrite=overwrite) as folder:
        if traces is None:
            recorded = record_models(folders, plan, folder / "traces")
            settings |= {"asked": {**vars(plan)}}
        results = compare_models(recorded, schedules, states, draws=draws, num_bootstrap=bootstrap, seed=seed)
        text = write_alignment(results, folder, settings=settings)
    print(text)
    print(f"report: {out / 'alignment.md'}, with alignment.json, the pictures and the fitted noise beside it")


main = command(run, "python -m research alignment")
