"""The papers' printed figures, by table: MBD-LMs Tables 1 to 3, D2F Tables 1 to 4, BlockBatch Table 1.

A figure is a text as it is printed, with its model, method and benchmarks. `MODELS` alone says which model folder
holds a paper's model. The method is the decoding that the paper gives for the row (MBD-LMs Table 4, D2F Sec. 5.1 and
Table 8, BlockBatch App. E.3). Fields that a paper leaves open are not compared. One open field is compared
nevertheless: the block length of Fast-dLLM and LocalLeap is 32, their released setting, and BlockBatch's Vanilla on
LLaDA has 32 here too. Only columns that follow from others (gains, speedups, latency costs) are left out.

Not all figures can be of the whole benchmark: SDAR-8B-Chat-b4's 64.80 and 65.80 on MBPP+ are no multiples of 1/378,
and its 73.70 on HumanEval+ is no multiple of 1/164. Its average TPF by MultiBD (training-free) is printed as 2.00,
while the mean of its four TPFs is 2.02.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mbd_core.decoding.blocks.methods import D2F_TABLE_8, METHODS, TABLE_4, Family, MethodFields
from mbd_core.evaluation.report.metrics import MetricName

# A paper's name for a model -> the names of folders that hold it: as the paper prints it, and as it was released. Of
# the MBD-* models, LLaDA2-Mini-DMax and the ablations of Tables 2b and 4 no release is known to be the paper's.
MODELS: dict[str, tuple[str, ...]] = {
    "LLaDA2-Mini-DMax": ("LLaDA2-Mini-DMax",),
    "MBD-LLaDA2-Mini-DMax": ("MBD-LLaDA2-Mini-DMax",),
    "LLaDA2-Mini": ("LLaDA2-Mini", "LLaDA2.0-mini"),
    "MBD-LLaDA2-Mini": ("MBD-LLaDA2-Mini",),
    "SDAR-8B-Chat-b32": ("SDAR-8B-Chat-b32",),
    "MBD-SDAR-8B-Chat-b32": ("MBD-SDAR-8B-Chat-b32",),
    "SDAR-8B-Chat-b4": ("SDAR-8B-Chat-b4", "SDAR-8B-Chat"),
    "MBD-SDAR-8B-Chat-b4": ("MBD-SDAR-8B-Chat-b4",),
    "LLaDA2-Mini-CAP": ("LLaDA2-Mini-CAP", "LLaDA2.0-mini-CAP"),
    "LLaDA2.1-Mini": ("LLaDA2.1-Mini", "LLaDA2.1-mini"),
    "LLaDA-Instruct-8B": ("LLaDA-Instruct-8B", "LLaDA-8B-Instruct"),
    "D2F-LLaDA": ("D2F-LLaDA", "D2F_LLaDA_Instruct_8B_Lora"),
    "Dream-Base-7B": ("Dream-Base-7B", "Dream-v0-Base-7B"),
    "D2F-Dream": ("D2F-Dream", "D2F_Dream_Base_7B_Lora"),
    "LLaDA-1.5-8B": ("LLaDA-1.5-8B", "LLaDA-1.5"),
}
BLOCKS: MethodFields = {"prompt_attention": "block_causal", "tokens_per_step": 1, "fallback": "confidence"}
PARTS: MethodFields = {"t2t": None, "soft": None, "canvas": None}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A printed number: the mean of `quantity` over `tasks`, each decoded with the fields at the same place."""

    printed: str
    quantity: MetricName
    model: str
    tasks: tuple[str, ...]
    methods: tuple[MethodFields, ...]


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A row; `group` is printed above it. `None` stands where nothing is comparable."""

    group: str
    name: str
    figures: Sequence[Figure | None]


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table; `recipes` name how its problems were asked, and `heads` are its columns after the first."""

    title: str
    recipes: Sequence[str]
    heads: Sequence[str]
    rows: Sequence[PaperRow]

    def figures(self) -> Sequence[Figure]:
        return [figure for row in self.rows for figure in row.figures if figure is not None]


# -- MBD-LMs --------------------------------------------------------------------------------------------------------

FOUR: Mapping[str, Family] = {"gsm8k": "math", "math500": "math", "mbpp-plus": "code", "humaneval-plus": "code"}
LABELS = {"gsm8k": "GSM8K", "math500": "MATH500", "mbpp-plus": "MBPP+", "humaneval-plus": "HumanEval+"}
SINGLE, MULTI = "SingleBD (Native)", "MultiBD (training-free)"

