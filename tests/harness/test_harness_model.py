"""The model `mbd` in lm-evaluation-harness itself: prompts, answers, counts and log-likelihoods."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="the package lm_eval is not installed")

import lm_eval
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from jobs.harness_tasks import main as write_tasks
from mbd_core.checkpoint.chat import chat_prompt, decode_text, question
from mbd_core.decoding.blocks.request import Request
from mbd_core.evaluation.sweep.loading import load_inputs
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.evaluation.sweep.plan import plan_sweep
from mbd_core.harness.model import HarnessModel

BENCHMARKS = Path(__file__).resolve().parents[3] / "shared" / "benchmarks"


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> HarnessModel:
    return HarnessModel(str(tiny_model_dir), "multi", batch_size=4, device="cpu", tau_m2t=0.05, mc_num=4)


def generate(model: HarnessModel, *asked: tuple[str, dict[str, Any]]) -> list[Any]:
    instances = [
        Instance(request_type="generate_until", doc={}, arguments=one, idx=0, metadata=("t", n, 1))
        for n, one in enumerate(asked)
    ]
    return model.generate_until(instances, disable_tqdm=True)


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    for name, numbers in (("test", (1, 2, 3)), ("train", range(10, 40))):
        rows = [{"question": f"{n} + 0?", "answer": f"{n} + 0 = {n}\n#### {n}"} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


# -- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("fast-dllm-base", {}),
        ("fast-dllm", {"apply_chat_template": True, "fewshot_as_multiturn": False}),
        ("d2f-llada", {"apply_chat_template": True, "fewshot_as_multiturn": True}),
        ("mbd-lms", {"apply_chat_template": True, "fewshot_as_multiturn": False}),
    ],
)
def test_the_harness_asks_what_a_sweep_asks(
    model: HarnessModel, gsm8k: Path, recipe: str, flags: dict[str, bool]
) -> None:
    data, train = str(gsm8k / "test.jsonl"), str(gsm8k / "train.jsonl")
    shown = [] if recipe == "mbd-lms" else [train]
    sweep = plan_sweep(
        load_inputs(
            SweepOptions(
                models=["tiny-mbd"], tasks=["gsm8k"], methods=["single"], data=[data], recipe=recipe, examples=shown
            )
        )
    )
    inputs = [json.loads(row["input"]) for row in sweep.rows()]
    options = ["--recipe", recipe, "--tasks", "gsm8k", "--data", data, "--out", str(gsm8k / "tasks")]
    assert write_tasks([*options, *(["--examples", train] if shown else [])]) == 0
    (task,) = TaskManager(include_path=str(gsm8k / "tasks")).load([f"{recipe}_gsm8k"])["tasks"].values()
    task.set_fewshot_seed(1234)
    template = model.apply_chat_template if flags else None
    task.build_all_requests(chat_template=template, tokenizer_name="t" if flags else "", **flags)
    expected = inputs if not flags else [model.apply_chat_template(messages) for messages in inputs]
    assert [instance.args[0] for instance in task.instances] == expected


def test_the_words_and_the_draw_of_gsm8k_are_those_of_the_harness_s_own_task(tmp_path: Path) -> None:
    data, train = BENCHMARKS / "gsm8k" / "test.jsonl", BENCHMARKS / "gsm8k" / "train.jsonl"
    if not train.exists():
        pytest.skip(f"no {train}")
    sweep = plan_sweep(
        load_inputs(
            SweepOptions(
                models=["tiny-mbd"],
                tasks=["gsm8k"],
                methods=["single"],
                data=[str(data)],
                examples=[str(train)],
                recipe="fast-dllm-base",
                limit=20,
            )
        )
    )
    (tmp_path / "local.yaml").write_text(
        f"include: {Path(lm_eval.__file__).parent}/tasks/gsm8k/gsm8k.yaml\ntask: local\ndataset_path: json\n"
        f"dataset_name: null\ndataset_kwargs: {{data_files: {{test: {data}, train: {train}}}}}\n"
    )
    (task,) = TaskManager(include_path=str(tmp_path)).load(["local"])["tasks"].values()
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=20)
    assert [instance.args[0] for instance in task.instances] == [json.loads(row["input"]) for row in sweep.rows()]
    assert task.config.generation_kwargs["until"] == json.loads(next(sweep.rows())["stop"])


# -- answers ----------------------------------------------------------------------------------------------------------


def test_answers_are_the_engine_s_with_its_counts_and_end_at_stop_strings(model: HarnessModel) -> None:
    model._uses_chat = True
    context = model.apply_chat_template(question("How many?"))
    engine = model._model.engine
    prompt = tuple(chat_prompt(model.tokenizer, question("How many?")))
    (output,) = engine.generate([Request(request_id="r", prompt=prompt, max_tokens=40, decoding=model.decoding)])
    text = decode_text(model.tokenizer, output.tokens)
    whole, stopped, one_slot = generate(
        model,
        (context, {"until": [], "max_gen_toks": 40}),
        (context, {"until": [text[5:9]], "max_gen_toks": 40}),
        (context, {"until": [], "max_gen_toks": 40, "buffer_size": 1, "tau_m2t": 0.99}),
    )
    assert whole == text and whole.counts.num_forwards == output.counts.num_forwards
    assert stopped == text[: text.index(text[5:9])] and stopped.measures()["tokens"] < whole.measures()["tokens"]
    assert one_slot.measures()["nfe"] > whole.measures()["nfe"]


def test_a_prompt_that_does_not_fit_is_an_empty_answer_and_a_limit_is_what_fits(model: HarnessModel) -> None:
    long, fits = generate(model, ("word " * 600, {"max_gen_toks": 8}), ("How many?", {"max_gen_toks": 4096}))
    assert long == "" and long.counts is None
    assert 0 < fits.measures()["tokens"] < 512


def test_decoding_that_the_engine_refuses_ends_the_run_with_its_sentence(model: HarnessModel) -> None:
    with pytest.raises(ValueError, match=r"buffer_size=9 exceeds"):
        generate(model, ("How many?", {"max_gen_toks": 8, "buffer_size": 9}))
    text = Instance(request_type="loglikelihood", doc={}, arguments=("word " * 600, " 7"), idx=0)
    with pytest.raises(ValueError, match="the model's 512 positions"):
        model.loglikelihood([text], disable_tqdm=True)


def test_a_log_takes_no_other_file_s_place(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("precious")
    with pytest.raises(ValueError, match=r"log\.jsonl exists already"):
        HarnessModel(str(tiny_model_dir), device="cpu", log=str(tmp_path / "log.jsonl"))
    assert (tmp_path / "log.jsonl").read_text() == "precious"


def test_a_text_gets_the_tokenizer_s_special_tokens_once(tiny_model_dir: Path) -> None:
    plain = HarnessModel(str(tiny_model_dir), device="cpu")
    assert plain.tok_encode("How many?") == list(plain.tokenizer("How many?")["input_ids"])
    chat = plain.apply_chat_template(question("How many?"))
    assert plain.tok_encode(chat) == chat_prompt(plain.tokenizer, question("How many?"))


def test_control_tokens_that_a_task_spells_are_text(tiny_model_dir: Path) -> None:
    """In chats, in their continuations, and in texts without a template."""
    model, text = HarnessModel(str(tiny_model_dir), device="cpu"), "a <|endoftext|> b"
    as_text = model.tokenizer(text, split_special_tokens=True)["input_ids"]
    assert model.tok_encode(text) == as_text
    assert model._encode_pair(text, " c")[0] == as_text
    chat = model.apply_chat_template(question(text))
    assert model.tok_encode(chat) == chat_prompt(model.tokenizer, question(text))
    assert model._encode_pair(chat, text) == (chat_prompt(model.tokenizer, question(text)), as_text)
    turns = [*question("x"), {"role": "assistant", "content": text}]
    assert model.tok_encode(model.apply_chat_template(turns, add_generation_prompt=False))[-len(as_text) :] == as_text
    with pytest.raises(ValueError, match="non-character"):
        model.apply_chat_template(question("\ufdd0"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": "doubled"}, "unknown method 'doubled'; known: single, multi"),
        ({"tau": 0.5}, "there is no field tau"),
        ({"tau_m2t": 3.0}, "tau_m2t=3.0 must be"),
        ({"pretrained": "no-such-model"}, "unknown model 'no-such-model'"),
        ({"mc_num": 0}, "at least one draw"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tiny_model_dir: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        HarnessModel(**{"pretrained": str(tiny_model_dir), "device": "cpu", **changes})


def test_log_likelihoods_are_estimates_and_rolling_ones_are_refused(model: HarnessModel) -> None:
    instances = [
        Instance(request_type="loglikelihood", doc={}, arguments=("How many?", end), idx=0)
        for end in (" Three.", " 7")
    ]
    first, second = model.loglikelihood(instances, disable_tqdm=True)
    assert first[0] < 0 and second[0] < 0 and {first[1], second[1]} <= {True, False}
    assert [first, second] == model.loglikelihood(instances, disable_tqdm=True)
    with pytest.raises(NotImplementedError, match="loglikelihood_rolling"):
        model.loglikelihood_rolling(instances)


def test_a_whole_evaluation_reports_the_accuracy_and_the_counts(tmp_path: Path) -> None:
    assert write_tasks(["--tasks", "gsm-mini", "--out", str(tmp_path / "tasks")]) == 0
    log = tmp_path / "log.jsonl"
    found = simple_evaluate(
        model=HarnessModel("tiny-mbd", "multi", batch_size=4, device="cpu", log=str(log)),
        tasks=["own_gsm-mini"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks")),
        apply_chat_template=True,
        fewshot_as_multiturn=False,
        limit=8,
        bootstrap_iters=0,
    )
    assert found is not None
    results, samples = found["results"]["own_gsm-mini"], found["samples"]["own_gsm-mini"]
    assert results["accuracy,none"] >= 7 / 8
    assert results["tpf,none"] == pytest.approx(sum(s["tpf"] for s in samples) / 8) and results["tpf,none"] > 4
    assert [json.loads(line)["nfe"] for line in log.read_text().splitlines()] == [s["nfe"] for s in samples]
    assert found["config"]["mbd_generations"] == 8 and found["config"]["mbd_tpf_mean"] == results["tpf,none"]
