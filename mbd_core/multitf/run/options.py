"""The options that both training commands have beside the recipe's."""

from typing import Annotated

from mbd_core.fields import CLUSTER, OUTPUT, Flag, configuration
from mbd_core.multitf.config import Measuring, ShardingChoice, Sweeping, ValidationOptions, Written
from mbd_core.multitf.run.log_targets import PACKAGES


@configuration(panel=OUTPUT)
class RunOptions:
    """A run's layout on its workers, and its output."""

    sharding: Annotated[ShardingChoice, Flag(panel=CLUSTER)] = "auto"
    """Weights, gradients and optimizer states of each worker: replicated, or sharded among them (FSDP2); auto:
    replicated if that fits its memory."""
    log_to: Annotated[
        str | None,
        Flag(
            help=f"Log to these besides the run's own file: {', '.join(PACKAGES)}, or none.",
            metavar="NAME,...",
            default="tensorboard, if it is installed",
        ),
    ] = None
    write: Written = "model"
    """Write the model, with an adapter merged into it, or the adapter alone as a PEFT folder."""
    held_out: ValidationOptions = ValidationOptions()
    """The run's measures on data that it does not learn from."""
    sweeping: Sweeping = Sweeping()
    """The tasks that an engine decodes with the run's weights beside the run."""
    measuring: Measuring = Measuring()
    """The run's measures of itself."""
    overwrite: bool = False
    """Replace a model folder of this project."""