# base model, block size, then the rows SINGLE, MULTI and MBD-*
TABLE_1 = (
    ("LLaDA2-Mini-DMax", 32, "91.89 5.70 76.80 6.13 72.22 6.14 77.44 7.44 79.59 6.35 459.54"),
    ("LLaDA2-Mini-DMax", 32, "89.84 8.76 73.80 9.08 72.22 8.44 76.83 10.96 78.17 9.31 651.98"),
    ("LLaDA2-Mini-DMax", 32, "91.74 8.95 75.00 9.31 70.11 8.34 77.44 10.78 78.57 9.34 661.28"),
    ("LLaDA2-Mini", 32, "91.89 2.27 74.20 2.83 75.66 3.25 78.05 5.53 79.95 3.47 247.41"),
    ("LLaDA2-Mini", 32, "92.65 2.76 73.60 3.53 72.49 3.97 75.61 7.37 78.59 4.41 301.81"),
    ("LLaDA2-Mini", 32, "91.96 5.55 79.20 6.02 72.49 5.35 80.49 7.85 81.03 6.19 449.18"),
    ("SDAR-8B-Chat-b32", 32, "90.07 2.52 65.60 3.81 52.65 1.83 67.68 2.00 69.00 2.54 141.64"),
    ("SDAR-8B-Chat-b32", 32, "89.01 2.78 60.60 5.06 52.12 1.97 65.85 2.24 66.89 3.01 156.35"),
    ("SDAR-8B-Chat-b32", 32, "89.16 3.08 68.00 5.08 58.99 4.87 62.80 4.82 69.74 4.46 210.42"),
    ("SDAR-8B-Chat-b4", 4, "91.05 1.33 72.80 1.46 64.80 1.13 73.70 1.07 75.59 1.25 85.46"),
    ("SDAR-8B-Chat-b4", 4, "90.45 2.39 70.60 2.68 65.80 1.55 74.39 1.47 75.31 2.00 129.59"),
    ("SDAR-8B-Chat-b4", 4, "91.81 2.28 72.40 2.52 64.29 2.62 72.56 2.24 75.27 2.42 148.65"),
)
TABLE_2A = (
    ("LLaDA2-Mini-CAP", 32, "91.74 3.08 77.80 3.71 84.77 3.40 247.30"),
    ("LLaDA2-Mini-CAP", 32, "91.21 4.00 77.20 4.94 84.21 4.47 319.17"),
    ("LLaDA2.1-Mini", 32, "93.03 4.12 81.40 4.87 87.22 4.50 390.64"),
    ("LLaDA2.1-Mini", 32, "92.27 5.80 81.00 7.20 86.63 6.50 558.52"),
)
# model (none: an ablation that was not released), whether it decodes several blocks, the row's name and figures
TABLE_2B = (
    ("LLaDA2-Mini-DMax", False, SINGLE, "84.67 6.57 536.89"),
    ("", True, "+ systematic layouts", "83.22 9.71 774.03"),
    ("", True, "+ random layouts", "82.72 9.42 747.46"),
    ("MBD-LLaDA2-Mini-DMax", True, "systematic + random layouts (ours)", "84.59 9.87 805.34"),
    ("", True, "D2F-style monotonic scheduler", "79.34 8.76 657.74"),
    ("", True, "random scheduler", "83.14 9.70 771.74"),
    ("", True, "sorted-uniform scheduler", "81.28 9.73 748.73"),
    ("MBD-LLaDA2-Mini-DMax", True, "chain-uniform scheduler (ours)", "84.59 9.87 805.34"),
)
# average TPF, step latency in ms, TPS on the four benchmarks, their average
TABLE_3 = (
    ("LLaDA2-Mini", False, "3.47 7.07 344.05 403.45 496.19 824.94 517.16"),
    ("MBD-LLaDA2-Mini", True, "6.19 8.78 687.87 707.89 646.73 941.18 745.92"),
    ("LLaDA2-Mini-DMax", False, "6.35 9.02 700.82 730.60 754.97 931.55 779.49"),
    ("MBD-LLaDA2-Mini-DMax", True, "9.34 11.20 834.52 851.07 896.65 1124.43 926.67"),
)


