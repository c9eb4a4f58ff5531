"""A folder's tokenizer is loaded without its code, and refused if it does not fit the model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from family_models import FAMILIES, rewrite

from mbd_core.checkpoint.config import load_config, load_generation_defaults
from mbd_core.checkpoint.conversion import convert
from mbd_core.checkpoint.tokenizer import load_tokenizer


def test_generation_defaults_and_tokenizer(folder: Path) -> None:
    assert load_generation_defaults(folder) == {
        "eos_token_id": [1],
        "mask_token_id": 0,
        "block_size": 4,
        "buffer_size": 2,
    }
    tokenizer = load_tokenizer(folder, load_config(folder))
    text = "some wörds\n    12 = 3 <|mask|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|mask|>") == [0]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|user|>x<|assistant|>"


def test_tokenizer_that_disagrees_is_refused(folder: Path) -> None:
    for file in ("config.json", "generation_config.json"):
        rewrite(folder / file, mask_token_id=5)
    with pytest.raises(ValueError, match="mask_token_id=5"):
        load_tokenizer(folder, load_config(folder))
    for file in ("config.json", "generation_config.json"):
        rewrite(folder / file, mask_token_id=0)
    for damaged in ("{}", "[]", "{", '{"added_tokens": []}'):
        (folder / "tokenizer.json").write_text(damaged)
        with pytest.raises(ValueError, match="tokenizer"):
            load_tokenizer(folder, load_config(folder))


def test_an_id_beyond_the_models_vocabulary_is_refused(folder: Path) -> None:
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["model"]["vocab"]["far"] = 4000  # the number of tokens still fits
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="the tokenizer has ids up to 4000, the model only a vocabulary of 300"):
        load_tokenizer(folder, load_config(folder))


def test_a_chat_template_that_cannot_be_parsed_is_refused_with_its_line(folder: Path) -> None:
    config, others = load_config(folder), folder / "additional_chat_templates"
    (folder / "chat_template.jinja").write_text("{% for turn in messages %}\n{{ turn.content }\n{% endfor %}")
    with pytest.raises(ValueError, match=f"{folder}: the chat template 'default' cannot be parsed: line 2: "):
        load_tokenizer(folder, config)
    (folder / "chat_template.jinja").write_text("{% for turn in messages %}{{ turn.content }}{% endfor %}")
    others.mkdir()
    (others / "tool_use.jinja").write_text("{% if tools %}")
    with pytest.raises(ValueError, match="the chat template 'tool_use' cannot be parsed: line 1: "):
        load_tokenizer(folder, config)
    (others / "tool_use.jinja").write_text("{% generation %}{{ tools }}{% endgeneration %}")
    tokenizer = load_tokenizer(folder, config)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


def test_a_damaged_tokenizer_is_not_carried_into_a_conversion(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{folder} has no tokenizer that can be loaded"):
        convert(folder, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_tokenizer_without_a_mask_token_needs_a_special_token_there(folder: Path) -> None:
    """LLaDA's, as released: its mask token is a special token like others."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["mask_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = load_config(folder)
    tokenizer = load_tokenizer(folder, config)
    assert (tokenizer.mask_token, tokenizer.encode("<|mask|>")) == (None, [config.mask_token_id])
    with pytest.raises(ValueError, match="mask_token_id=200"):
        load_tokenizer(folder, replace(config, mask_token_id=200))


def test_dreams_tokenizer_needs_no_code_of_its_own(tmp_path: Path) -> None:
    """Dream and DiffuCoder, as released: vocabulary, merges, and a class in a file of the checkpoint."""
    letters = [*"abcdefgh", "\u0120", "ab"]
    (tmp_path / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenization_dream.py").write_text("raise RuntimeError('this was run')")
    special = {"10": {"content": "<|endoftext|>", "special": True}, "11": {"content": "<|mask|>", "special": True}}
    settings = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": special,
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = replace(FAMILIES["dream"], mask_token_id=11)
    tokenizer = load_tokenizer(tmp_path, config)
    assert tokenizer.encode("ab ab<|mask|>") == [9, 8, 9, 11]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "OtherTokenizer"}))
    with pytest.raises(ValueError, match="custom code"):
        load_tokenizer(tmp_path, config)
