"""Which ids end an answer where config.json and generation_config.json name different ones: transformers' choice."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from jobs.__main__ import main
from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.folder import read_folder
from mbd_core.multitf.data.encoding import fill_token

END, USER, ASSISTANT = 1, 2, 3  # special tokens of the tiny tokenizer, whose own EOS is the first


def with_ends(folder: Path, copy: Path, *, config: Any, generation: Any) -> Path:
    shutil.copytree(folder, copy)
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        content = json.loads((copy / name).read_text())
        content.pop("eos_token_id")
        (copy / name).write_text(json.dumps(content if value is None else content | {"eos_token_id": value}))
    return copy


@pytest.mark.parametrize(
    ("config", "generation", "ends", "origin"),
    [
        (USER, ASSISTANT, (ASSISTANT,), "generation_config.json, without 2 of config.json"),
        (USER, [ASSISTANT], (ASSISTANT,), "generation_config.json, without 2 of config.json"),
        ([USER, END], ASSISTANT, (ASSISTANT,), "generation_config.json, without 2, 1 of config.json"),
        ([USER, END], END, (END,), "generation_config.json, without 2 of config.json"),
        (END, [ASSISTANT, END], (ASSISTANT, END), "generation_config.json"),
        ([END, ASSISTANT], [ASSISTANT, END], (END, ASSISTANT), "generation_config.json"),
        (None, [USER], (USER,), "generation_config.json"),
        ([USER, END], None, (USER, END), "config.json"),
    ],
)
def test_generation_config_decides_in_serving_training_and_the_doctor(
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: Any,
    generation: Any,
    ends: tuple[int, ...],
    origin: str,
) -> None:
    copy = with_ends(tiny_model_dir, tmp_path / "copy", config=config, generation=generation)
    folder = read_folder(copy)
    assert folder.config.eos_token_ids == ends
    if generation is not None:
        theirs = GenerationConfig.from_pretrained(copy).eos_token_id
        assert set(ends) == {theirs} if isinstance(theirs, int) else set(ends) == {*theirs}
    assert fill_token(folder.tokenizer, folder.config) == (END if END in ends else ends[0])
    assert main(["doctor", "--json", "--model", str(copy)]) == 0
    said = json.loads(capsys.readouterr().out)["model"]
    names = {END: "<|endoftext|>", USER: "<|user|>", ASSISTANT: "<|assistant|>"}
    assert said["answers end with"] == [f"{names[token]} ({token})" for token in ends]
    assert said["named by"] == origin


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"eos_token_id": "3"}, "generation_config.json says eos_token_id='3', which is no list of token ids"),
        ({"eos_token_id": []}, "generation_config.json: eos_token_id is an empty list; give at least one id"),
        ({"eos_token_id": 99999}, "generation_config.json: eos_token_id=99999 lies outside"),
        ({"eos_token_id": 0}, "generation_config.json: mask_token_id=0 is also an EOS id"),
        ({"mask_token_id": 3}, "mask_token_id=3, config.json says 0; write the id of the tokenizer's mask token into"),
    ],
)
def test_ids_that_no_model_has_are_refused(tiny_model_dir: Path, tmp_path: Path, ids: Any, message: str) -> None:
    copy = shutil.copytree(tiny_model_dir, tmp_path / "copy")
    content = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps(content | ids))
    with pytest.raises(ValueError, match=message):
        load_config(copy)