def _mbd_figure(printed: str, quantity: MetricName, model: str, tasks: Sequence[str], *, multi: bool) -> Figure | None:
    """A figure of a model decoded as Table 4 says; a MBD-* model has its base's MultiBD row."""
    if not model:
        return None
    base = model.removeprefix("MBD-")
    fields = [TABLE_4[base][FOUR[task]]["multi" if multi else "single"] for task in tasks]
    block_size = 4 if base.endswith("-b4") else 32
    methods = tuple({**BLOCKS, **PARTS, "block_size": block_size, **of} for of in fields)
    return Figure(printed=printed, quantity=quantity, model=model, tasks=tuple(tasks), methods=methods)


def _pairs(tasks: Sequence[str], values: Sequence[str], model: str, *, multi: bool) -> list[Figure | None]:
    """Accuracy and TPF of each task and of their average, then the average AUP."""
    columns: list[tuple[MetricName, Sequence[str]]] = [
        (quantity, of) for of in (*((task,) for task in tasks), tuple(tasks)) for quantity in ("accuracy", "tpf")
    ]
    columns.append(("aup", tuple(tasks)))
    return [
        _mbd_figure(printed, quantity, model, of, multi=multi)
        for printed, (quantity, of) in zip(values, columns, strict=True)
    ]


def _accuracy_rows(rows: Sequence[tuple[str, int, str]], tasks: Sequence[str], names: int) -> list[PaperRow]:
    """Rows of Table 1 or 2a, `names` of each base model in the order SINGLE, MULTI, MBD-*."""
    lines = []
    for number, (base, block_size, values) in enumerate(rows):
        trained = f"MBD-{base}"
        name = (SINGLE, MULTI, trained)[number % names]
        buffer_size = TABLE_4[base]["math"]["multi"]["buffer_size"]
        figures = _pairs(tasks, values.split(), trained if name == trained else base, multi=name != SINGLE)
        lines.append(PaperRow(group=f"{base} (bufsz={buffer_size}, blksz={block_size})", name=name, figures=figures))
    return lines


def _mbd_tables() -> list[PaperTable]:
    recipes, four, two = ("mbd-lms", "mbd-lms-sdar"), tuple(FOUR), ("gsm8k", "math500")
    heads = {task: [f"{LABELS[task]} Acc ↑", f"{LABELS[task]} TPF ↑"] for task in four}
    average = ["Average Acc ↑", "Average TPF ↑", "AUP ↑"]
    benchmarks = ("humaneval-plus", "gsm8k")
    ablation = [
        PaperRow(
            group="LLaDA2-Mini-DMax, averaged over HumanEval+ and GSM8K",
            name=name,
            figures=[
                _mbd_figure(printed, quantity, model, benchmarks, multi=multi)
                for printed, quantity in zip(values.split(), AVERAGED, strict=True)
            ],
        )
        for model, multi, name, values in TABLE_2B
    ]
    columns: list[tuple[MetricName, Sequence[str]]] = [("tpf", four), ("forward_ms", four)]
    columns += [("decode_tps", (task,)) for task in four] + [("decode_tps", four)]
    speed = [
        PaperRow(
            group="single-sample decoding, two H100 GPUs",
            name=model,
            figures=[
                _mbd_figure(printed, quantity, model, of, multi=multi)
                for printed, (quantity, of) in zip(values.split(), columns, strict=True)
            ],
        )
        for model, multi, values in TABLE_3
    ]
    return [
        PaperTable(
            title="MBD-LMs, Table 1",
            recipes=recipes,
            heads=[head for task in four for head in heads[task]] + average,
            rows=_accuracy_rows(TABLE_1, four, 3),
        ),
        PaperTable(
            title="MBD-LMs, Table 2a",
            recipes=recipes,
            heads=[head for task in two for head in heads[task]] + average,
            rows=_accuracy_rows(TABLE_2A, two, 2),
        ),
        PaperTable(title="MBD-LMs, Table 2b", recipes=recipes, heads=["Acc ↑", "TPF ↑", "AUP ↑"], rows=ablation),
        PaperTable(
            title="MBD-LMs, Table 3",
            recipes=recipes,
            heads=["Avg. TPF ↑", "Step Lat. (ms) ↓", *(f"{LABELS[task]} TPS ↑" for task in four), "Avg. TPS ↑"],
            rows=speed,
        ),
    ]


