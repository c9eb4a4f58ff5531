"""The sub-commands that measure the engine, training and FP8 weights on this machine: their options and help.

The measurements are in the modules of the same names, which are imported when a command runs.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from tqdm import tqdm

from benchmarks.measuring import device_name, markdown, usable_device
from jobs.command_line import JsonFile, MaxTokens, ModelName, OwnThreads, Seed
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.command_line import CommandText, Fields, command, refuse_given
from mbd_core.engine.config import Dtype
from mbd_core.fields import DATA, DECODING, ENGINE, MODEL, OUTPUT, Flag, Ge, Gt, configuration
from mbd_core.files import check_new_file, write_json
from mbd_core.models.model_config import Fp8Parts
from mbd_core.models.shapes import SHAPES
from mbd_core.multitf.recipes.shipped import TINY_MODEL

TRAINING_SHAPES = {"tiny": TINY_MODEL, **SHAPES}
LEAST_ANSWERS = 16
AT_ONCE = (1, 2, 4, 8, 16, 32, 64)

Buffer = Annotated[tuple[Annotated[int, Ge(1)], ...], Flag("Slots of each sequence.", DATA, commas=True)]


@configuration(panel=ENGINE)
class BenchmarkOptions:
    """The device, the repetitions and the results file of a benchmark."""

    repeats: Annotated[int, Ge(1)] = 3
    """Repetitions; the compared runs take turns."""
    static: Annotated[bool | None, Flag(name="--static/--dynamic")] = None
    """Every slot of every row, or resident slots only (default: static on a GPU)"""
    device: str | None = None
    """cpu or cuda (default: the GPU if there is one)"""
    threads: OwnThreads = None
    json: JsonFile = None

    def begin(self) -> None:
        """Refuse an existing file of results, and set torch's threads."""
        import torch

        if self.json is not None:
            check_new_file(self.json)
        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def write(self, command_line: CommandText, settings: Mapping[str, Any], **parts: Any) -> None:
        """Write the results, with the command that gave them, if a file is named. A command prints them first, so that
        a file that cannot be written costs nothing."""
        if self.json is not None:
            write_json(self.json, {"settings": {"command": command_line, **settings}, **parts})


FIVE_TIMES, TWENTY_TIMES = BenchmarkOptions(repeats=5), BenchmarkOptions(repeats=20)


