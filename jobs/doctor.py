"""What this machine can do: versions, devices, kernels, isolation, Ray, memory, and what a model folder needs.

Each line comes from the code that decides in a run: the choice of a kernel, the engine's plan of its memory, the
sandbox's trial, the address that a job joins, and the requirements that the package states.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mbd_core.command_line import Fields, command
from mbd_core.fields import OUTPUT, Flag
from mbd_core.serving.tokens.endpoint_args import EndpointArgs
from mbd_core.tables import PAIRS, Cell, Table, plain

if TYPE_CHECKING:
    import torch

    from mbd_core.checkpoint.folder import ModelFolder
    from mbd_core.models.model_config import ModelConfig

DISTRIBUTION = "mbd-cluster"
SWITCHES_ON = {
    "gpu": "the project's own kernels on a GPU",
    "ray": "serving, training and sweeps",
    "s3": "storage at s3:// URLs",
    "lora": "training of LoRA adapters",
    "qlora": "training of adapters on a base in 4 bits",
    "train": "TensorBoard's files of a training",
    "harness": "lm-evaluation-harness",
    "hub": "data sets of the Hugging Face hub",
    "gguf": "models in GGUF files, and mbd fetch",
    "endpoint": "sweeps of an OpenAI endpoint",
    "tracing": "spans of OpenTelemetry",
}
"""The purpose of each extra. Developers' extras are not shown."""
NEEDED_TO_SERVE = "ray"
UNNAMED = EndpointArgs(model="tiny-mbd")
SHARED_MEMORY = Path("/dev/shm")


def run(
    endpoint: Annotated[
        EndpointArgs,
        Fields(
            *(
                "model",
                "fp8",
                "tensor_parallel",
                "engine.draft_model",
                "engine.dtype",
                "engine.max_rows",
                "engine.buffer_size",
                "engine.block_size",
            ),
            *("engine.page_size", "engine.num_pages", "engine.kv_memory_fraction", "engine.static_shapes"),
            *("engine.graphs", "engine.batch_invariant", "engine.attention"),
        ),
    ] = UNNAMED,
    *,
    as_json: Annotated[bool, Flag("Print JSON instead of tables.", OUTPUT, name="--json")] = False,
) -> int:
    """Say what this machine can do, and what a model folder needs of it.

    The options mean the same as in serving. No weights are loaded and no engine starts. Exit codes: 0: the model can
    be served here. 1: it cannot; the last line, or `obstacles` in JSON, says why. 2: bad input.
    """
    endpoint = endpoint.checked()
    obstacles: list[str] = []
    tables = [
        packages(obstacles),
        devices(),
        memory(),
        sandbox(),
        ray_clusters(obstacles),
        *model_needs(endpoint, obstacles),
    ]
    if as_json:
        parts = {table.title: as_value(table) for table in tables}
        print(json.dumps({**parts, "serves": not obstacles, "obstacles": obstacles}, indent=2))
    else:
        width = shutil.get_terminal_size().columns
        print("\n\n".join(plain(table, width=width) for table in tables))
        reason = f": {'; '.join(obstacles)}" if obstacles else ""
        print(f"\n{endpoint.name} can{'not' if obstacles else ''} be served here{reason}")
    return 1 if obstacles else 0


def as_value(table: Table) -> Any:
    """A table in JSON."""
    return {str(name): value for name, value in table.rows} if table.columns == PAIRS else table.records


def packages(obstacles: list[str]) -> Table:
    """The versions of required and of optional packages."""
    from packaging.requirements import Requirement

    rows: list[list[Cell]] = [
        ["python", platform.python_version(), None, None],
        [DISTRIBUTION, importlib.metadata.version(DISTRIBUTION), None, None],
    ]
    for text in importlib.metadata.requires(DISTRIBUTION) or ():
        need = Requirement(text)
        extra = next((name for name in SWITCHES_ON if f'extra == "{name}"' in str(need.marker)), None)
        if need.name == DISTRIBUTION or (need.marker is not None and extra is None):
            continue
        try:
            version = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        rows.append([need.name, version, str(need.specifier) or None, SWITCHES_ON.get(extra or "")])
        if extra in (None, NEEDED_TO_SERVE) and (version is None or not need.specifier.contains(version, True)):
            state = f"{need.name} {version} is installed" if version else f"{need.name} is not installed"
            obstacles.append(f"{state}, and {need.name}{need.specifier} is needed: pip install '{DISTRIBUTION}[ray]'")
    return Table(title="packages", columns=("package", "version", "wanted", "optional, for"), rows=rows)


