"""LoRA adapters. Each is loaded under a name, and has a slot until it is unloaded. No request may use it then."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mbd_core.checkpoint.adapter import read_adapter
from mbd_core.models.lora import Adapter, AdapterSlots
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shard import Shard


class AdapterInUse(ValueError):
    """Requests still use the adapter to be unloaded."""


@dataclass(frozen=True)
class ResidentAdapter:
    """An adapter in its slot. `serial` is unique among all adapters ever loaded, so that pages stored with an adapter
    are not found with another adapter of the same name."""

    name: str
    slot: int
    serial: int
    rank: int


class ResidentAdapters:
    """The adapters of one engine. `names` always holds their present names, and `ar_names` the names of the adapters
    with which the model has an autoregressive mode. Without `slots` no adapter can be loaded.

    Iterates over the adapters in the order of their loading.
    """

    def __init__(self, config: ModelConfig, shard: Shard, slots: AdapterSlots | None) -> None:
        self._config, self._shard, self._slots = config, shard, slots
        self._by_name: dict[str, ResidentAdapter] = {}
        self._num_loaded = 0
        self.names: set[str] = set()
        self.ar_names: set[str] = set()

    def __iter__(self) -> Iterator[ResidentAdapter]:
        return iter(tuple(self._by_name.values()))

    def get(self, name: str | None) -> ResidentAdapter | None:
        return None if name is None else self._by_name.get(name)

    def read(self, name: str, folder: Path) -> Adapter:
        """The adapter in `folder`, to be placed under `name`; raises `ValueError` if it cannot be placed."""
        if self._slots is None:
            raise ValueError("this engine loads no adapters; start it with max_adapters")
        if not name:
            raise ValueError("an adapter needs a name")
        if name in self._by_name:
            raise ValueError(f"an adapter '{name}' is loaded already; unload it first")
        if len(self._by_name) == self._slots.num_slots:
            raise ValueError(
                f"{len(self._by_name)} adapters are loaded, which is all that max_adapters allows; unload one first"
            )
        adapter = read_adapter(folder, self._config, shard=self._shard)
        if adapter.rank > self._slots.max_rank:
            raise ValueError(f"{folder}: r={adapter.rank} exceeds this engine's max_rank={self._slots.max_rank}")
        blocks = self._config.block_size
        if self._config.attention == "block_causal" and adapter.block_size not in (None, blocks):
            raise ValueError(
                f"{folder} was trained in blocks of {adapter.block_size}, and this model has blocks of {blocks}; "
                "load it beside its own base, or merge it: mbd convert BASE --adapter ADAPTER --out DIR"
            )
        return adapter

    def place(self, name: str, adapter: Adapter) -> None:
        """Put an adapter that was read for `name` into a free slot."""
        assert self._slots is not None and name not in self._by_name
        slot = min(set(range(1, self._slots.num_slots + 1)) - {a.slot for a in self._by_name.values()})
        self._slots.write(slot, adapter)
        self._num_loaded += 1
        self._by_name[name] = ResidentAdapter(name, slot, self._num_loaded, adapter.rank)
        self.names.add(name)
        if adapter.ar_mode:
            self.ar_names.add(name)

    def remove(self, name: str) -> None:
        """Free the slot of an adapter that no request uses."""
        assert self._slots is not None
        self.names.discard(name)
        self.ar_names.discard(name)
        self._slots.clear(self._by_name.pop(name).slot)