def run_decoders(
    command_line: CommandText,
    *,
    models: Annotated[
        tuple[str, ...], Flag("Models whose name begins with one of these (default: all)", MODEL, commas=True)
    ] = (),
    fixtures: Annotated[
        Path | None,
        Flag("Folder of model folders, for the families' models (default: random weights)", MODEL, metavar="DIR"),
    ] = None,
    requests: Annotated[int, Ge(1), Flag("Requests, decoded one by one and all at once.", DATA)] = 8,
    methods: Annotated[
        tuple[str, ...], Flag("Methods whose name contains one of these (default: all)", DECODING, commas=True)
    ] = (),
    max_tokens: MaxTokens = 64,
    measuring: Annotated[BenchmarkOptions, Fields("repeats", "threads", "json")] = FIVE_TIMES,
) -> int:
    """Every decoder compared with a plain loop of the same method: tokens, forwards, wall and processor time.

    A row is one method on one model. The plain loop decodes one request after another without an engine. The engine
    decodes the same requests one after another, and all at once. The medians of the repetitions count. The exit code
    is 1 if the engine's tokens are not the plain loop's (if they differ in float32, float64 decides). The models are
    the shipped models, and a model of each family at the size of the parity fixtures. LLaDA's canvases are also
    decoded as one batch, as in LLaDA's own code.
    """
    import torch

    from benchmarks.canvas_batch import is_batched, measure_batch
    from benchmarks.decoders import chosen_cases, measure_method, model_cases, print_rows

    measuring.begin()
    repeats = measuring.repeats
    pairs = chosen_cases(
        model_cases(fixtures, num_requests=requests, max_tokens=max_tokens),
        models,
        methods,
    )
    in_batch = [
        (model, method)
        for model, method in pairs
        if is_batched(method.decoding.canvas) and not model.model.config.shift_logits
    ]
    rows, batches = [], []
    num_runs = repeats * (3 * len(pairs) + 2 * len(in_batch))
    with tqdm(total=num_runs, unit="run", desc="decoders", mininterval=1.0) as bar:
        tick = partial(bar.update, 1)
        for model, method in pairs:
            bar.set_postfix_str(f"{model.label}, {method.label}", refresh=False)
            rows.append(measure_method(model, method, max_tokens=max_tokens, repeats=repeats, tick=tick))
        for model, method in in_batch:
            bar.set_postfix_str(f"{model.label}, {method.label}, as one batch", refresh=False)
            batches.append(measure_batch(model, method, max_tokens=max_tokens, repeats=repeats, tick=tick))
    settings = {
        "requests_at_once": requests,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    print(f"N = {requests} requests at once; medians of {repeats}\n")
    code = print_rows(rows, batches)
    measuring.write(command_line, settings, rows=rows, batches=batches)
    return code


def run_engine(
    command_line: CommandText,
    *,
    model: Annotated[str, Flag(f"A model folder, or a shape: {', '.join(SHAPES)}.", MODEL)] = "sdar-50m",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, Flag("(default: bfloat16 on a GPU, else float32)", MODEL)
    ] = None,
    fp8: Annotated[
        Fp8Parts | None,
        Flag("Round these weights to FP8; blocks: the experts, with a scale for each block as in FP8 folders.", MODEL),
    ] = None,
    uniform_routing: Annotated[bool, Flag("Tokens choose their experts evenly.", MODEL)] = False,
    rows: Annotated[tuple[Annotated[int, Ge(1)], ...], Flag("Sequences.", DATA, commas=True)] = (8,),
    prefix: Annotated[
        tuple[Annotated[int, Ge(1)], ...], Flag("Stored tokens of each sequence.", DATA, commas=True)
    ] = (512,),
    buffer: Buffer = (1, 2, 4),
    tpf: Annotated[
        float | None,
        Gt(0),
        Flag("Tokens a forward, to state TPS (default: Table 3's, 3.47 with one slot, else 6.19)", DATA),
    ] = None,
    steps: Annotated[int, Ge(1), Flag("Measured steps.", ENGINE)] = 20,
    eager: Annotated[bool, Flag("On a GPU, run static steps without CUDA graphs.", ENGINE)] = False,
    attention: Annotated[str | None, Flag("The attention kernel (default: the best there is)", ENGINE)] = None,
    trace: Annotated[bool, Flag("Measure a trace recorder too.", OUTPUT)] = False,
    measuring: Annotated[BenchmarkOptions, Fields("static", "device", "threads", "json")],
) -> None:
    """A decode step of the engine compared with its bare forward and with the least time that the machine allows.

    Every combination of rows, prefix and buffer is one row: the median whole step, the median forward on the identical
    batches, and the roofline floor, whose bandwidth and FLOP/s are measured first. benchmarks/README.md explains the
    columns. The shape sdar-null has a forward of nearly nothing: its step is the engine's own work.
    """
    import torch

    from benchmarks.engine import StepBenchmark, print_report, shape_or_folder
    from benchmarks.step_timing import WARM_UP, StepCase

    measuring.begin()
    place, static = usable_device(measuring.device), measuring.static
    if eager and (place.type != "cuda" or static is False):
        raise ValueError("--eager leaves CUDA graphs out, which exist only on a GPU and without --dynamic")
    common = partial(StepCase, steps=steps, static=static, attention=attention, trace=trace)
    benchmark = StepBenchmark(
        model=model,
        config=shape_or_folder(model),
        device=place,
        dtype=getattr(torch, dtype or ("bfloat16" if place.type == "cuda" else "float32")),
        cases=[
            common(prefix=length, rows=number, buffer_size=slots, graphs=False if eager else None)
            for length, number, slots in product(prefix, rows, buffer)
        ],
        fp8=fp8,
        tpf=tpf,
        uniform_routing=uniform_routing,
    )
    benchmark.check()
    with tqdm(total=len(benchmark.cases) * (steps + WARM_UP), unit="step", desc=model, mininterval=1.0) as bar:
        report = benchmark.run(tick=partial(bar.update, 1))
    print_report(report, trace=trace)
    measuring.write(command_line, **report)


