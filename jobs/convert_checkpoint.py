"""Convert a checkpoint: single or stacked experts, Hugging Face folder or PyTorch distributed checkpoint (DCP).

python jobs/convert_checkpoint.py --from LLaDA2.0-mini --to mini-fused --experts fused
python jobs/convert_checkpoint.py --from step_1000 --to trained --format hf --experts per-expert --config mini-fused
python jobs/convert_checkpoint.py --random llada2-mini --to mini   # random weights in the real layout

Streams: about one shard is in memory at a time. Values are copied as they are. Open only checkpoints that you trust:
a distributed checkpoint's metadata is a pickle.
"""

import argparse
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from cluster.signals import interrupt_on
from mbd_core.checkpoint.conversion import convert
from mbd_core.checkpoint.saving import save_random
from mbd_core.checkpoint.tensor_names import ExpertLayout
from mbd_core.models.shapes import SHAPES

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXPERTS: dict[str, ExpertLayout] = {"fused": "fused", "per-expert": "per_expert"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from", dest="source", type=Path, metavar="DIR", help="checkpoint to read")
    source.add_argument(
        "--random", choices=sorted(SHAPES), metavar="SHAPE", help=f"or random weights: {', '.join(SHAPES)}"
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--experts", choices=sorted(EXPERTS), help="how experts lie (default: as they do)")
    parser.add_argument("--format", choices=("hf", "dcp"), help="what to write (default: as the source is)")
    parser.add_argument(
        "--config", type=Path, metavar="DIR", help="folder with config.json and tokenizer (default: --from)"
    )
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="largest file to write (default: 5)")
    args = parser.parse_args(argv)
    if not 0 < args.max_shard_gb < math.inf:
        parser.error(f"--max-shard-gb {args.max_shard_gb} must be above 0")
    try:
        with any_stop_as_interrupt():
            write(args)
    except (ValueError, OSError) as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"convert_checkpoint: stopped; {args.to} was not written", file=sys.stderr)
        return 130
    print(f"wrote {args.to}; {memory()}")
    return 0


@contextmanager
def any_stop_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end the body as Ctrl-C does; a second signal does not disturb what clears away after it."""
    before = {number: signal.getsignal(number) for number in STOPS}
    interrupt_on(*STOPS)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write(args: argparse.Namespace) -> None:
    """Make the folder, behind a progress bar."""
    bar: tqdm | None = None

    def progress(done: int, total: int) -> None:
        nonlocal bar
        bar = bar or tqdm(total=total, unit="B", unit_scale=True, desc=args.to.name)
        bar.update(done - bar.n)

    try:
        if args.random is not None:
            make_random(args, progress)
        else:
            convert(
                args.source,
                args.to,
                experts=EXPERTS.get(args.experts),
                to=args.format,
                config_from=args.config,
                max_shard_bytes=int(args.max_shard_gb * 10**9),
                progress=progress,
            )
    finally:
        if bar is not None:
            bar.close()


def make_random(args: argparse.Namespace, progress: Callable[[int, int], None]) -> None:
    if args.experts or args.format or args.config:
        raise ValueError("--random writes a Hugging Face folder as published; convert it afterwards")
    save_random(SHAPES[args.random], args.to, max_shard_bytes=int(args.max_shard_gb * 10**9), progress=progress)


def memory() -> str:
    """The most memory this process held: all of it, and how much is mapped files that the system may take back."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, files = (int(status[key].split()[0]) / 1e6 for key in ("VmHWM", "RssFile"))
    return f"at most {peak:.1f} GB of memory, {files:.1f} GB of it mapped files at the end"


if __name__ == "__main__":
    sys.exit(main())
