"""Checkpoints on a storage that fails: the cause is named, and a folder is only given up where files are damaged.

Two workers, and an S3 server: `test_sharding.py`.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from failing_storage import ServerSilentError
from family_models import rewrite

from mbd_core.multitf.config import LoraSettings
from mbd_core.multitf.recipes.recipe import TrainingRecipe, shortened
from mbd_core.multitf.run.checkpoints import Checkpoints
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.run.worker import Run
from mbd_core.multitf.step.workers import ALONE
from mbd_core.storage.folder import Folder
from mbd_core.storage.remote import OPTIONS


def run(recipe: TrainingRecipe, location: str, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIONS, "failing", options)
        checkpoints = Checkpoints(Folder.at(location), ALONE, recipe=recipe)
        Run(StartingPoint.read(recipe), ALONE, "replicated", checkpoints).train()


@pytest.fixture
def recipe(tiny_recipe: TrainingRecipe) -> TrainingRecipe:
    return shortened(tiny_recipe, 2)


@pytest.mark.parametrize("pattern", ["*.distcp", ".metadata*", "checkpoint.json*"])
def test_a_checkpoint_that_cannot_be_written_is_an_os_error_with_its_cause(
    pattern: str, recipe: TrainingRecipe, tmp_path: Path
) -> None:
    sentence = r"^the checkpoint failing://.*/run/step_000001 cannot be written: .*No space left on device"
    with pytest.raises(OSError, match=sentence):
        run(recipe, f"failing://{tmp_path}/run", writes=pattern)


def test_a_disk_that_fills_while_a_file_is_written_is_named(recipe: TrainingRecipe, tmp_path: Path) -> None:
    """torch's own error is of the file's end (inline_container.cc)."""
    with pytest.raises(OSError, match=r"step_000001 cannot be written: .*No space") as failure:
        run(recipe, f"failing://{tmp_path}/run", writes="*.distcp", room=100_000)
    assert "inline_container" not in str(failure.value)


def test_an_adapter_goes_on_with_its_own_base_alone(tiny_recipe: TrainingRecipe, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(Path(str(tiny_recipe.base)), base)
    train = replace(tiny_recipe.train, steps=2, lora=LoraSettings(rank=2))
    recipe = replace(tiny_recipe, base=str(base), train=train)
    run(recipe, str(tmp_path / "run"))
    run(recipe, str(tmp_path / "run"))
    rewrite(base / "config.json", rope_theta=20_000.0)
    with pytest.raises(ValueError, match=f"{base} has changed since; give") as refused:
        run(recipe, str(tmp_path / "run"))
    assert "\n" not in str(refused.value)
    whole = replace(recipe, train=replace(train, lora=None))
    run(whole, str(tmp_path / "whole"))
    rewrite(base / "config.json", rope_theta=10_000.0)
    run(whole, str(tmp_path / "whole"))  # all weights are stored: what the base was does not matter


@pytest.mark.parametrize(
    ("pattern", "what"),
    [("*.distcp", "the checkpoint .*/step_000002"), ("checkpoint.json", "the checkpoints in .*/run")],
)
def test_a_storage_that_does_not_answer_is_no_damage(
    pattern: str, what: str, recipe: TrainingRecipe, tmp_path: Path
) -> None:
    run(recipe, f"failing://{tmp_path}/run")
    sentence = f"^{what} cannot be read: ServerSilentError: the server does not answer$"
    with pytest.raises(OSError, match=sentence) as failure:
        run(recipe, f"failing://{tmp_path}/run", reads=pattern)
    cause = failure.value.__cause__
    assert cause is None or isinstance(cause, ServerSilentError)
    run(recipe, f"failing://{tmp_path}/run")


def test_bytes_that_changed_are_named_by_what_read_them(recipe: TrainingRecipe, tmp_path: Path) -> None:
    run(recipe, str(tmp_path))
    file = tmp_path / "step_000002" / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(OSError, match="step_000002") as failure:
        run(recipe, str(tmp_path))
    assert "remove" not in str(failure.value)