def run_forward(
    command_line: CommandText,
    *,
    model: ModelName = "smollm2-135m",
    dtype: Annotated[
        tuple[Dtype, ...],
        Flag("Dtypes, one after another; transformers runs in auto's dtype beside int8.", ENGINE, commas=True),
    ] = ("float32", "auto"),
    prefix: Annotated[int, Ge(1), Flag("Stored tokens before each row.", DATA)] = 150,
    measuring: Annotated[BenchmarkOptions, Fields("repeats", "threads", "json")] = TWENTY_TIMES,
) -> None:
    """An autoregressive model's forward and step on this CPU, compared with transformers' forward of the same number
    of tokens.

    The cases are one row with 1, 8, 16 or 32 new tokens, and eight rows with one new token. Steps and forwards take
    turns; the medians count.
    """
    import torch

    from benchmarks.forward import CASES, COLUMNS, measure_forwards

    measuring.begin()
    folder, rows = model_folder(model), list[dict[str, Any]]()
    runs = sum(2 + (tokens == 1) for _, tokens in CASES) * measuring.repeats
    with tqdm(total=runs * len(dtype), unit="run", desc=model, mininterval=1.0) as bar:
        for each in dtype:
            rows += measure_forwards(
                folder, each, prefix=prefix, repeats=measuring.repeats, tick=partial(bar.update, 1)
            )
    print(f"{model}, {torch.get_num_threads()} threads, {prefix} tokens before each row\n\n{markdown(rows, COLUMNS)}")
    measuring.write(command_line, {"torch": torch.__version__, "prefix": prefix}, rows=rows)


def run_buffer(
    command_line: CommandText,
    *,
    model: Annotated[
        str, Flag(f"A shipped model's name or a folder; or a shape, with random weights: {', '.join(SHAPES)}.", MODEL)
    ] = "tiny-mbd",
    concurrency: Annotated[tuple[Annotated[int, Ge(1)], ...], Flag("Requests at once.", DATA, commas=True)] = AT_ONCE,
    buffer: Buffer = (1, 2, 4),
    budget: Annotated[
        tuple[Annotated[int, Ge(1)], ...], Flag("Block budgets, for the largest buffer.", DATA, commas=True)
    ] = (16,),
    max_tokens: MaxTokens = 128,
    answers: Annotated[int, Ge(1), Flag("Measured answers a row, at least 16 in all.", DATA)] = 2,
    measuring: BenchmarkOptions,
    predict: Annotated[str | None, Flag("Also compute the table of this model.", OUTPUT, metavar="SHAPE")] = None,
    bandwidth: Annotated[float, Gt(0), Flag("GB/s of the machine of that table.", OUTPUT)] = 3350.0,
    tflops: Annotated[float, Gt(0), Flag("TFLOP/s of that machine, in 16 bits.", OUTPUT)] = 989.0,
    prefix: Annotated[int, Ge(0), Flag("Stored tokens of each sequence in that table.", OUTPUT)] = 512,
) -> None:
    """Tokens a second and tokens per forward of fixed buffer sizes and of block budgets, by the requests at once.

    A request follows as soon as another ends; the fastest repetition counts. --predict computes the tokens a second of
    another model on another machine, from its roofline and the measured tokens per forward. The default machine is an
    H100, by its data sheet.
    """
    import torch

    from benchmarks.buffer import COLUMNS, BufferCase, load_model_and_requests, measure_load, predict_load
    from benchmarks.roofline import Machine

    measuring.begin()
    if predict is None:
        refuse_given(run_buffer, "without --predict", bandwidth=bandwidth, tflops=tflops, prefix=prefix)
    elif predict not in SHAPES:
        raise ValueError(f"--predict {predict} must be one of {', '.join(SHAPES)}")
    place, repeats = usable_device(measuring.device), measuring.repeats
    buffers = [BufferCase(size=size) for size in buffer]
    buffers += [BufferCase(size=max(buffer), budget=blocks) for blocks in budget]
    number = max(64, *concurrency)
    decoder, requests = load_model_and_requests(model, max_tokens=max_tokens, device=place, number=number)
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(concurrency) * len(buffers) * repeats, unit="run", desc=model, mininterval=1.0) as bar:
        for number in concurrency:
            measurements = measure_load(
                decoder,
                requests,
                buffers,
                rows=number,
                answers=max(LEAST_ANSWERS, answers * number),
                repeats=repeats,
                static=measuring.static,
                tick=partial(bar.update, 1),
            )
            rows += [{"model": model, **row} for row in measurements]
    print(f"{model}, {device_name(place)}, {torch.get_num_threads()} threads; the fastest of {repeats} runs\n")
    print(markdown(rows, COLUMNS))
    predictions: list[dict[str, Any]] = []
    if predict is not None:
        tpf = {r["buffer_size"]: r["tpf"] for r in rows if r["block_budget"] is None and r["rows"] == max(concurrency)}
        machine = Machine(bandwidth=bandwidth * 1e9, flops=tflops * 1e12)
        predictions = predict_load(SHAPES[predict], machine, tpf, rows=concurrency, prefix=prefix)
        columns = {f"tps_{size}": f"tok/s at N_buf={size}|.0f" for size in buffer}
        columns = {"rows": "at once", **columns, "best": "best N_buf", "budget": "its blocks in all"}
        print(f"\nComputed: {predict} in 16 bits at {bandwidth:g} GB/s and {tflops:g} TFLOP/s, prefix {prefix}\n")
        print(markdown(predictions, columns))
    measuring.write(command_line, {}, rows=rows, computed=predictions)