def devices() -> Table:
    """The machine's CPUs, and each GPU."""
    import torch

    from mbd_core.ops.launch import triton_serves

    rows: list[list[Cell]] = [
        ["cpu", f"{platform.machine()}, {os.cpu_count()} cores", None, torch.get_num_threads(), False]
    ]
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        rows.append([str(device), name, "{}.{}".format(*capability), None, triton_serves(device)])
    return Table(
        title="devices", columns=("device", "name", "capability", "torch's threads", "fused kernels"), rows=rows
    )


def memory() -> Table:
    """Host memory, shared memory, GPUs' memory, and the file systems that the commands write to."""
    import psutil
    import torch

    from mbd_core.ops.machine import free_host_memory

    rows: list[list[Cell]] = [["host memory", psutil.virtual_memory().total, free_host_memory()]]
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        rows.append([f"memory of cuda:{number}", total, free])
    for path in (SHARED_MEMORY, Path(tempfile.gettempdir()), Path.cwd(), Path.home()):
        if path.is_dir():
            usage = shutil.disk_usage(path)
            rows.append([str(path), usage.total, usage.free])
    return Table(title="memory", columns=("place", "total_bytes", "free_bytes"), rows=rows)


def sandbox() -> Table:
    """The isolation of programs that models write, as found by trying it."""
    from mbd_core.evaluation.sandbox.processes import available_isolation, describe_isolation, landlock_version
    from mbd_core.evaluation.sandbox.system_calls import filter_program

    rows: list[list[Cell]] = [
        ["isolation", available_isolation()],
        ["programs run under", describe_isolation()],
        ["bubblewrap", shutil.which("bwrap")],
        ["Landlock's version", landlock_version()],
        ["filter of system calls", filter_program(read_only=True) is not None],
    ]
    return Table(title="sandbox", columns=PAIRS, rows=rows)


def ray_clusters(obstacles: list[str]) -> Table:
    """The clusters on this machine, and the cluster that a job joins."""
    try:
        from cluster.local import address_to_join, check_answer
        from cluster.ray_private import cluster_addresses
    except ImportError as error:
        obstacles.append(f"Ray cannot be imported: {error}")
        return Table(title="ray", columns=PAIRS, rows=[["cannot be imported", str(error)]])
    rows: list[list[Cell]] = [
        ["RAY_ADDRESS", os.environ.get("RAY_ADDRESS")],
        ["clusters on this machine", cluster_addresses()],
    ]
    try:
        address = address_to_join()
        rows.append(["a job joins", address or "a cluster of its own"])
        if address is not None:
            check_answer(address)
            rows.append(["it answers", True])
    except (ValueError, RuntimeError) as error:
        rows.append(["a job is refused", str(error)])
        obstacles.append(str(error))
    return Table(title="ray", columns=PAIRS, rows=rows)


