"""Whether a recipe, a model and data fit together: found from files' headers, before anything is trained."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.models.model_config import ModelConfig
from mbd_core.multitf.chat_encoding import tokenizer_fingerprint
from mbd_core.multitf.prepared_data import PreparedData, read_record
from mbd_core.multitf.trained_adapter import check_peft
from mbd_core.multitf.training_recipe import TrainingRecipe


def check_fit(recipe: TrainingRecipe) -> None:
    """Raise `ValueError`, one sentence, if the recipe cannot be trained: on its model, on its data, or at all.

    The model and prepared data lie here, where the recipe names them.
    """
    if recipe.base is None and recipe.model is None:
        raise ValueError(f"recipe {recipe.name} has no model of its own: name one with --base ({recipe.source})")
    if recipe.data is None:
        raise ValueError(f"recipe {recipe.name} has no data of its own: name a folder of prepared data with --data")
    if recipe.train.lora is not None:
        check_peft()
    if recipe.base is None:
        assert recipe.model is not None
        check_model(recipe, recipe.model, "its own model")
        if isinstance(recipe.data, PreparedData):
            raise ValueError(f"recipe {recipe.name} trains its own tokenizer, and --data is tokenised: name a --base")
        return
    folder = read_folder(model_folder(recipe.base))
    check_model(recipe, folder.config, recipe.base)
    if isinstance(recipe.data, PreparedData):
        check_data(recipe, Path(recipe.data.path), folder.config, folder.tokenizer)


def check_model(recipe: TrainingRecipe, config: ModelConfig, name: str) -> None:
    """Raise `ValueError` if the recipe is for other models than `name`, or its training states are."""
    if recipe.architectures and config.architecture not in recipe.architectures:
        raise ValueError(
            f"recipe {recipe.name} trains {' and '.join(recipe.architectures)} models, and {name} is a "
            f"{config.architecture}; choose another recipe or --base"
        )
    layouts = recipe.states.layouts
    if config.attention == "full" and layouts not in ("d2f", "one_group"):
        raise ValueError(
            f"recipe {recipe.name} trains under a block-causal mask, and {name} attends to whole sequences; choose a "
            "D2F recipe (D2F-LLaDA, D2F-Dream)"
        )
    if config.attention != "full" and layouts == "d2f":
        raise ValueError(
            f"recipe {recipe.name} has the model as its teacher over whole sequences, and {name} was trained under a "
            "block-causal mask; choose a MultiTF recipe"
        )
    if not isinstance(recipe.data, PreparedData) and recipe.max_length > config.max_positions:
        raise ValueError(
            f"recipe {recipe.name} has samples of up to {recipe.max_length} tokens, and {name} only "
            f"{config.max_positions} positions; choose another --base"
        )


def check_data(recipe: TrainingRecipe, folder: Path, config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ValueError` if the prepared data were made for another tokenizer, or are too long or too few."""
    assert isinstance(recipe.data, PreparedData)
    record = read_record(folder)
    if record["digest"] != recipe.data.digest:
        raise ValueError(f"{recipe.data} has changed since it was named; start the command again")
    if record["tokenizer"] != tokenizer_fingerprint(tokenizer) or record["mask_token_id"] != config.mask_token_id:
        raise ValueError(
            f"{recipe.data} was tokenised for another model than {recipe.base}: prepare it again with --model "
            f"{recipe.base}"
        )
    size = recipe.states.block_size
    longest, room = -(-record["longest"] // size) * size, min(recipe.max_length, config.max_positions)
    if longest > room:
        raise ValueError(
            f"{recipe.data} has samples of up to {longest} tokens with their fill; recipe {recipe.name} and the model "
            f"have room for {room}: prepare it again with --max-length {room // size * size}"
        )
    if record["samples"] < recipe.train.batch_size:
        raise ValueError(
            f"{recipe.data} holds {record['samples']} samples, fewer than a batch of recipe {recipe.name} "
            f"({recipe.train.batch_size}); give more"
        )