def run_modes(
    command_line: CommandText,
    *,
    model: Annotated[
        str | None,
        Flag(
            "A model folder or a shape with causal rows (default: a model trained here, in half a minute)",
            MODEL,
        ),
    ] = None,
    concurrency: Annotated[tuple[Annotated[int, Ge(1)], ...], Flag("Requests at once.", DATA, commas=True)] = AT_ONCE,
    budget: Annotated[
        tuple[Annotated[int, Ge(1)], ...], Flag("Block budgets of the adaptive mode.", DATA, commas=True)
    ] = (64,),
    max_tokens: MaxTokens = 96,
    answers: Annotated[int, Ge(1), Flag("Measured answers a row, at least 64 in all.", DATA)] = 1,
    updates: Annotated[int, Ge(0), Flag("Updates of the model that is trained here.", DATA)] = 120,
    measuring: Annotated[BenchmarkOptions, Fields("repeats", "device", "threads", "json")],
) -> None:
    """Tokens a second of single tokens (ar), self-speculation and diffusion, and of the mode that follows the load.

    A request follows as soon as another ends. The modes take turns of a tenth of a second; the median round counts.
    Under a block budget, an engine decodes single tokens instead of drafts if more requests run than it has blocks, or
    if drafts do not pay. It learns whether they pay, so fresh engines and engines with an earlier run are separate
    rows.
    """
    import torch

    from benchmarks.modes import COLUMNS, FIXED, Mode, load_causal, measure_modes, trained_here

    measuring.begin()
    if model is not None:
        refuse_given(run_modes, "with --model, which is not trained here", updates=updates)
    place, repeats = usable_device(measuring.device), measuring.repeats
    decoder = trained_here(num_updates=updates, device=place) if model is None else load_causal(model, device=place)
    chosen = [Mode(method=name) for name in FIXED]
    chosen += [Mode(method="linear-spec", budget=n, fresh=fresh) for n in budget for fresh in (True, False)]
    name, rows = model or f"a model trained here for {updates} updates", list[dict[str, Any]]()
    with tqdm(total=len(concurrency) * repeats, unit="round", desc="modes", mininterval=1.0) as bar:
        for number in concurrency:
            rows += measure_modes(
                decoder,
                chosen,
                rows=number,
                answers=max(64, answers * number),
                max_tokens=max_tokens,
                repeats=repeats,
                tick=partial(bar.update, 1),
            )
    print(f"{name}, {device_name(place)}, {torch.get_num_threads()} threads; the median of {repeats} rounds\n")
    print(markdown(rows, COLUMNS))
    measuring.write(command_line, {"model": name}, rows=rows)


