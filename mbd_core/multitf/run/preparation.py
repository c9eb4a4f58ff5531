"""Before and after a run: what a recipe starts from, whether it fits, and the folder of the trained model."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.base_files import BaseFiles, read_base
from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.loading import empty_model, load_model
from mbd_core.checkpoint.saving import MODEL_KIND, checkpoint_tensors, save_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.files import check_target_folder
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.model_config import ModelConfig
from mbd_core.multitf.config import Precision, Sharding, ShardingChoice, TrainConfig, check_workers
from mbd_core.multitf.data.encoding import tokenizer_fingerprint
from mbd_core.multitf.data.prepared import (
    TOKENIZER_PAIRS,
    PreparedData,
    PreparedExamples,
    TinyData,
    conversations,
    read_record,
    write_conversations,
)
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.states.mask import TrainingAttention
from mbd_core.multitf.step.adapter import check_peft, merge_adapter
from mbd_core.multitf.step.compute import computes_bfloat16
from mbd_core.multitf.step.memory import Setting, check_memory, plan_lines, plan_memory
from mbd_core.multitf.step.parallel import check_divides
from mbd_core.multitf.step.workers import ALONE, Workers
from mbd_core.tasks.tiny_tokenizer import train_tokenizer

# The trained model's folder: checked before a run begins, written when it ends.


def check_export(folder: Path, *, overwrite: bool = False) -> None:
    """Raise `ValueError` if `export` could not write `folder`, so that no run trains for nothing."""
    check_target_folder(folder, MODEL_KIND, overwrite=overwrite)


def base_files(recipe: TrainingRecipe) -> BaseFiles | None:
    """What the trained model will take over from its base, if it has one: read before training, written after it.

    Raises `ValueError` as `read_base` does.
    """
    return None if recipe.base is None else read_base(model_folder(recipe.base))


def export(
    folder: Path,
    recipe: TrainingRecipe,
    model: Decoder,
    tokenizer: PreTrainedTokenizerBase,
    base: BaseFiles | None,
    *,
    overwrite: bool = False,
) -> None:
    """Write the trained model, in bfloat16 as these families are published, with the recipe that trained it.

    Its folder has all that its base's has (`base_files`), so that it loads wherever the base does.
    An adapter is merged into the model first. Where the recipe recommends to decode a full-attention model in blocks
    of another size than it was trained in, as D2F does, the model says that size. Where the model is sharded the other
    workers call `join_export`. Raises `ValueError` as `check_export` does.
    """
    merge_adapter(model)
    if model.config.attention == "full":
        size = recipe.generation.get("block_size", model.config.block_size)
        model.config = replace(model.config, block_size=size)
    save_model(
        folder,
        model,
        base=base,
        tokenizer=tokenizer if base is None else None,
        generation=recipe.generation,
        dtype=torch.bfloat16,
        extra={"recipe.json": json.dumps(asdict(recipe), indent=2, default=str) + "\n"},
        overwrite=overwrite,
    )


def join_export(model: Decoder) -> None:
    """Give this worker's parts of a sharded model to the first worker's `export`, tensor by tensor."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        merge_adapter(model)
        for _ in checkpoint_tensors(model, "per_expert"):
            pass


# Whether a recipe, a model and data fit together: found from files' headers, before anything is trained.

CPU = torch.device("cpu")


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


def block_size_note(recipe: TrainingRecipe) -> str | None:
    """A sentence where the recipe trains other blocks than those that its base decodes with; the base lies here."""
    if recipe.base is None:
        return None
    config, trained = load_config(model_folder(recipe.base)), recipe.states.block_size
    if config.attention == "full" or config.block_size == trained:
        return None
    return (
        f"{recipe.base} has blocks of {config.block_size}; recipe {recipe.name} makes a model with blocks of {trained}"
    )


def check_model(recipe: TrainingRecipe, config: ModelConfig, name: str) -> None:
    """Raise `ValueError` if the recipe is for other models than `name`, or its training states or workers are."""
    if recipe.train.tensor_parallel > 1:
        check_divides(config, recipe.train.tensor_parallel, recipe.train.cut_experts)
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


