"""A trained model's folder has what its base's has: transformers loads both, by the code that lies in them."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_models import FAMILIES, random_model, rewrite
from safetensors.torch import load_file, save_file
from trainer_state import D2F_STATES

from jobs.convert_checkpoint import main as convert_checkpoint
from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.conversion import convert
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.files import MANIFEST
from mbd_core.multitf.data.prepared import TinyData
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.run.checkpoints import Checkpoints
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.run.worker import Run
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.step.trainer import TrainConfig
from mbd_core.multitf.step.workers import ALONE
from mbd_core.ops.attention.whole import DenseAttention
from mbd_core.storage.folder import Folder
from mbd_core.tasks.tiny_tokenizer import train_tokenizer

SUPPORT = Path(__file__).parent.parent.parent / "support" / "models"
CODE = {
    "sdar": ("SDARConfig", "modeling_sdar.SDARForCausalLM"),
    "sdar-moe": ("SDARMoeConfig", "modeling_sdar_moe.SDARMoeForCausalLM"),
    "llada2": ("LLaDA2MoeConfig", "modeling_llada2_moe.LLaDA2MoeModelLM"),
    "llada": ("LLaDAConfig", "modeling_llada.LLaDAModelLM"),
    "dream": ("DreamConfig", "modeling_dream.DreamModel"),
}
CARRIED = {
    "LICENSE": "a licence\n",
    "README.md": "a model card\n",
    "special_tokens_map.json": "{}\n",
    "added_tokens.json": '{"<|mask|>": 0}\n',
    "assets/figure.svg": "<svg/>\n",
}
LEFT_OUT = (
    "pytorch_model.bin",
    "old/model.safetensors",
    "old/config.json",
    "optimizer.pt",
    "trainer_state.json",
    ".git/config",
    "__pycache__/modeling_sdar.cpython-311.pyc",
)
BLOCK = 4


def write_base(folder: Path, family: str) -> Path:
    """A folder as releases are: with code, a licence, further fields, and files that are no part of the model."""
    config = replace(FAMILIES[family], max_positions=2048, block_size=2 * BLOCK)
    tokenizer = train_tokenizer(["some words to learn"], vocab_size=280)
    save_model(folder, random_model(config), tokenizer=tokenizer, generation={"tau_m2t": 0.3, "do_sample": True})
    for path in (SUPPORT / "released_code").glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    for name in (*CARRIED, *LEFT_OUT):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(CARRIED.get(name, "not of the model"))
    configuration, model = CODE[family]
    auto_map = {"AutoConfig": f"configuration_small.{configuration}", "AutoModelForCausalLM": model}
    fields = {"auto_map": auto_map, "initializer_range": 0.02, "pad_token_id": 2, "torch_dtype": "float32"}
    rewrite(folder / "config.json", **fields)
    return folder


def trained(base: Path, out: Path) -> Path:
    """The model of one training step; its checkpoint lies beside it."""
    config = load_config(base)
    full = config.attention == "full"
    blocks = StateConfig(block_size=BLOCK, max_group=2, num_layouts=2, span="response", rounding="ceil")
    recipe = TrainingRecipe(
        name="one-step",
        base=str(base),
        model=None,
        data=TinyData(per_task=4, tasks=("gsm-mini",)),
        states=D2F_STATES if full else blocks,
        train=TrainConfig(steps=1, batch_size=2, lr=1e-2, warmup=1, precision="float32"),
        max_length=min(1024, config.max_positions),
        generation={"buffer_size": 2, **({"block_size": 16} if full else {})},
    )
    checkpoints = Checkpoints(Folder.at(f"{out}-run"), ALONE, recipe=recipe)
    run = Run(StartingPoint.read(recipe), ALONE, "replicated", checkpoints)
    run.train()
    run.write(out)
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Of each family: the base, the model after one step, and the model made of the step's checkpoint."""
    root, found = tmp_path_factory.mktemp("families"), {}
    for family in CODE:
        base = write_base(root / family / "base", family)
        out = trained(base, root / family / "trained")
        convert(root / family / "trained-run" / "step_000001", root / family / "converted", to="hf", config_from=base)
        found[family] = [base, out, root / family / "converted"]
    return found


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens, and who may look at whom: everybody, or the blocks up to one's own."""
    ids = torch.randint(2, 280, (1, 22), generator=torch.Generator().manual_seed(0))
    number = torch.arange(22) // BLOCK
    file = tmp_path_factory.mktemp("given") / "tokens.safetensors"
    blocks, full = number[:, None] >= number, torch.ones(22, 22, dtype=torch.bool)
    save_file({"input_ids": ids, "blocks": blocks.to(torch.uint8), "full": full.to(torch.uint8)}, file)
    return file