def run_train(
    command_line: CommandText,
    *,
    model: Annotated[
        tuple[str, ...],
        Flag(f"Shapes, with random weights: {', '.join(TRAINING_SHAPES)}.", MODEL, metavar="SHAPE,...", commas=True),
    ] = ("tiny", "sdar-50m"),
    layouts: Annotated[
        tuple[str, ...],
        Flag("Largest noise-groups, each with a number of random layouts.", DATA, metavar="G:N,...", commas=True),
    ] = ("2:0", "2:2", "4:2", "4:3"),
    length: Annotated[tuple[Annotated[int, Ge(1)], ...], Flag("Tokens of a sample.", DATA, commas=True)] = (128,),
    count: Annotated[bool, Flag("Count operations instead of measuring.", OUTPUT)] = False,
    compiled: Annotated[
        bool, Flag("Time updates of one layout, eager and by train.compile, in turn.", OUTPUT)
    ] = False,
    lora: Annotated[int | None, Ge(1), Flag("With --compiled: train an adapter of this rank.", DATA)] = None,
    data: Annotated[
        Path | None,
        Flag(
            "Count the padding of batches of this prepared data, with --pack and without, instead of measuring.",
            DATA,
            metavar="DIR",
        ),
    ] = None,
    pack: Annotated[
        tuple[Annotated[int, Ge(1)], ...], Flag("With --data: tokens of samples that are packed.", DATA, commas=True)
    ] = (2048,),
    batch: Annotated[int, Ge(1), Flag("With --data: samples of a step.", DATA)] = 32,
    micro_batch: Annotated[
        tuple[Annotated[int, Ge(1)], ...], Flag("With --data: sequences computed at once.", DATA, commas=True)
    ] = (1, 4),
    measuring: Annotated[BenchmarkOptions, Fields("repeats", "device", "threads", "json")],
) -> None:
    """Samples a second and peak memory of one training sequence with a shared clean stream, and of separate sequences.

    It times forward and backward of one sample in float32, both ways in turn, on a CPU in processor seconds. A third
    run shows the gain of computing the last layer's MLP on labelled tokens only. --count counts the forward's
    operations instead, with dense attention and with FlexAttention's blocks, also for models that do not fit here.
    --data counts the padding of batches, in the shapes' blocks. --compiled times whole updates.
    """
    import torch

    from benchmarks import training
    from mbd_core.multitf.states.training_attention import TrainingAttention

    kinds = {"--count": count, "--compiled": compiled, "--data": data is not None}
    if len(chosen := [name for name, is_given in kinds.items() if is_given]) > 1:
        raise ValueError(f"{chosen[0]} and {chosen[1]} make different tables; leave one of them out")
    if data is None:
        refuse_given(run_train, "without --data", pack=pack, batch=batch, micro_batch=micro_batch)
    else:
        refuse_given(run_train, "with --data", layouts=layouts, length=length)
    if compiled:
        refuse_given(run_train, "with --compiled, which times updates of one layout", layouts=layouts)
    else:
        refuse_given(run_train, "without --compiled", lora=lora)
    if count or data is not None:
        where = f"with {chosen[0]}, which measures nothing"
        refuse_given(run_train, where, repeats=measuring.repeats, device=measuring.device)
    measuring.begin()
    groups, shapes = [_layouts(text) for text in layouts], {}
    for name in model:
        if name not in TRAINING_SHAPES:
            raise ValueError(f"--model {name} must be one of {', '.join(TRAINING_SHAPES)}")
        shapes[name] = TRAINING_SHAPES[name]
        for tokens in length:
            training.check_length(tokens, TRAINING_SHAPES[name].block_size)
    cases = [{"length": tokens, "max_group": g, "num_random": n} for tokens in length for g, n in groups]
    place, repeats = usable_device(measuring.device), measuring.repeats
    if not (count or data or compiled):
        attention = TrainingAttention("auto", place)
        print(f"{device_name(place)}, {torch.get_num_threads()} threads, {attention.describe()}; {repeats} steps each")
    rows: list[dict[str, Any]] = []
    for name, config in shapes.items():
        if data is not None:
            of_model = training.padding_rows(config, data, micro_batches=micro_batch, packs=pack, batch_size=batch)
            title = f"{of_model[0]['samples']} samples in blocks of {config.block_size}, {batch} a step"
            columns = training.PADDING
        elif count:
            of_model = [training.count_row(config, **case) for case in cases]
            title, columns = "TFLOP of one sample's forward", training.COUNT_COLUMNS
        elif compiled:
            of_model = [
                training.compiled_row(config, lora=lora, length=tokens, repeats=repeats, device=place)
                for tokens in tqdm(length, unit="row", desc=name, mininterval=1.0)
            ]
            title, columns = f"updates of four samples on {device_name(place)}", training.COMPILED
        else:
            measure = partial(training.measure_row, training.random_model(config, place), attention, repeats=repeats)
            of_model = [measure(**case) for case in tqdm(cases, unit="row", desc=name, mininterval=1.0)]
            title, columns = (
                f"forward and backward of one sample of {', '.join(map(str, length))} tokens",
                training.COLUMNS,
            )
        print(f"\n{name}: {title}\n\n{markdown(of_model, columns)}")
        rows += [{"model": name, **row} for row in of_model]
    measuring.write(command_line, {}, rows=rows)