AVERAGED: tuple[MetricName, ...] = ("accuracy", "tpf", "aup")

# -- D2F ------------------------------------------------------------------------------------------------------------

D2F_HEADS = ("TPS ↑", "Latency (s) ↓", "Gen. Length", "Score ↑")
D2F_QUANTITIES: tuple[MetricName, ...] = ("tps", "latency", "tokens", "accuracy")
# benchmark, task, then by method: TPS, latency, generated length, score
D2F_TABLE_1 = (
    ("GSM8K 4-shot", "gsm8k", "LLaDA-Instruct", "7.2 32.3 231 77.4"),
    ("GSM8K 4-shot", "gsm8k", "dLLM-Cache", "20.1 11.5 231 77.5"),
    ("GSM8K 4-shot", "gsm8k", "Fast-dLLM (Prefix-Cache)", "33.3 7.0 232 77.8"),
    ("GSM8K 4-shot", "gsm8k", "Fast-dLLM (Dual-Cache)", "35.2 6.6 232 78.9"),
    ("GSM8K 4-shot", "gsm8k", "D2F-LLaDA", "52.5 2.8 144 77.3"),
    ("MBPP 3-shot", "mbpp", "LLaDA-Instruct", "0.9 71.4 65 39.0"),
    ("MBPP 3-shot", "mbpp", "dLLM-Cache", "2.3 28.3 66 37.0"),
    ("MBPP 3-shot", "mbpp", "Fast-dLLM (Prefix-Cache)", "13.0 4.9 64 37.6"),
    ("MBPP 3-shot", "mbpp", "Fast-dLLM (Dual-Cache)", "15.3 3.8 58 36.4"),
    ("MBPP 3-shot", "mbpp", "D2F-LLaDA", "47.6 1.4 68 38.0"),
    ("HumanEval 0-shot", "humaneval", "LLaDA-Instruct", "2.8 38.8 107 36.0"),
    ("HumanEval 0-shot", "humaneval", "dLLM-Cache", "4.5 23.3 104 39.0"),
    ("HumanEval 0-shot", "humaneval", "Fast-dLLM (Prefix-Cache)", "13.7 7.4 102 38.4"),
    ("HumanEval 0-shot", "humaneval", "Fast-dLLM (Dual-Cache)", "19.2 5.2 100 35.4"),
    ("HumanEval 0-shot", "humaneval", "D2F-LLaDA", "81.6 1.6 133 40.2"),
    ("Math 4-shot", "math", "LLaDA-Instruct", "21.1 11.5 243 23.7"),
    ("Math 4-shot", "math", "dLLM-Cache", "26.9 9.1 246 23.2"),
    ("Math 4-shot", "math", "Fast-dLLM (Prefix-Cache)", "47.7 5.2 246 22.4"),
    ("Math 4-shot", "math", "Fast-dLLM (Dual-Cache)", "42.5 5.8 246 22.4"),
    ("Math 4-shot", "math", "D2F-LLaDA", "90.2 4.3 384 29.1"),
)
D2F_TABLE_2 = (
    ("GSM8K-CoT 8-shot", "gsm8k-cot", "Dream-Base", "9.5 26.8 255 75.0"),
    ("GSM8K-CoT 8-shot", "gsm8k-cot", "dLLM-Cache", "26.0 9.8 255 72.0"),
    ("GSM8K-CoT 8-shot", "gsm8k-cot", "Fast-dLLM (Prefix-Cache)", "50.3 5.1 255 76.6"),
    ("GSM8K-CoT 8-shot", "gsm8k-cot", "Fast-dLLM (Dual-Cache)", "49.8 5.1 255 75.0"),
    ("GSM8K-CoT 8-shot", "gsm8k-cot", "D2F-Dream", "91.2 2.8 256 77.6"),
    ("MBPP 3-shot", "mbpp", "Dream-Base", "10.4 24.6 256 56.2"),
    ("MBPP 3-shot", "mbpp", "dLLM-Cache", "25.5 10.0 256 52.6"),
    ("MBPP 3-shot", "mbpp", "Fast-dLLM (Prefix-Cache)", "71.6 3.6 256 56.4"),
    ("MBPP 3-shot", "mbpp", "Fast-dLLM (Dual-Cache)", "73.2 3.5 256 51.0"),
    ("MBPP 3-shot", "mbpp", "D2F-Dream", "105 2.3 240 55.2"),
    ("HumanEval 0-shot", "humaneval", "Dream-Base", "20.2 12.6 255 54.3"),
    ("HumanEval 0-shot", "humaneval", "dLLM-Cache", "23.2 11.0 255 55.5"),
    ("HumanEval 0-shot", "humaneval", "Fast-dLLM (Prefix-Cache)", "62.4 4.1 255 54.3"),
    ("HumanEval 0-shot", "humaneval", "Fast-dLLM (Dual-Cache)", "60.0 4.3 255 53.0"),
    ("HumanEval 0-shot", "humaneval", "D2F-Dream", "73.2 3.1 227 54.3"),
    ("Math 4-shot", "math", "Dream-Base", "9.9 25.8 256 35.8"),
    ("Math 4-shot", "math", "dLLM-Cache", "12.7 20.2 256 34.5"),
    ("Math 4-shot", "math", "Fast-dLLM (Prefix-Cache)", "65.6 3.9 256 37.6"),
    ("Math 4-shot", "math", "Fast-dLLM (Dual-Cache)", "67.0 3.8 256 37.1"),
    ("Math 4-shot", "math", "D2F-Dream", "98.8 2.6 256 35.4"),
)
# tau_act = tau_conf, tau_add, then TPS and score
D2F_TABLE_3 = (
    (0.95, 0.95, "105.2 76.9"),
    (0.95, 0.7, "107.2 77.2"),
    (0.95, 0.5, "106.3 77.3"),
    (0.95, 0.1, "104.0 77.7"),
    (0.9, 0.9, "124.5 74.7"),
    (0.9, 0.7, "126.2 75.7"),
    (0.9, 0.5, "124.7 76.2"),
    (0.9, 0.1, "122.1 76.4"),
    (0.85, 0.85, "136.8 72.6"),
    (0.85, 0.7, "139.0 74.2"),
    (0.85, 0.5, "138.5 74.0"),
    (0.85, 0.1, "135.4 75.0"),
)
# benchmark, task, tau_act, model, then TPS and score
D2F_TABLE_4 = (
    ("MBPP 3-shot", "mbpp", 0.95, "random", "147.2 49.6"),
    ("MBPP 3-shot", "mbpp", 0.95, "D2F", "171.2 54.6"),
    ("MBPP 3-shot", "mbpp", 0.9, "random", "148.5 48.6"),
    ("MBPP 3-shot", "mbpp", 0.9, "D2F", "175.5 53.2"),
    ("MBPP 3-shot", "mbpp", 0.85, "random", "150.6 47.6"),
    ("MBPP 3-shot", "mbpp", 0.85, "D2F", "177.5 52.6"),
    ("GSM8k 4-shot", "gsm8k", 0.95, "random", "114.5 77.1"),
    ("GSM8k 4-shot", "gsm8k", 0.95, "D2F", "119.9 77.2"),
    ("GSM8k 4-shot", "gsm8k", 0.9, "random", "116.7 76.5"),
    ("GSM8k 4-shot", "gsm8k", 0.9, "D2F", "123.5 76.4"),
    ("GSM8k 4-shot", "gsm8k", 0.85, "random", "118.8 75.9"),
    ("GSM8k 4-shot", "gsm8k", 0.85, "D2F", "124.8 75.4"),
)
# parts of a canvas's method that a baseline has only if it names them
PLAIN_FIELDS: MethodFields = {"refresh": None, "leap": None, "branches": None}
# the likeliest tokens first, as many steps as the canvas has positions, without guidance
GREEDY: MethodFields = {"steps": None, "score_temperature": 0.0, "cfg_scale": 0.0}
MANY_BLOCKS = range(2, sys.maxsize)  # blocks in the buffer, if the paper does not say how many
# the length of a block in LLaDA-Instruct's own decoding (Table 8, "Baseline")
LLADA_BLOCKS = {"gsm8k": 8, "mbpp": 32, "humaneval": 32, "math": 256}
DREAM_OWN: MethodFields = {"canvas": {"cache": "none", **METHODS["dream-entropy"]["canvas"], **GREEDY, **PLAIN_FIELDS}}


