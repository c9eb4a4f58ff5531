"""All ranks of a group have the same number of KV pages: as many as fit on the rank where the fewest do."""

from dataclasses import replace

from mbd_core.engine.build import fitting_pages
from mbd_core.engine.engine_config import EngineConfig
from mbd_core.models.decoder import Decoder
from mbd_core.parallel.group import Group


def sized_alike(model: Decoder, config: EngineConfig, group: Group) -> EngineConfig:
    """`config` with the number of pages that all ranks use; every rank calls it with its shard.

    Ranks on CPUs share one machine's memory, and divide it. Raises `ValueError` where no page fits beside the shard.
    """
    if config.num_pages is not None:
        return config
    if group.rank.kind == "cpu":
        config = replace(config, kv_memory_fraction=config.kv_memory_fraction / group.rank.size)
    return replace(config, num_pages=group.least(fitting_pages(model, config)))
