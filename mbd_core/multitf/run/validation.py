"""Validation while training: the losses of held-out conversations on the run's weights, the same noise every time.

Every `validate_every` updates all workers compute these losses together. The losses belong to the update's point, so
they are in `losses.jsonl`, the plot, every log target, and the checkpoints. A resumed run reads its best loss from the
checkpoints.
"""

import random
import tempfile
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mbd_core.errors import error_sentence
from mbd_core.multitf.config import ValidationOptions
from mbd_core.multitf.data.data_files import find_files
from mbd_core.multitf.data.example import filled_length
from mbd_core.multitf.data.preparation import Preparation, prepare_data
from mbd_core.multitf.data.prepared import PreparedExamples, TinyData, num_held_out, read_record
from mbd_core.multitf.data.row_summary import RowSummary
from mbd_core.multitf.run.log import say
from mbd_core.multitf.run.start import StartingPoint, is_tokenised_for
from mbd_core.multitf.step.loss_buckets import BUCKETS, bucket_means
from mbd_core.multitf.step.trainer import Trainer
from mbd_core.multitf.step.workers import Workers
from mbd_core.row_files.rows import SUFFIXES


class ValidationFailed(RuntimeError):
    """A validation that could not be computed; the run goes on."""


def check_held_out(
    options: ValidationOptions, start: StartingPoint, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Raises `ValueError` for held-out data that do not fit.

    Their tokenizer must be the run's, and their samples must fit the recipe's and the model's lengths. A file of
    conversations must have no bad rows, which are named. A share must leave at least one batch for training. A run
    that trains its own tokenizer takes no held-out data.
    """
    if options.validation is None:
        return
    if are_conversations(options.validation):
        with tempfile.TemporaryDirectory(prefix="mbd-held-out-") as place:
            prepare_held_out(options.validation, start, Path(place))
        return
    recipe, size = start.recipe, start.recipe.states.block_size
    if options.share is not None:
        data = recipe.data
        count = data.per_task * len(data.tasks) if isinstance(data, TinyData) else (start.record or {})["samples"]
        rest = count - num_held_out(count, options.share)
        if rest < recipe.train.batch_size:
            raise ValueError(
                f"--validation {options.validation} leaves {rest} of {count} conversations to train on, fewer than a "
                f"batch of {recipe.train.batch_size}; give a smaller share, or more data"
            )
        return
    folder = Path(options.validation)
    record = read_record(folder)
    if not is_tokenised_for(record, tokenizer, start.config, recipe.states):
        raise ValueError(
            f"--validation {folder} was tokenised for another model than this run's: prepare it again with --model"
        )
    longest = filled_length(record["longest"], size)
    if longest > start.sample_length:
        raise ValueError(
            f"--validation {folder} has samples of up to {longest} tokens with their fill, and the run has room "
            f"for {start.sample_length}: prepare it again with --max-length {start.sample_length // size * size}"
        )


def are_conversations(validation: str) -> bool:
    """Whether held-out data are a file of conversations, by the name's ending, rather than a prepared folder."""
    return validation.endswith(SUFFIXES) and not Path(validation).is_dir()


FOLDER = "held-out"


def prepare_held_out(file: str, start: StartingPoint, place: Path) -> str:
    """Prepares a file of conversations, with all of their answers, in a folder `FOLDER` of `place`.

    Returns the fates of its rows and columns, in words. Rows that the run has no room for are left out. Raises
    `ValueError` as `prepare_data`, and for a run without a base, whose tokenizer does not exist yet.
    """
    size = start.recipe.states.block_size
    if start.base is None:
        raise ValueError(
            f"--validation {file}: recipe {start.recipe.name} trains its own tokenizer; hold out a share of its data"
        )
    preparation = Preparation(
        files=find_files(file), model=start.base, max_length=start.sample_length // size * size, every=True
    )
    summary = RowSummary()
    try:
        counts = prepare_data(preparation, place / FOLDER, summary=summary)
    except ValueError as error:
        raise ValueError(
            f"--validation {file}: {error} (options of jobs/prepare_data.py, whose folder --validation takes too)"
        ) from None
    unread = summary.unread
    return f"{counts}" + (f"; columns that say nothing: {', '.join(unread)}" if unread else "")


class Validation:
    """The held-out samples that measure a run's weights: `share`, or the data of `check_held_out`.

    Every worker builds it; a file of conversations is prepared by one worker of each machine.
    """

    def __init__(
        self, options: ValidationOptions, start: StartingPoint, workers: Workers, share: PreparedExamples | None = None
    ) -> None:
        assert options.validation is not None and (share is None) == (options.share is None)
        self.every, self.keep_best = options.validate_every, options.keep_best
        read = partial(
            PreparedExamples,
            block_size=start.recipe.states.block_size,
            max_length=start.sample_length,
            trailing_fill=start.recipe.trailing_fill,
            apart=start.recipe.states.layouts == "d2f",
        )
        if share is not None:
            self.examples = share
        elif are_conversations(options.validation):

            def write(place: Path) -> None:
                assert options.validation is not None
                read_rows = prepare_held_out(options.validation, start, place)
                if workers.is_first:
                    say(f"held out: {read_rows}")

            with workers.folder_of_machine(write) as place:  # a mapped file stays readable after it is removed
                self.examples = read(place / FOLDER)
        else:
            self.examples = read(Path(options.validation))

    def measure(self, trainer: Trainer, workers: Workers) -> dict[str, float]:
        """Loss and accuracy on all held-out samples, by slot and mask ratio too; every worker calls it.

        A sample's layouts and noise depend on its number alone. Raises `ValidationFailed` on all workers if one worker
        cannot lay out its samples. An error of one worker's forward is raised there alone.
        """
        at_once = trainer.config.micro_batch or max(1, trainer.config.batch_size // trainer.world_size)
        total = torch.zeros(4 + 2 * len(BUCKETS), dtype=torch.float64, device=workers.device)
        order = sorted(range(len(self.examples)), key=lambda number: (self.examples.lengths[number], number))
        trainer.objective.eval()
        try:
            for first in range(0, len(order), at_once * trainer.world_size):
                numbers = order[first : first + at_once * trainer.world_size][trainer.rank :: trainer.world_size]
                problem, batch = "", None
                try:  # a worker without samples of its own computes the first one, without counting it
                    batch_numbers = numbers or order[first : first + 1]
                    rngs = [random.Random(f"validation/{number}") for number in batch_numbers]
                    batch = trainer.lay_out([self.examples[number] for number in batch_numbers], rngs)
                except (ValueError, OSError) as error:
                    problem = error_sentence(error)
                if not workers.least(batch is not None) or batch is None:
                    raise ValidationFailed(problem or "another worker cannot read its samples")
                metrics = trainer.measure(batch)
                if numbers and trainer.counts:
                    total += metrics
        finally:
            trainer.objective.train()
        numerator, divisor, hits, labels, *sums = (workers.mean(total) * workers.size).tolist()
        if not labels:
            raise ValidationFailed("no label is among the held-out samples")
        values = {"loss": numerator / divisor, "accuracy": hits / labels} | bucket_means(sums)
        return {f"validation_{name}": value for name, value in values.items()}