def _canvas(name: str, **changes: Any) -> MethodFields:
    """A method of `METHODS` on a canvas, with every field that distinguishes it from similar methods."""
    plain = {
        "accept": "threshold",
        "score": "confidence",
        "cache": "none",
        "block_length": 32,
        **GREEDY,
        **PLAIN_FIELDS,
    }
    canvas = {**plain, **METHODS[name]["canvas"], **changes}
    return {"canvas": {**canvas, **({"tau": 0.9} if canvas["accept"] == "threshold" else {})}}


def _d2f_method(method: str, task: str, base: str) -> tuple[str, MethodFields]:
    """The model (none: `base`, the table's model) and the decoding of a row of Tables 1 and 2."""
    name = "gsm8k" if task == "gsm8k-cot" else task
    if method == "D2F-LLaDA":
        return method, {**PARTS, "tokens_per_step": 1, **D2F_TABLE_8[f"LLaDA/{name}"]}
    if method == "D2F-Dream":
        return method, {**PARTS, "tokens_per_step": 1, **D2F_TABLE_8[f"Dream/{name}"]}
    if method == "LLaDA-Instruct":
        return "", _canvas("llada", block_length=LLADA_BLOCKS[task])
    if method == "Dream-Base":
        return "", DREAM_OWN
    if method == "dLLM-Cache":  # it caches what the model's own decoding computes
        llada = {"accept": "quota", "score": "confidence"}
        acceptance = llada if base == "LLaDA-Instruct-8B" else {"accept": "schedule", "score": "neg_entropy"}
        return "", {"canvas": {**acceptance, **GREEDY, **PLAIN_FIELDS, "refresh": {}}}
    return "", _canvas("fast-dllm-prefix" if method == "Fast-dLLM (Prefix-Cache)" else "fast-dllm-dual")


