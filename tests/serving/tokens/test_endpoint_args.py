"""The arguments of a replica: which settings a model can honour, before anything is started."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from family_models import rewrite

from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import LEAST_SLOTS, EngineConfig
from mbd_core.serving.tokens.endpoint_args import EndpointArgs
from mbd_core.serving.tokens.load import load_engine


def test_arguments_name_the_folder_and_keep_the_settings(tiny_model_dir: Path, tmp_path: Path) -> None:
    args = EndpointArgs(model=str(tiny_model_dir)).checked()
    assert args == EndpointArgs(
        model=str(tiny_model_dir), name="tiny-random", engine=EngineConfig(buffer_size=LEAST_SLOTS)
    )
    engine = EngineConfig(block_size=4, buffer_size=6, attention="reference")
    args = EndpointArgs(
        model=str(tiny_model_dir), name="other", engine=engine, tensor_parallel=2, trace=tmp_path / "t", fp8="all"
    ).checked()
    assert (args.name, args.engine, args.tensor_parallel, args.fp8) == ("other", engine, 2, "all")
    assert args.trace == tmp_path / "t"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"engine": EngineConfig(block_size=8)}, "block_size=8 cannot be honoured: tiny-random has 4"),
        ({"engine": EngineConfig(buffer_size=1)}, "the engine's buffer_size=1 must be at least that"),
        ({"engine": EngineConfig(attention="magic")}, "attention='magic' is unknown; choose one of "),
        ({"engine": EngineConfig(max_model_len=10**6)}, "max_model_len=1000000 exceeds the model's 512 positions"),
        ({"tensor_parallel": 3}, "tensor_parallel=3 cannot be honoured: num_key_value_heads=2 does not divide"),
        ({"fp8": "experts"}, "fp8=experts cannot be honoured: tiny-random has no experts; fp8=all rounds its layers"),
        ({"fp8": "blocks"}, "fp8=blocks cannot be honoured: tiny-random has no experts; fp8=all rounds its layers"),
    ],
)
def test_a_setting_that_the_model_cannot_honour_is_refused(
    tiny_model_dir: Path, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        EndpointArgs(model=str(tiny_model_dir), **settings).checked()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"do_sample": "yes"}, "do_sample='yes'"),
        ({"do_sample": True, "temperature": "hot"}, 'temperature="hot"'),
        ({"do_sample": True, "top_p": 0}, "top_p=0"),
        ({"do_sample": True, "top_k": -2}, "top_k=-2"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_sampling_that_no_request_could_have_is_refused_at_the_start(
    tiny_model_dir: Path, tmp_path: Path, wrong: dict[str, Any], name: str
) -> None:
    folder = tmp_path / "wrong"
    shutil.copytree(tiny_model_dir, folder)
    rewrite(folder / "generation_config.json", **wrong)
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        EndpointArgs(model=str(folder)).checked()
    assert "generation_config.json" in str(caught.value) and "\n" not in str(caught.value)
    assert EndpointArgs(model=str(folder), generation_config="ignore").checked().generation_config == "ignore"
    if wrong.get("do_sample") is True:  # without it nothing is drawn, and the file may say what it likes
        rewrite(folder / "generation_config.json", do_sample=False)
        EndpointArgs(model=str(folder)).checked()


def test_a_model_that_decodes_with_more_slots_is_served_with_them(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A stated size stays as it is, or is refused where the model's own decoding needs more."""
    folder = tmp_path / "wide"
    shutil.copytree(tiny_model_dir, folder)
    rewrite(folder / "generation_config.json", buffer_size=8)
    assert EndpointArgs(model=str(folder)).checked().engine == EngineConfig(buffer_size=8)
    assert EndpointArgs(model=str(folder), engine=EngineConfig(buffer_size=9)).checked().engine.buffer_size == 9
    sentence = "wide decodes with buffer_size=8 unless a request says otherwise; the engine's buffer_size=4 must be"
    with pytest.raises(ValueError, match=sentence):
        EndpointArgs(model=str(folder), engine=EngineConfig(buffer_size=4)).checked()
    rewrite(folder / "generation_config.json", buffer_size=2)
    assert EndpointArgs(model=str(folder)).checked().engine.buffer_size == LEAST_SLOTS


def test_a_folder_is_loaded_with_as_many_slots_as_its_model_decodes_with(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    shutil.copytree(tiny_model_dir, folder)
    rewrite(folder / "generation_config.json", buffer_size=8)
    loaded = load_engine(folder, EngineConfig(max_rows=2, num_pages=64))
    request = Request(request_id="0", prompt=(5, 6, 7), max_tokens=9, decoding=loaded.decoding({}))
    assert request.decoding.buffer_size == loaded.engine.config.buffer_size == 8
    assert len(loaded.engine.generate([request])[0].tokens) <= 9


def test_a_trace_goes_into_a_folder(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError):
        EndpointArgs(model=str(tiny_model_dir), trace=tmp_path / "file").checked()