def model_needs(endpoint: EndpointArgs, obstacles: list[str]) -> Iterator[Table]:
    """Tables of the model, its kernels, its weights by precision, and its KV memory."""
    import torch

    from mbd_core.checkpoint.config import eos_origin
    from mbd_core.checkpoint.folder import read_folder
    from mbd_core.engine.build import engine_block_size
    from mbd_core.engine.parallel.leader import check_size
    from mbd_core.serving.tokens.draft_folder import read_draft
    from mbd_core.serving.tokens.load import default_device, engine_dtype

    folder, draft_folder = read_folder(Path(endpoint.model)), read_draft(endpoint.engine)
    draft = None if draft_folder is None else draft_folder.config
    device, config, ranks = default_device(), folder.config, endpoint.tensor_parallel
    dtype = engine_dtype(endpoint.engine.dtype, folder, device)
    wide = torch.float32 if dtype == torch.int8 else dtype
    yield Table(
        title="model",
        columns=PAIRS,
        rows=[
            ["folder", endpoint.model],
            ["family", config.architecture],
            ["layers", config.num_layers],
            ["parameters", config.num_parameters],
            ["experts", None if config.moe is None else config.moe.num_experts],
            ["attention", config.attention],
            ["block size", endpoint.engine.block_size or config.block_size],
            ["answers end with", [_token_text(folder, token) for token in config.eos_token_ids]],
            ["named by", eos_origin(folder.path)],
            ["longest sequence", endpoint.engine.positions(config.max_positions)],
            ["computed on", f"{device.type}, {ranks} rank{'s' if ranks > 1 else ''}"],
            *[[f"can become, with --layout {layout}", text] for layout, text in adaptations(folder)],
        ],
    )
    try:
        engine_block_size(config, endpoint.engine)
        check_size(config, ranks, device=device.type)
        yield kernels(folder, draft, endpoint, device, wide)
    except ValueError as error:
        obstacles.append(str(error))
    weights, weight_bytes = weights_by_precision(folder, endpoint, device, dtype)
    yield weights
    yield kv_memory(folder, draft, endpoint, device, wide, weight_bytes, obstacles)


def adaptations(folder: ModelFolder) -> list[tuple[str, str]]:
    """The block-diffusion models that `mbd convert --to block-diffusion` makes of an autoregressive folder, by
    layout."""
    from mbd_core.checkpoint.adaptation.block_diffusion import is_autoregressive, layouts_of, plan_block_diffusion

    if not is_autoregressive(folder.config):
        return []
    plans = [(layout, plan_block_diffusion(folder, layout=layout)) for layout in layouts_of(folder.config)]
    return [(layout, f"{plan.config.architecture}, mask {plan.mask}") for layout, plan in plans]


def _token_text(folder: ModelFolder, token: int) -> str:
    return f"{folder.tokenizer.convert_ids_to_tokens(token)} ({token})"


def kernels(
    folder: ModelFolder, draft: ModelConfig | None, endpoint: EndpointArgs, device: torch.device, dtype: torch.dtype
) -> Table:
    """The chosen kernels, and for each other kernel the reason it was not chosen."""
    from mbd_core.engine.build import attention_kernel
    from mbd_core.engine.step.graphs import graphs_obstacle
    from mbd_core.ops.experts.choice import resolve_experts

    config, engine = folder.config.sharded(endpoint.tensor_parallel), endpoint.engine
    page_size = engine.resolve_page_size(engine.block_size or config.block_size)
    attentions = [
        attention_kernel(each, device, dtype, page_size, engine.attention)
        for each in (config, draft)
        if each is not None
    ]
    chosen: list[tuple[str, Any]] = list(zip(("attention", "draft model's attention"), attentions, strict=False))
    if config.moe is not None:
        expert_size, hidden_size = config.moe.intermediate_size, config.hidden_size
        gelu = config.gemma is not None
        experts = resolve_experts(device, dtype, expert_size=expert_size, hidden_size=hidden_size, gelu=gelu)
        chosen.append(("experts", experts))
    rows: list[list[Cell]] = []
    for kind, kernel in chosen:
        rows.append([kind, kernel.name, True, None])
        rows += [[kind, name, False, reason] for name, reason in kernel.reasons.items()]
    static = device.type == "cuda" if engine.static_shapes is None else engine.static_shapes
    obstacle = graphs_obstacle(engine, attentions, device, static_shapes=static)
    rows.append(["decode step", "CUDA graphs", obstacle is None, obstacle])
    return Table(title="kernels", columns=("of", "kernel", "chosen", "why not"), rows=rows)