def _d2f_rows(rows: Sequence[tuple[str, str, str, str]], base: str) -> list[PaperRow]:
    lines = []
    for group, task, method, values in rows:
        model, fields = _d2f_method(method, task, base)
        figures = [
            Figure(printed=printed, quantity=quantity, model=model or base, tasks=(task,), methods=(fields,))
            for printed, quantity in zip(values.split(), D2F_QUANTITIES, strict=True)
        ]
        lines.append(PaperRow(group=group, name=method, figures=figures))
    return lines


def _speed_and_score(task: str, values: str, fields: MethodFields) -> list[Figure | None]:
    method = {**PARTS, "prompt_attention": "full", "buffer_size": MANY_BLOCKS, **fields}
    return [
        Figure(printed=printed, quantity=quantity, model="D2F-Dream", tasks=(task,), methods=(method,))
        for printed, quantity in zip(values.split(), D2F_QUANTITIES[::3], strict=True)
    ]


def _d2f_tables() -> list[PaperTable]:
    pair = (D2F_HEADS[0], D2F_HEADS[3])
    thresholds = [
        PaperRow(
            group="GSM8K 4-shot",
            name=f"tau_act = tau_conf = {act}, tau_add = {add}",
            figures=_speed_and_score("gsm8k", values, {"tau_semi": act, "tau_m2t": act, "tau_add": add}),
        )
        for act, add, values in D2F_TABLE_3
    ]
    noise = [
        PaperRow(
            group=group,
            name=f"tau_act = {act}, {model}",
            figures=_speed_and_score(task, values, {"tau_semi": act, "tau_m2t": 0.9, "tau_add": 0.1})
            if model == "D2F"
            else [None, None],
        )
        for group, task, act, model, values in D2F_TABLE_4
    ]
    llada, dream = ("d2f-llada",), ("d2f-dream",)
    return [
        PaperTable(
            title="D2F, Table 1", recipes=llada, heads=D2F_HEADS, rows=_d2f_rows(D2F_TABLE_1, "LLaDA-Instruct-8B")
        ),
        PaperTable(title="D2F, Table 2", recipes=dream, heads=D2F_HEADS, rows=_d2f_rows(D2F_TABLE_2, "Dream-Base-7B")),
        PaperTable(title="D2F, Table 3", recipes=dream, heads=pair, rows=thresholds),
        PaperTable(title="D2F, Table 4", recipes=dream, heads=pair, rows=noise),
    ]


# -- BlockBatch -----------------------------------------------------------------------------------------------------

