"""A bystander's latency under long prompts, as a ratio to its quiet one."""

import asyncio
import sys
from typing import Annotated

import numpy as np
import typer

from jobs.command_line import DATA, MODEL, command
from jobs.load.bystander import Bystander, measure_bystander
from jobs.load.stream_client import Target, open_session, served_models

LOAD = "Load"  # a panel of --help
SHORT = "Tom has 12 pens and buys 9 pens. How many pens does Tom have now?"


def run(
    url: Annotated[str, typer.Option(help="The endpoint, without /v1.", rich_help_panel=MODEL)],
    model: Annotated[
        str | None, typer.Option(help="Its model.", show_default="the first it serves", rich_help_panel=MODEL)
    ] = None,
    characters: Annotated[int, typer.Option(help="Of a long prompt.", min=1, rich_help_panel=DATA)] = 100_000,
    crowd: Annotated[int, typer.Option(help="Senders of long prompts.", min=1, rich_help_panel=LOAD)] = 8,
    requests: Annotated[
        int,
        typer.Option(help="Short requests in quiet, and as many beside long ones.", min=4, rich_help_panel=LOAD),
    ] = 40,
    max_tokens: Annotated[int, typer.Option(help="Of a short request.", min=1, rich_help_panel=LOAD)] = 16,
    request_seconds: Annotated[
        float, typer.Option(help="Time limit of a request.", min=0.1, rich_help_panel=LOAD)
    ] = 600.0,
) -> None:
    """Measure how long short requests take in quiet and beside long prompts, in turns, and print the ratio.

    python jobs/bench_bystander.py --url http://127.0.0.1:8000 --characters 100000

    A prompt that exceeds the model's length is refused by the endpoint after it has looked at it, which is a load too.
    """
    found = asyncio.run(_measure(url.rstrip("/"), model, characters, crowd, requests, max_tokens, request_seconds))
    for name, seconds in (("quiet", found.quiet), ("crowded", found.crowded)):
        middle, late = np.percentile(seconds, [50, 95])
        print(f"{name:>8}: {len(seconds)} requests, median {1e3 * middle:.1f} ms, 95th percentile {1e3 * late:.1f} ms")
    errors = f"; of them refused or failed: {', '.join(found.long_errors)}" if found.long_errors else ""
    print(f"beside {found.num_long} long prompts of {characters:,} characters{errors}")
    print(f"crowded / quiet: median {found.ratio(50):.2f}, 95th percentile {found.ratio(95):.2f}")


async def _measure(
    url: str, model: str | None, characters: int, crowd: int, requests: int, max_tokens: int, seconds: float
) -> Bystander:
    async with open_session(seconds=seconds) as session:
        served = await served_models(session, url)
        if model is None and not served:
            raise RuntimeError(f"{url} serves no model")
        target = Target(
            name="bystander", url=url, model=model or served[0], route="completions", max_tokens=max_tokens
        )
        long_prompt = ("the pens of Tom are 12 and " * (characters // 27 + 1))[:characters]
        return await measure_bystander(
            session, target, prompt=SHORT, long_prompt=long_prompt, requests=requests, crowd=crowd
        )


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
