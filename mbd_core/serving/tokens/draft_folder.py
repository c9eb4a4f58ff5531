"""The model folder whose model drafts for an engine's own model. Both must have the same tokenizer, and the decoding
defaults are the pair's."""

from collections.abc import Mapping
from typing import Any

from mbd_core.checkpoint.folder import METHOD_FIELDS, ModelFolder, read_folder
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.methods import METHODS
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.draft_model import check_pair
from mbd_core.storage.models import fetch_model


def read_draft(config: EngineConfig) -> ModelFolder | None:
    """The folder of the engine's draft model, `None` without one; raises as `read_folder` does."""
    if config.draft_model is None:
        return None
    return read_folder(model_folder(fetch_model(config.draft_model)).resolve())


def check_draft_folder(
    folder: ModelFolder, draft: ModelFolder, config: EngineConfig, *, tensor_parallel: int = 1
) -> None:
    """Raises `ValueError`, one sentence, if the model of `draft` cannot draft for the model of `folder`."""
    if tensor_parallel != 1:
        raise ValueError(
            f"draft_model={draft.path.name} cannot be had with tensor_parallel={tensor_parallel} yet; leave one of "
            "them out"
        )
    masks = (folder.config.mask_token_id, draft.config.mask_token_id)
    large, small = (
        {token: number for token, number in each.tokenizer.get_vocab().items() if number not in masks}
        for each in (folder, draft)
    )
    if large != small:
        token, number = min(large.items() ^ small.items(), key=lambda pair: pair[1])
        raise ValueError(
            f"draft_model={draft.path.name} has another tokenizer than {folder.path.name}: token {number} is "
            f"{token!r} in only one of them; give two models of one tokenizer"
        )
    check_pair(folder.config, draft.config, config, vocab_limit=len(folder.tokenizer))


def drafted_defaults(defaults: Mapping[str, Any], draft: ModelFolder) -> dict[str, Any]:
    """A `generation_config.json` whose decoding is exact, by both models, in the draft model's slots."""
    others = {name: value for name, value in defaults.items() if name not in METHOD_FIELDS}
    slots: dict[str, Any] = {
        name: draft.defaults[name] for name in ("buffer_size", "tau_add") if name in draft.defaults
    }
    return {**others, **slots, **METHODS["verified-two-sizes"]}
