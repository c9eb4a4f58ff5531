"""Model folders before they are served: what fits is loaded, what does not is one sentence, for every job alike."""

import importlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from adapter_folders import write_adapter
from safetensors.torch import load_file, save_file

from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.conversion import convert
from mbd_core.checkpoint.folder import edit_note, read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.engine.config import Dtype, EngineConfig
from mbd_core.models.decoder import Decoder
from mbd_core.serving.tokens import load
from mbd_core.serving.tokens.endpoint_args import EndpointArgs
from mbd_core.serving.tokens.load import engine_dtype, load_engine

SMALL = EngineConfig(max_rows=1, num_pages=16)


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# -- adapters -------------------------------------------------------------------------------------------------------


def test_adapters_are_loaded_with_the_model(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", load_config(folder), seed=0, rank=2)
    loaded = load_engine(folder, replace(SMALL, max_adapters=1), adapters={"tuned": adapter})
    plain = Request(request_id="r", prompt=(9, 9), max_tokens=24, decoding=loaded.decoding({}))
    outputs = [loaded.engine.generate([replace(plain, adapter=name)])[0].tokens for name in (None, "tuned")]
    assert outputs[0] != outputs[1]
    with pytest.raises(ValueError, match="start it with max_adapters"):
        load_engine(folder, SMALL, adapters={"tuned": adapter})


# -- what fits ------------------------------------------------------------------------------------------------------


def test_generation_config_may_name_more_eos_ids(folder: Path) -> None:
    """As real SDAR folders do: the chat's end beside the text's."""

    def generate() -> tuple[tuple[int, ...], Output]:
        loaded = load_engine(folder, SMALL)
        request = Request(request_id="r", prompt=(9, 9), max_tokens=24, decoding=loaded.decoding({}))
        return loaded.config.eos_token_ids, loaded.engine.generate([request])[0]

    before, whole = generate()
    assert (before, whole.finish_reason) == ((1,), "length")
    also = next(t for t in whole.tokens[8:] if t not in whole.tokens[:8])
    change_json(folder / "generation_config.json", eos_token_id=[also, 1])
    after, cut = generate()
    assert after == load_config(folder).eos_token_ids == load_model(folder).config.eos_token_ids == (also, 1)
    assert (cut.finish_reason, cut.tokens) == ("stop", whole.tokens[: whole.tokens.index(also)])
    change_json(folder / "generation_config.json", eos_token_id=1)
    assert generate() == (before, replace(whole, counts=ANY))


CONTRADICTIONS = pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"eos_token_id": "end"}, "eos_token_id='end', which is no list of token ids"),
        ({"eos_token_id": [1, 512]}, "eos_token_id=512 lies outside the vocabulary"),
        ({"eos_token_id": [1, 0]}, "mask_token_id=0 is also an EOS id"),
        ({"mask_token_id": 3}, "generation_config.json says mask_token_id=3, config.json says 0"),
    ],
)


@CONTRADICTIONS
def test_ids_that_contradict_each_other_are_refused(folder: Path, values: dict[str, object], sentence: str) -> None:
    """By everybody who asks for the model's configuration."""
    change_json(folder / "generation_config.json", **values)
    for read in (load_config, load_model, read_folder):
        with pytest.raises(ValueError, match=sentence):
            read(folder)


@CONTRADICTIONS
@pytest.mark.parametrize(
    "job", ["benchmarks.commands:engine", "benchmarks.commands:rounding", "jobs.convert_checkpoint"]
)
def test_jobs_refuse_such_ids_too(
    folder: Path, capsys: pytest.CaptureFixture[str], job: str, values: dict[str, object], sentence: str
) -> None:
    change_json(folder / "generation_config.json", **values)
    given = {"jobs.convert_checkpoint": [folder, "--out", folder.parent / "out"]}.get(job, ["--model", folder])
    module, _, entry = job.partition(":")
    assert getattr(importlib.import_module(module), entry or "main")([str(a) for a in given]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and re.search(sentence, said)
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"tau_m2t": "x"}, 'generation_config.json: tau_m2t="x" must be a number'),
        ({"prefix_cache": 1}, "generation_config.json: prefix_cache=1 must be one of null, true, false"),
    ],
)
def test_decoding_that_cannot_be_honoured_is_refused(folder: Path, values: dict[str, object], sentence: str) -> None:
    change_json(folder / "generation_config.json", **values)
    with pytest.raises(ValueError, match=sentence):
        read_folder(folder)


@pytest.mark.parametrize("read", [read_folder, load_model])
def test_a_distributed_checkpoint_is_sent_to_the_converter(folder: Path, read: Callable[[Path], Any]) -> None:
    convert(folder, folder.parent / "dcp", to="dcp")
    with pytest.raises(ValueError, match=r"mbd convert DIR --to hf"):
        read(folder.parent / "dcp")


def test_a_cpu_computes_in_float32_and_says_how_weights_are_stored(folder: Path) -> None:
    assert load_engine(folder, SMALL).backend == "torch cpu float32"
    save_model(
        folder, load_model(folder), tokenizer=read_folder(folder).tokenizer, dtype=torch.bfloat16, overwrite=True
    )
    loaded = load_engine(folder, SMALL)
    assert loaded.engine.model.model.norm.weight.dtype == torch.float32
    assert loaded.backend == "torch cpu float32 (stored as bfloat16)"


