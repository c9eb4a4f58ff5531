"""A run's starting point, read once: recipe, model, data and memory are checked before any training."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.adaptation.trained_config import ar_config, block_config
from mbd_core.checkpoint.adapter import read_adapter
from mbd_core.checkpoint.base_values import check_base
from mbd_core.checkpoint.families import FAMILIES
from mbd_core.checkpoint.folder import ModelFolder, read_folder
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.models.model_config import ModelConfig
from mbd_core.multitf.config import Precision, Sharding, ShardingChoice, TrainConfig, Written, check_workers
from mbd_core.multitf.data.encoding import tokenizer_fingerprint
from mbd_core.multitf.data.example import filled_length
from mbd_core.multitf.data.prepared import PreparedData, read_record
from mbd_core.multitf.recipes.recipe import TrainingRecipe, with_precision
from mbd_core.multitf.run.teachers import find_teacher
from mbd_core.multitf.states.block_warmup import longest_length
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.training_attention import TrainingAttention
from mbd_core.multitf.step.adapter import check_peft, check_start
from mbd_core.multitf.step.memory import Workload
from mbd_core.multitf.step.parallel import check_divides
from mbd_core.multitf.step.quantized_base import check_bitsandbytes
from mbd_core.ops.machine import computes_bfloat16

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """A recipe that fits its model and its data, with the facts in the files of both.

    recipe  the recipe, with its base and data as the user named them, by path, name or URL
    config  the model's configuration, with the recipe's block size if the recipe fills masks
    base    the base's folder on this machine; `None` for a model that begins with random weights
    data    the folder of prepared data on this machine, `None` for generated data; `record` is its record
    teacher the folder of a teacher that is loaded beside the model; `None` without one
    adapter the folder of the adapter to go on from; `None` without one
    """

    recipe: TrainingRecipe
    config: ModelConfig
    base: ModelFolder | None
    data: Path | None
    record: dict[str, Any] | None
    teacher: ModelFolder | None = None
    adapter: Path | None = None

    @classmethod
    def read(cls, recipe: TrainingRecipe, *, fetch: Callable[[str], str] = str) -> "StartingPoint":
        """Reads files' headers and checks that everything fits.

        `fetch` gives the local name or path of a base or of data. Raises `ValueError`, one sentence, if the recipe
        cannot be trained: on its model, on its data, or at all.
        """
        if recipe.base is None and recipe.model is None:
            raise ValueError(f"recipe {recipe.name} has no model of its own: name one with --base ({recipe.source})")
        if recipe.data is None:
            raise ValueError(
                f"recipe {recipe.name} has no data of its own: name a folder of prepared data with --data"
            )
        if recipe.train.lora is not None:
            check_peft()
            if recipe.train.lora.quantize_base:
                check_bitsandbytes()
        if recipe.base is None:
            assert recipe.model is not None
            if recipe.train.teacher is not None:
                find_teacher(recipe.train.teacher, None, lora=False)
            check_model(recipe, recipe.model, "its own model")
            if isinstance(recipe.data, PreparedData):
                raise ValueError(
                    f"recipe {recipe.name} trains its own tokenizer, and --data is tokenised: name a --base"
                )
            return cls(recipe=recipe, config=recipe.model, base=None, data=None, record=None)
        base = read_folder(model_folder(fetch(recipe.base)))
        check_model(recipe, base.config, recipe.base)
        data = record = None
        if isinstance(recipe.data, PreparedData):
            data = Path(fetch(recipe.data.path))
            record = read_record(data)
            check_data(recipe, record, base.config, base.tokenizer)
        config = trained_config(recipe, base.config)
        teacher = None
        if recipe.train.teacher is not None:
            if recipe.train.teacher.reads != "text":
                raise ValueError("teacher.reads=blocks is for rollouts (mbd rl): for clean text leave it at text")
            teacher = find_teacher(recipe.train.teacher, base, lora=recipe.train.lora is not None, fetch=fetch)
        adapter = None
        if recipe.train.lora is not None and recipe.train.lora.start is not None:
            adapter = Path(fetch(recipe.train.lora.start))
            check_start(read_adapter(adapter, config), recipe.train.lora)
            check_base(adapter, base.path)
        return cls(recipe=recipe, config=config, base=base, data=data, record=record, teacher=teacher, adapter=adapter)

    def with_precision(self, precision: Precision) -> "StartingPoint":
        """The same starting point, with the recipe in `precision`."""
        return replace(self, recipe=with_precision(self.recipe, precision))

    @property
    def sample_length(self) -> int:
        """The longest sample with its fill, in tokens."""
        return min(self.recipe.max_length, self.config.max_positions)

    def note(self) -> str | None:
        """A sentence if the recipe trains other blocks than its base decodes with."""
        recipe, base = self.recipe, self.base
        if base is None or not self._changes_blocks:
            return None
        return (
            f"{recipe.base} has blocks of {base.config.block_size}; recipe {recipe.name} makes a model with blocks of "
            f"{recipe.states.block_size}"
        )

    def check_written(self, written: Written) -> None:
        """Raise `ValueError` if `written` is `adapter` and the run cannot write one."""
        if written == "model":
            return
        recipe, base = self.recipe, self.base
        if recipe.train.lora is None or base is None:
            raise ValueError("--write adapter: no adapter of a base is trained; give --lora RANK, and a --base")
        if self._changes_blocks:
            raise ValueError(
                f"--write adapter: an adapter keeps its base's blocks of {base.config.block_size}, and recipe "
                f"{recipe.name} trains blocks of {recipe.states.block_size}; give states.block_size "
                f"{base.config.block_size}, or --write model"
            )
        if base.config.attention != self.config.attention:
            raise ValueError(
                f"--write adapter: an adapter keeps its base's {base.config.attention} keys, and recipe {recipe.name} "
                f"makes them {self.config.attention}; give --write model"
            )

    @property
    def _changes_blocks(self) -> bool:
        base, states = self.base, self.recipe.states
        if base is None or base.config.attention == "full" or not states.fills_masks:
            return False
        return base.config.block_size != states.block_size

    def workloads(self, choice: ShardingChoice, *, num_workers: int, device: str) -> list[Workload]:
        """The contents of the workers' memory, for each sharding that `choice` allows; the best first.

        `device` is GPU or CPU; for GPUs the precision `auto` is bfloat16. Raises `ValueError` for a recipe that cannot
        be trained with any of them.
        """
        recipe = self.recipe
        if device == "CPU":
            TrainingAttention(recipe.train.attention, CPU)
        length = self.sample_length
        if self.record is not None:
            longest = filled_length(self.record["longest"] + recipe.trailing_fill, recipe.states.block_size)
            length = min(length, longest)
            if self.record.get("most_answers", 1) > 1 and recipe.states.layouts not in ("d2f", "none"):
                length = self.record["most_trained"] + self.record["most_answers"] * (recipe.states.block_size - 1)
        length = longest_length(length, recipe.states)
        precision = recipe.train.precision
        wide = precision == "float32" or (precision == "auto" and device == "CPU" and not computes_bfloat16(CPU))
        return [
            Workload(
                config=self.config,
                states=recipe.states,
                train=recipe.train,
                sample_tokens=length,
                num_workers=num_workers,
                sharding=sharding,
                precision="float32" if wide else "bfloat16",
                dense=device == "CPU" or recipe.train.attention == "dense",
                teacher=None if self.teacher is None else self.teacher.config,
            )
            for sharding in allowed_shardings(recipe.train, choice, num_workers=num_workers)
        ]


def check_model(recipe: TrainingRecipe, config: ModelConfig, name: str) -> None:
    """Raises `ValueError` if the recipe, its training states or its workers do not fit the model `name`."""
    if recipe.train.tensor_parallel > 1:
        check_divides(config, recipe.train.tensor_parallel, recipe.train.cut_experts)
    if recipe.architectures and config.architecture not in recipe.architectures:
        raise ValueError(
            f"recipe {recipe.name} trains {' and '.join(recipe.architectures)} models, and {name} is a "
            f"{config.architecture}; choose another recipe or --base"
        )
    if recipe.train.teacher is not None and not recipe.states.fills_masks:
        raise ValueError(
            f"recipe {recipe.name} has a teacher for masked positions, and layouts=none masks none; leave one out"
        )
    if recipe.states.block_warmup and recipe.train.pack is not None:
        raise ValueError(
            f"recipe {recipe.name} has a block_warmup, in which samples change their lengths, and train.pack plans "
            "with their last lengths; leave one of them out"
        )
    if recipe.states.ar_weight:
        _check_causal_stream(recipe, config, name)
    if recipe.states.fills_masks:
        _check_noisy_streams(recipe, config, name)
    if not isinstance(recipe.data, PreparedData) and recipe.max_length > config.max_positions:
        raise ValueError(
            f"recipe {recipe.name} has samples of up to {recipe.max_length} tokens, and {name} only "
            f"{config.max_positions} positions; choose another --base"
        )


def trained_config(recipe: TrainingRecipe, config: ModelConfig) -> ModelConfig:
    """The configuration of a recipe's model, given its base's: the recipe decides block size, stored keys and
    whether there is an autoregressive mode."""
    states = recipe.states
    if not states.fills_masks:
        return ar_config(config)
    has_ar_loss = states.ar_weight > 0
    return block_config(config, block_size=states.block_size, clean=states.clean, has_ar_loss=has_ar_loss)


def _check_causal_stream(recipe: TrainingRecipe, config: ModelConfig, name: str) -> None:
    ar_weight = f"recipe {recipe.name} has ar_weight={recipe.states.ar_weight:g}"
    if config.attention == "full":
        raise ValueError(f"{ar_weight}, and {name} attends to whole sequences: it has no AR mode; leave ar_weight out")
    if config.gemma is not None or (config.moe is not None and config.moe.expert_capacity):
        what = "layers with a window" if config.gemma is not None else "experts that a whole block chooses"
        raise ValueError(f"{ar_weight}, and {name} has {what}, which no AR loss is written for; leave ar_weight out")
    if recipe.train.distillation is not None:
        raise ValueError(f"{ar_weight} beside a distillation, which has no labels; leave one of them out")


def _check_noisy_streams(recipe: TrainingRecipe, config: ModelConfig, name: str) -> None:
    if not config.has_mask:
        raise ValueError(
            f"recipe {recipe.name} trains a model to fill masks, and {name} has no mask token; choose another --base, "
            "or make a block-diffusion model of it: mbd convert DIR --to block-diffusion --out OUT"
        )
    layouts = recipe.states.layouts
    is_fixed = recipe.base is None or "attention" not in FAMILIES[config.architecture].keys
    if config.attention == "causal" and is_fixed and recipe.states.clean != "causal":
        raise ValueError(
            f"recipe {recipe.name} trains under a block-causal mask, and {name} stores its keys by causal rows; "
            "choose another --base, or give states.clean=causal"
        )
    if config.attention != "causal" and recipe.states.clean == "causal" and (is_fixed or config.attention == "full"):
        raise ValueError(
            f"recipe {recipe.name} has states.clean=causal, and {name} does not store its keys by causal rows; choose "
            "an A2D folder (mbd convert --to block-diffusion), or leave states.clean out"
        )
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


def check_data(
    recipe: TrainingRecipe, record: dict[str, Any], config: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises `ValueError` if the prepared data are for another tokenizer, too long, or too few."""
    data, size = recipe.data, recipe.states.block_size
    assert isinstance(data, PreparedData)
    if record["digest"] != data.digest:
        raise ValueError(f"{data} has changed since it was named; start the command again")
    if not is_tokenised_for(record, tokenizer, config, recipe.states):
        raise ValueError(
            f"{data} was tokenised for another model than {recipe.base}: prepare it again with --model {recipe.base}"
        )
    longest = longest_length(filled_length(record["longest"], size), recipe.states)
    room = min(recipe.max_length, config.max_positions)
    if longest > room:
        raise ValueError(
            f"{data} has samples of up to {longest} tokens with their fill; recipe {recipe.name} and the model have "
            f"room for {room}: prepare it again with --max-length {room // size * size}"
        )
    if record["samples"] < recipe.train.batch_size:
        raise ValueError(
            f"{data} holds {record['samples']} samples, fewer than a batch of recipe {recipe.name} "
            f"({recipe.train.batch_size}); give more"
        )


