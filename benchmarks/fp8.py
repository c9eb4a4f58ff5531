"""Report what FP8 weights cost a model in accuracy, and what they save in memory: the options, and the table."""

from typing import Annotated

import typer

from benchmarks.tables import markdown
from jobs.command_line import DATA, ENGINE, JsonFile, ModelName, Seed, command, command_text
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.files import check_new_file, write_json
from mbd_core.models.model_config import Parts


def run(
    context: typer.Context,
    *,
    model: ModelName,
    limit: Annotated[int, typer.Option(help="Sequences that are compared.", min=1, rich_help_panel=DATA)] = 16,
    seed: Seed = 0,
    parts: Annotated[
        Parts | None,
        typer.Option(help="What is rounded (default: the experts, or all without any)", rich_help_panel=ENGINE),
    ] = None,
    json: JsonFile = None,
) -> None:
    """What FP8 weights cost a model in accuracy, and what they save in memory.

    The model's logits are compared before and after rounding, at half of the positions of each solution: with all
    tokens shown, and with those positions masked as in decoding. The texts are both tasks' test problems; a model
    folder without a tokenizer gets random ids. It runs on the GPU if there is one.
    """
    import torch

    from benchmarks.fp8_logits import COLUMNS, fp8_rows

    if json is not None:
        check_new_file(json)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = fp8_rows(model_folder(model), parts=parts, num_sequences=limit, seed=seed, device=device)
    if json is not None:
        write_json(json, {"command": command_text(context), "torch": torch.__version__, "rows": rows})
    print(markdown(rows, COLUMNS))
    after, before, dtype = rows[0]["bytes_after"], rows[0]["bytes_before"], rows[0]["dtype"]
    print(f"\nweights: {after:,} bytes, {before:,} before ({after / before:.2f} of {dtype})")


main = command(run, "python -m benchmarks fp8")