BLOCKBATCH_MODELS = ("LLaDA-1.5-8B", "LLaDA-Instruct-8B", "Dream-Base-7B")
# benchmark, task, method, then latency, NFE and accuracy of each model
BLOCKBATCH_TABLE_1 = (
    ("GSM8K", "gsm8k", "Vanilla", "12.5 256.0 79.91 13.1 256.0 77.10 10.4 256.0 75.13"),
    ("GSM8K", "gsm8k", "Fast-dLLM", "4.9 84.7 79.68 2.7 86.4 78.70 3.7 162.3 73.62"),
    ("GSM8K", "gsm8k", "LocalLeap", "4.7 72.5 81.27 2.3 64.4 78.16 6.5 142.9 72.71"),
    ("GSM8K", "gsm8k", "BlockBatch", "4.2 63.6 77.56 2.4 63.2 77.48 3.7 133.8 72.48"),
    ("MATH", "math", "Vanilla", "9.04 256.0 34.78 9.7 256.0 40.14 8.1 256.0 40.10"),
    ("MATH", "math", "Fast-dLLM", "5.5 104.4 33.20 3.3 107.8 37.12 2.5 121.9 39.34"),
    ("MATH", "math", "LocalLeap", "3.6 80.3 31.74 2.8 85.3 32.18 3.3 92.8 37.98"),
    ("MATH", "math", "BlockBatch", "3.4 77.6 32.24 2.4 80.4 37.20 2.2 92.8 39.44"),
    ("HumanEval", "humaneval", "Vanilla", "5.77 256.0 43.29 5.7 256.0 40.24 4.7 256.0 50.00"),
    ("HumanEval", "humaneval", "Fast-dLLM", "4.3 88.7 39.02 2.6 90.4 36.59 3.1 156.1 52.44"),
    ("HumanEval", "humaneval", "LocalLeap", "2.0 75.8 42.07 2.1 69.8 35.98 2.6 123.9 48.78"),
    ("HumanEval", "humaneval", "BlockBatch", "2.1 63.0 39.63 2.0 64.6 38.41 2.8 112.5 52.44"),
    ("MBPP", "mbpp", "Vanilla", "9.50 256.0 43.40 9.9 256.0 41.40 8.0 256.0 55.80"),
    ("MBPP", "mbpp", "Fast-dLLM", "4.2 76.1 38.00 2.2 68.2 38.40 2.6 111.9 53.20"),
    ("MBPP", "mbpp", "LocalLeap", "2.7 58.0 40.20 1.9 56.1 41.40 2.9 82.8 54.60"),
    ("MBPP", "mbpp", "BlockBatch", "2.6 54.5 40.00 1.7 45.3 39.60 2.3 81.1 52.00"),
)


def _blockbatch_method(method: str, model: str) -> MethodFields:
    dream = model == "Dream-Base-7B"
    if method == "Vanilla":
        return DREAM_OWN if dream else _canvas("llada")
    if method == "Fast-dLLM":
        return _canvas("fast-dllm-dual")
    if method == "LocalLeap":
        return _canvas("local-leap", leap={"tau_relaxed": 0.8 if dream else 0.75, "radius": 4})
    lengths = [4, 8, 16, 32, 64, 128]
    branches = {"block_lengths": lengths, "tau_merge": 0.5, "tau_sync": 8, "refresh": 32}
    return {"canvas": {"accept": "threshold", "tau": 0.9, "branches": branches}}


def _blockbatch_table() -> PaperTable:
    quantities: tuple[MetricName, ...] = ("latency", "nfe", "accuracy")
    columns = [(model, quantity) for model in BLOCKBATCH_MODELS for quantity in quantities]
    rows = [
        PaperRow(
            group=group,
            name=method,
            figures=[
                Figure(
                    printed=printed,
                    quantity=quantity,
                    model=model,
                    tasks=(task,),
                    methods=(_blockbatch_method(method, model),),
                )
                for printed, (model, quantity) in zip(values.split(), columns, strict=True)
            ],
        )
        for group, task, method, values in BLOCKBATCH_TABLE_1
    ]
    heads = [f"{model} {head}" for model in BLOCKBATCH_MODELS for head in ("Lat. (s) ↓", "NFE ↓", "ACC (%) ↑")]
    return PaperTable(title="BlockBatch, Table 1", recipes=("blockbatch",), heads=heads, rows=rows)


PAPER_TABLES: tuple[PaperTable, ...] = (*_mbd_tables(), *_d2f_tables(), _blockbatch_table())