def _layouts(text: str) -> tuple[int, int]:
    group, mark, number = text.partition(":")
    if not (mark and group.isdecimal() and number.isdecimal() and int(group) >= 2):
        raise ValueError(f"--layouts {text} must be G:N, a group size of at least 2 and a number of random layouts")
    return int(group), int(number)


def run_rounding(
    command_line: CommandText,
    *,
    model: ModelName,
    limit: Annotated[int, Ge(1), Flag("Sequences that are compared.", DATA)] = 16,
    seed: Seed = 0,
    parts: Annotated[
        Literal["experts", "all", "blocks", "int8"] | None,
        Flag(
            "The weights that become FP8 (default: the experts, or all in a dense model), or int8: all products.",
            ENGINE,
        ),
    ] = None,
    measuring: Annotated[BenchmarkOptions, Fields("json")],
) -> None:
    """The accuracy that rounded weights cost a model, and the memory that they save.

    The model's logits are compared before and after rounding, at half of the positions of each solution: with all
    tokens shown, and with those positions masked as in decoding. The texts are both tasks' test problems; a model
    folder without a tokenizer gets random ids. It runs on the GPU if there is one.
    """
    import torch

    from benchmarks.rounding import COLUMNS, rounding_rows

    measuring.begin()
    rows = rounding_rows(model_folder(model), parts=parts, num_sequences=limit, seed=seed, device=usable_device(None))
    print(markdown(rows, COLUMNS))
    bytes_after, bytes_before, dtype = rows[0]["bytes_after"], rows[0]["bytes_before"], rows[0]["dtype"]
    print(f"\nweights: {bytes_after:,} bytes, {bytes_before:,} before ({bytes_after / bytes_before:.2f} of {dtype})")
    measuring.write(command_line, {"torch": torch.__version__}, rows=rows)


decoders = command(run_decoders, "python -m benchmarks decoders")
engine = command(run_engine, "python -m benchmarks engine")
forward = command(run_forward, "python -m benchmarks forward")
buffer = command(run_buffer, "python -m benchmarks buffer")
modes = command(run_modes, "python -m benchmarks modes")
train = command(run_train, "python -m benchmarks train")
rounding = command(run_rounding, "python -m benchmarks rounding")