@pytest.mark.parametrize(
    ("choice", "backend"),
    [
        ("float32", "torch cpu float32"),
        ("bfloat16", "torch cpu bfloat16 (stored as float32)"),
        ("int8", "torch cpu float32, int8 products"),
    ],
)
def test_an_engine_computes_in_the_dtype_that_was_asked_for(folder: Path, choice: Dtype, backend: str) -> None:
    with load_engine(folder, replace(SMALL, dtype=choice)) as loaded:
        assert loaded.backend == backend
        request = Request(
            request_id="r", prompt=(5, 6, 7), max_tokens=8, decoding=loaded.decoding({}), ignore_eos=True
        )
        assert len(loaded.engine.generate([request])[0].tokens) == 8


@pytest.mark.parametrize(
    ("stored", "parameters", "hardware", "expected"),
    [
        (torch.bfloat16, 135_000_000, True, torch.bfloat16),
        (torch.bfloat16, 135_000_000, False, torch.float32),
        (torch.bfloat16, 400_000, True, torch.float32),
        (torch.float32, 135_000_000, True, torch.float32),
    ],
)
def test_auto_is_bfloat16_where_a_cpu_is_faster_in_it(
    monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, parameters: int, hardware: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(load, "computes_bfloat16", lambda device: hardware)
    contents: Any = SimpleNamespace(stored_dtype=stored, config=SimpleNamespace(num_parameters=parameters))
    assert engine_dtype("auto", contents, torch.device("cpu")) == expected


def test_weights_are_rounded_once(folder: Path) -> None:
    with pytest.raises(ValueError, match="leave one of them out"):
        load_engine(folder, replace(SMALL, dtype="int8"), fp8="all")
    with pytest.raises(ValueError, match="leave one of them out"):
        EndpointArgs(model=str(folder), fp8="all", engine=replace(SMALL, dtype="int8")).checked()


def test_int8_is_for_cpus(folder: Path) -> None:
    with pytest.raises(ValueError, match="use fp8=all"):
        engine_dtype("int8", read_folder(folder), torch.device("cuda"))


def test_an_edit_note_is_for_models_whose_author_names_no_editing(folder: Path) -> None:
    loaded = load_engine(folder, SMALL)
    assert edit_note("m", loaded.defaults, loaded.decoding({})) is None
    note = edit_note("m", loaded.defaults, loaded.decoding({"t2t": {}}))
    assert note is not None
    assert note.startswith("m: decoding.t2t was asked for")
    assert edit_note("m", {"t2t": {"tau": 0.5}}, loaded.decoding({"t2t": {}})) is None


# -- what does not --------------------------------------------------------------------------------------------------


def lose_a_shard(folder: Path) -> None:
    """Two shards and their index, one of them gone."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": sorted(weights)[:5], "b.safetensors": sorted(weights)[5:]}
    save_file({name: weights[name] for name in parts["b.safetensors"]}, folder / "b.safetensors")
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def be_unknown(folder: Path) -> None:
    change_json(folder / "config.json", architectures=["GPT2LMHeadModel"])


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def grow_the_vocabulary(folder: Path) -> None:
    change_json(folder / "config.json", vocab_size=600)


def lose_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors")


def lose_the_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


BAD: list[tuple[Callable[[Path], None], list[str]]] = [
    (lose_a_shard, ["lacks the weights file a.safetensors", "model.embed_tokens.weight"]),
    (be_unknown, ["config.json", "GPT2LMHeadModel", "SDARForCausalLM"]),
    (cut_short, ["model.safetensors", "cut short at tensor '"]),
    (grow_the_vocabulary, ["model.safetensors", "model.embed_tokens.weight", "512", "600"]),
    (lose_a_tensor, ["model.layers.1.self_attn.q_proj.weight"]),
    (lose_the_tokenizer, ["has no tokenizer: none of tokenizer.json"]),
]


@pytest.mark.parametrize("job", ["serve", "eval_sweep", "train_multitf"])
@pytest.mark.parametrize(("damage", "named"), BAD, ids=[damage.__name__ for damage, _ in BAD])
def test_a_bad_checkpoint_is_one_sentence_and_exit_2(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    job: str,
    damage: Callable[[Path], None],
    named: list[str],
) -> None:
    """Before anything is started: no Ray, no output, no folder."""
    import ray

    from jobs import eval_sweep, serve, train_multitf

    running, out = ray.is_initialized(), tmp_path / "out"
    damage(folder)
    if job == "serve":
        code = serve.main(["--model", str(folder)])
    elif job == "eval_sweep":
        code = eval_sweep.main(["--models", str(folder), "--tasks", "gsm-mini", "--out", str(out)])
    else:
        code = train_multitf.main(["--recipe", "tiny-mbd", "--base", str(folder), "--storage", str(out)])
    printed = capsys.readouterr()
    assert code == 2
    assert len(printed.err.strip().splitlines()) == 1
    assert not printed.out
    for part in named:
        assert part in printed.err
    assert str(folder) in printed.err
    assert ray.is_initialized() == running
    assert not out.exists()


@pytest.mark.parametrize("generation", [{}, {"prompt_attention": "full", "buffer_size": 2}])
def test_a_full_attention_model_decodes_a_canvas_unless_it_says_otherwise(
    tiny_model_dir: Path, tmp_path: Path, generation: dict[str, Any]
) -> None:
    known = load_model(tiny_model_dir).config
    config = replace(known, architecture="LLaDAModelLM", attention="full", qk_norm=False)
    model = Decoder(replace(config, num_kv_heads=config.num_heads, head_dim=config.hidden_size // config.num_heads))
    save_model(tmp_path / "full", model, tokenizer=load_tokenizer(tiny_model_dir, known), generation=generation)
    decoding = load_engine(tmp_path / "full", EngineConfig(max_rows=1, num_pages=8)).decoding({})
    assert (decoding.canvas, decoding.buffer_size) == ((None, 2) if generation else (Canvas(), 1))
