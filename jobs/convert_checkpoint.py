"""Convert a checkpoint's layout, make a block-diffusion model of a base, or write random weights: the options.

mbd convert LLaDA2.0-mini --out mini-fused --experts fused
mbd convert step_1000 --to hf --out trained --experts per-expert --config mini-fused
mbd convert Qwen3-0.6B --to block-diffusion --out diffusion
mbd convert diffusion --adapter out/adapter --out out/mine   # a LoRA adapter, merged into its base
mbd convert --random llada2-mini --out mini   # random weights in the real layout, and a tokenizer
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from tqdm import tqdm

from jobs.command_line import OutFolder, Overwrite
from mbd_core.checkpoint.model_family import DiffusionLayout, ExpertLayout
from mbd_core.command_line import command
from mbd_core.fields import MODEL, MOST, OUTPUT, Flag, Ge, Gt, Le
from mbd_core.models.shapes import SHAPES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXPERTS: dict[str, ExpertLayout] = {"fused": "fused", "per-expert": "per_expert"}
Progress = Callable[[int, int], None]


def run(
    *,
    source: Annotated[
        Path | None,
        Flag("Checkpoint to read: a folder, or a model's name.", MODEL, positional=True, metavar="[DIR]"),
    ] = None,
    random: Annotated[
        str | None,
        Flag(
            f"Instead of DIR: random weights and a tokenizer, in the shape {', '.join(SHAPES)}.",
            MODEL,
            metavar="SHAPE",
        ),
    ] = None,
    config: Annotated[
        Path | None, Flag("Folder with config.json and tokenizer.", MODEL, metavar="DIR", default="DIR")
    ] = None,
    target: OutFolder,
    to: Annotated[
        Literal["hf", "dcp", "block-diffusion"] | None,
        Flag(
            "Hugging Face folder, distributed checkpoint, or the block-diffusion model of an autoregressive folder.",
            OUTPUT,
            default="the source's",
        ),
    ] = None,
    layout: Annotated[
        DiffusionLayout | None,
        Flag(
            "With --to block-diffusion: the layout; sdar for Qwen3 and Qwen3-MoE, fast-dllm-v2 (shifted) for Qwen2.",
            OUTPUT,
            default="a2d",
        ),
    ] = None,
    block_size: Annotated[
        int | None, Ge(1), Flag("With --to block-diffusion: tokens of a block.", OUTPUT, default="32")
    ] = None,
    mask_token: Annotated[
        str | None,
        Flag(
            "With --to block-diffusion: the mask token.",
            OUTPUT,
            metavar="TOKEN",
            default="the tokenizer's own, an unused special token, or a new one",
        ),
    ] = None,
    adapter: Annotated[
        Path | None, Flag("A LoRA adapter's folder (PEFT), which is merged into the weights.", MODEL, metavar="DIR")
    ] = None,
    experts: Annotated[
        Literal["fused", "per-expert"] | None, Flag("The experts' layout.", OUTPUT, default="the source's")
    ] = None,
    max_shard_gb: Annotated[float, Gt(0), Le(MOST), Flag("Largest file to write, in GB.", OUTPUT)] = 5.0,
    overwrite: Overwrite = False,
) -> int:
    """Convert a checkpoint: single or stacked experts, Hugging Face folder or PyTorch distributed checkpoint (DCP),
    autoregressive or block-diffusion model; or merge an adapter.

    About one shard is in memory at a time. Without --adapter values are copied as they are. Open only checkpoints that
    you trust: a distributed checkpoint's metadata is a pickle.
    """
    from mbd_core.checkpoint.adaptation.block_diffusion import convert_to_block_diffusion
    from mbd_core.checkpoint.adaptation.gguf_files import find_gguf
    from mbd_core.checkpoint.conversion import convert
    from mbd_core.checkpoint.saving import save_random
    from mbd_core.checkpoint.shipped import model_folder

    if (source is None) == (random is None):
        raise ValueError("give either DIR, a checkpoint to read, or --random, a shape by name")
    if random is not None and random not in SHAPES:
        raise ValueError(f"--random {random} is unknown; choose one of {', '.join(SHAPES)}")
    if random is not None and (experts or to or config or adapter):
        raise ValueError("--random writes a Hugging Face folder as published; convert it afterwards")
    settings: dict[str, Any] = {"layout": layout, "block_size": block_size, "mask_token": mask_token}
    given = [name for name, value in settings.items() if value is not None]
    if to != "block-diffusion" and given:
        raise ValueError(f"--{given[0].replace('_', '-')} needs --to block-diffusion")
    if to == "block-diffusion" and (experts or config or adapter):
        raise ValueError("--to block-diffusion takes no --experts, --config or --adapter; convert once more for them")
    try:
        with progress_bar(target.name) as progress:
            writing = WriteKeywords(max_shard_bytes=int(max_shard_gb * 10**9), overwrite=overwrite, progress=progress)
            if random is not None:
                save_random(SHAPES[random], target, tokenizer=tokenizer_of(random), **writing)
            elif source is not None and to != "block-diffusion":
                kind = None if experts is None else EXPERTS[experts]
                source = source if source.exists() and not find_gguf(source) else model_folder(str(source))
                convert(source, target, experts=kind, to=to, config_from=config, adapter=adapter, **writing)
            elif source is not None:
                choices = {name: settings[name] for name in given}
                plan = convert_to_block_diffusion(model_folder(str(source)), target, **choices, **writing)
                print(f"{plan.config.architecture}, blocks of {plan.config.block_size}, mask {plan.mask}")
    except KeyboardInterrupt:
        print(f"convert_checkpoint: stopped; {target} was not written", file=sys.stderr)
        return 130
    print(f"wrote {target}; {peak_memory()}")
    return 0


def tokenizer_of(shape: str) -> "PreTrainedTokenizerBase | None":
    """A tokenizer for a shape's folder.

    Prints a line and returns `None` if the shape's vocabulary cannot write text.
    """
    from mbd_core.checkpoint.shape_tokenizer import shape_tokenizer, writes_text

    config = SHAPES[shape]
    if writes_text(config):
        return shape_tokenizer(config)
    print(f"{shape} gets no tokenizer: {config.vocab_size} tokens cannot write text, so it is measured, not served")
    return None


class WriteKeywords(TypedDict):
    """The keywords of each function that writes a folder."""

    max_shard_bytes: int
    overwrite: bool
    progress: Progress


@contextmanager
def progress_bar(name: str) -> Iterator[Progress]:
    """Yields a function of the bytes written and their total, which shows them as a bar from its first call on."""
    bar: tqdm | None = None

    def show(num_done: int, total: int) -> None:
        nonlocal bar
        bar = bar or tqdm(total=total, unit="B", unit_scale=True, desc=name)
        bar.update(num_done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


def peak_memory() -> str:
    """The most memory this process held, and how much of it is mapped files, which the system can take back."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, files = (int(status[key].split()[0]) / 1e6 for key in ("VmHWM", "RssFile"))
    return f"at most {peak:.1f} GB of memory, {files:.1f} GB of it mapped files at the end"


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