def weights_by_precision(
    folder: ModelFolder, endpoint: EndpointArgs, device: torch.device, dtype: torch.dtype
) -> tuple[Table, int]:
    """The bytes of each rank's weights: a table by precision, and the number for the chosen precision."""
    import torch

    from mbd_core.checkpoint.block_experts import has_blocks
    from mbd_core.checkpoint.loading import planned_bytes
    from mbd_core.models.model_config import Fp8Parts
    from mbd_core.models.quantize import takes_fp8

    config, ranks = folder.config, endpoint.tensor_parallel
    parts: list[Fp8Parts] = ["all"]
    parts += [] if config.moe is None else ["experts"]
    parts += ["blocks"] if config.moe is not None and has_blocks(folder.path) else []
    parts = parts if takes_fp8(config) else []
    choices: list[tuple[torch.dtype, Fp8Parts | None]] = [(torch.float32, None), (torch.bfloat16, None)]
    choices += [(torch.int8, None)] if device.type == "cpu" else []
    choices += [(dtype, part) for part in parts]
    rows = [
        [
            str(kind).removeprefix("torch.") if part is None else f"FP8 ({part})",
            planned_bytes(config, kind, fp8=part, num_ranks=ranks),
            (kind, part) == (dtype, endpoint.fp8),
        ]
        for kind, part in choices
    ]
    weight_bytes = planned_bytes(config, dtype, fp8=endpoint.fp8, num_ranks=ranks)
    return Table(title="weights", columns=("precision", "bytes, each rank's", "chosen"), rows=rows), weight_bytes


def kv_memory(
    folder: ModelFolder,
    draft: ModelConfig | None,
    endpoint: EndpointArgs,
    device: torch.device,
    dtype: torch.dtype,
    weight_bytes: int,
    obstacles: list[str],
) -> Table:
    """The pages of KV memory that fit beside the weights by the engine's plan, and the sequences that fit in them."""
    import torch

    from mbd_core.checkpoint.loading import planned_bytes
    from mbd_core.engine.num_pages import bytes_per_page, longest_in_pages, pages_within
    from mbd_core.ops.machine import free_host_memory

    ranks, engine = endpoint.tensor_parallel, endpoint.engine
    config, total = folder.config.sharded(ranks), None
    page_size = engine.resolve_page_size(engine.block_size or config.block_size)
    page_bytes, longest = bytes_per_page(config, page_size, dtype), longest_in_pages(config, engine, page_size, draft)
    if draft is not None:  # the draft has weights of its own, and its keys lie in the same pages
        page_bytes += bytes_per_page(draft, page_size, dtype)
        weight_bytes += planned_bytes(draft, dtype)
    if device.type == "cuda":
        free, total = min(torch.cuda.mem_get_info(rank) for rank in range(min(ranks, torch.cuda.device_count())))
        pages_bytes = free - weight_bytes
    else:
        free = free_host_memory()
        pages_bytes = free - ranks * weight_bytes
        engine = replace(engine, kv_memory_fraction=engine.kv_memory_fraction / ranks)
    rows: list[list[Cell]] = [
        ["a token's bytes", page_bytes // page_size],
        ["a page's tokens", page_size],
        ["a page's bytes", page_bytes],
        ["pages of the longest sequence", longest],
        ["rows (sequences at once)", engine.max_rows],
        ["slots of a row", engine.num_slots],
    ]
    if pages_bytes < 0:
        obstacles.append(
            f"the weights take {weight_bytes * (1 if total else ranks):,} bytes and {free:,} are free; take a larger "
            "device, --fp8, or on GPUs a larger --tensor-parallel"
        )
        return Table(title="KV memory", columns=PAIRS, rows=rows)
    try:
        pages = engine.num_pages or pages_within(
            pages_bytes, config, engine, page_size=page_size, dtype=dtype, total=total, draft=draft
        )
    except ValueError as error:
        obstacles.append(str(error))
        return Table(title="KV memory", columns=PAIRS, rows=rows)
    if pages * page_bytes > pages_bytes:
        obstacles.append(
            f"num_pages={pages} take {pages * page_bytes:,} bytes, and {pages_bytes:,} are free beside the weights; "
            "take fewer, or leave --num-pages out"
        )
    rows += [
        ["pages", pages],
        ["tokens in them", (pages - 1) * page_size],
        ["longest sequences in them", (pages - 1) // longest],
        ["their bytes", pages * page_bytes],
    ]
    if total is not None:
        rows.append(["not counted", "what a step takes for itself, which an engine measures when it starts"])
    return Table(title="KV memory", columns=PAIRS, rows=rows)


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