def is_tokenised_for(
    record: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, config: ModelConfig, states: StateConfig
) -> bool:
    """Whether data with this record have the tokenizer's vocabulary and template, and the mask if masks are filled.

    `tokenizer` is `None` while it does not exist yet.
    """
    is_mask = record["mask_token_id"] == config.mask_token_id or not states.fills_masks
    return is_mask and (tokenizer is None or bool(record["tokenizer"] == tokenizer_fingerprint(tokenizer)))


def allowed_shardings(train: TrainConfig, choice: ShardingChoice, *, num_workers: int) -> list[Sharding]:
    """The possible shardings of the weights, the first choice first; a single worker has all weights.

    Raises `ValueError` for a number of workers, or a choice, that tensor-parallel groups cannot have.
    """
    check_workers(train, num_workers)
    if train.tensor_parallel > 1:
        if choice == "replicated":
            raise ValueError("--tensor-parallel gives each worker its part of every weight: leave --sharding at auto")
        return ["sharded"]
    if train.lora is not None and train.lora.quantize_base:
        if choice == "sharded":
            raise ValueError(
                f"--set train.lora.quantize_base={train.lora.quantize_base} keeps the whole base on each worker: "
                "leave --sharding at auto, or train.lora.quantize_base out"
            )
        return ["replicated"]
    if num_workers == 1:
        return ["replicated"]
    return ["replicated", "sharded"] if choice == "auto" else [choice]