@pytest.fixture(scope="module")
def plain_logits(
    folders: dict[str, list[Path]], given: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """By folder, from a process that has transformers and nothing of ours."""
    root = tmp_path_factory.mktemp("plain")
    command = [sys.executable, SUPPORT / "plain_transformers.py", given, root / "logits.safetensors"]
    every = [folder for of_family in folders.values() for folder in of_family]
    environment = os.environ | {"HF_HOME": str(root / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, *every], env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return load_file(root / "logits.safetensors")


@pytest.mark.parametrize("family", CODE)
def test_transformers_loads_base_and_export_and_computes_our_logits(
    family: str, folders: dict[str, list[Path]], given: Path, plain_logits: dict[str, torch.Tensor]
) -> None:
    tokens = load_file(given)
    for folder in folders[family]:
        model = load_model(folder, dtype=torch.float32)
        mask = tokens["full" if model.config.attention == "full" else "blocks"].bool()
        attend = DenseAttention(mask[None, None])
        with torch.no_grad():
            hidden = model(tokens["input_ids"], torch.arange(22)[None], attend)
        torch.testing.assert_close(plain_logits[str(folder)], model.logits(hidden).detach(), atol=1e-4, rtol=1e-4)
    base, out, _ = (plain_logits[str(folder)] for folder in folders[family])
    assert (base - out).abs().max() > 1e-2, "the step changed the model"


@pytest.mark.parametrize("family", CODE)
def test_what_lies_beside_the_weights_is_carried_over(family: str, folders: dict[str, list[Path]]) -> None:
    base, out, converted = folders[family]
    ours = {"config.json", "generation_config.json", "model.safetensors", MANIFEST}
    names = {str(p.relative_to(base)) for p in base.rglob("*") if p.is_file()} - ours - set(LEFT_OUT)
    assert {*CARRIED, "layers_small.py", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    for folder in (out, converted):
        files = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
        assert files.keys() == names | ours | {"recipe.json"}
        assert all(files[name].read_bytes() == (base / name).read_bytes() for name in names)
        assert set(json.loads((folder / MANIFEST).read_text())["files"]) == files.keys() - {MANIFEST}


@pytest.mark.parametrize("family", CODE)
def test_fields_of_the_base_stay_but_those_that_would_be_untrue(family: str, folders: dict[str, list[Path]]) -> None:
    base, out, converted = (json.loads((folder / "config.json").read_text()) for folder in folders[family])
    generation = [json.loads((folder / "generation_config.json").read_text()) for folder in folders[family]]
    assert generation[0]["tau_m2t"] == 0.3
    for config, recommended, dtype in ((out, generation[1], "bfloat16"), (converted, generation[2], "float32")):
        size = 16 if family in ("llada", "dream") else BLOCK
        assert config == base | {"block_size": size, "dtype": dtype, "torch_dtype": dtype}
        wanted = {"eos_token_id": [1], "mask_token_id": 0, "block_size": size, "do_sample": True, "buffer_size": 2}
        assert recommended == wanted


@pytest.mark.parametrize("shape", ["tiny-sdar", "tiny-llada2", "tiny-llada", "tiny-dream", "tiny-fast-dllm-v2"])
def test_a_folder_of_random_weights_is_trained_as_it_is_made(shape: str, tmp_path: Path) -> None:
    assert convert_checkpoint(["--random", shape, "--out", str(tmp_path / shape)]) == 0
    out = trained(tmp_path / shape, tmp_path / "out")
    assert read_folder(out).config.vocab_size == 256
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / shape / "tokenizer.json").read_bytes()