def memory_setting(
    recipe: TrainingRecipe, *, num_workers: int, sharding: Sharding, precision: Precision, device: str
) -> Setting:
    """What a recipe that fits (`check_fit`) asks of its workers' memory; the model and data lie where it names them.

    `precision` may be `auto` for GPUs, which compute in bfloat16 then.
    """
    config = recipe.model if recipe.base is None else read_folder(model_folder(recipe.base)).config
    assert config is not None
    length = min(recipe.max_length, config.max_positions)
    if isinstance(recipe.data, PreparedData):
        longest = read_record(Path(recipe.data.path))["longest"] + recipe.trailing_fill
        size = recipe.states.block_size
        length = min(length, -(-longest // size) * size)
    wide = precision == "float32" or (precision == "auto" and device == "CPU" and not computes_bfloat16(CPU))
    return Setting(
        config=config,
        states=recipe.states,
        train=recipe.train,
        sample_tokens=length,
        num_workers=num_workers,
        sharding=sharding,
        precision="float32" if wide else "bfloat16",
        dense=device == "CPU" or recipe.train.attention == "dense",
    )


def check_device(recipe: TrainingRecipe, device: str) -> None:
    """Raise `ValueError` for a recipe that cannot be trained on `device` in the way that it says."""
    if device == "CPU":
        TrainingAttention(recipe.train.attention, CPU)


def allowed_shardings(train: TrainConfig, choice: ShardingChoice, *, num_workers: int) -> list[Sharding]:
    """How the weights may lie on the workers, the first choice first; one worker has all of them.

    Raises `ValueError` for a number of workers, or a choice, that tensor-parallel groups cannot have.
    """
    check_workers(train, num_workers)
    if train.tensor_parallel > 1:
        if choice == "replicated":
            raise ValueError("--tensor-parallel gives each worker its part of every weight: leave --sharding at auto")
        return ["sharded"]
    if num_workers == 1:
        return ["replicated"]
    return ["replicated", "sharded"] if choice == "auto" else [choice]


def check_room(
    recipe: TrainingRecipe, choice: ShardingChoice, available: int, *, num_workers: int, device: str
) -> tuple[Sharding, list[str]]:
    """How the weights lie on the workers, and the memory plan as lines.

    With `auto` they are replicated if that fits into what is `available` to each worker, in bytes, else sharded.
    Raises `ValueError`, one sentence, if it does not fit, or cannot be trained so.
    """
    check_device(recipe, device)
    allowed = allowed_shardings(recipe.train, choice, num_workers=num_workers)
    for sharding in allowed:
        setting = memory_setting(
            recipe, num_workers=num_workers, sharding=sharding, precision=recipe.train.precision, device=device
        )
        try:
            plan = check_memory(setting, available, device=device)
        except ValueError:
            if sharding == allowed[-1]:
                raise
        else:
            break
    return sharding, plan_lines(setting, plan, device=device)


def planned_lines(recipe: TrainingRecipe, choice: ShardingChoice, *, num_workers: int, device: str) -> list[str]:
    """The memory plan of each way in which the weights may lie on the workers, wherever they are.

    Raises `ValueError` for a recipe that cannot be trained so.
    """
    check_device(recipe, device)
    lines = []
    for sharding in allowed_shardings(recipe.train, choice, num_workers=num_workers):
        setting = memory_setting(
            recipe, num_workers=num_workers, sharding=sharding, precision=recipe.train.precision, device=device
        )
        lines += plan_lines(setting, plan_memory(setting), device=device)
    return lines


# What a recipe starts from: the model, its tokenizer and the training samples.


def prepare(
    recipe: TrainingRecipe, *, workers: Workers = ALONE, on_meta: bool = False
) -> tuple[Decoder, PreTrainedTokenizerBase, PreparedExamples]:
    """The model on the CPU in float32, its tokenizer, and all samples; `on_meta`: a base's shapes without its values.

    Prepared data and base lie where the recipe names them; of generated data each machine makes its samples once, for
    all of its workers. Raises `ValueError` if the base cannot be loaded or does not fit.
    """
    if recipe.base is not None:
        base = model_folder(recipe.base)
        model = empty_model(base) if on_meta else load_model(base, dtype=torch.float32)
        check_model(recipe, model.config, recipe.base)
        tokenizer = load_tokenizer(base, model.config)
        model.config = replace(model.config, block_size=recipe.states.block_size)
    else:
        assert recipe.model is not None and isinstance(recipe.data, TinyData)
        check_model(recipe, recipe.model, "its own model")
        texts = (f"{user}\n{assistant}" for user, assistant in conversations(recipe.data))
        tokenizer = train_tokenizer(itertools.islice(texts, TOKENIZER_PAIRS), vocab_size=recipe.model.vocab_size)
        model = Decoder(recipe.model)
        init_weights(model, seed=recipe.train.seed)
    size, room = recipe.states.block_size, min(recipe.max_length, model.config.max_positions)

    def read(folder: Path) -> PreparedExamples:
        return PreparedExamples(folder, block_size=size, max_length=room, trailing_fill=recipe.trailing_fill)

    if isinstance(recipe.data, PreparedData):
        folder = Path(recipe.data.path)
        check_data(recipe, folder, model.config, tokenizer)
        return model, tokenizer, read(folder)
    assert recipe.data is not None
    generated = recipe.data

    def write(folder: Path) -> None:
        write_conversations(folder, tokenizer, generated, block_size=size, max_length=room)

    with workers.folder_of_machine(write) as folder:
        return model, tokenizer, read(folder)  # what is mapped stays, without the file's name
