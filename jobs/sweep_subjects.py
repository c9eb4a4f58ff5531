"""What a sweep runs: options for model folders and for endpoints, and what they name, fetched and found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from cluster.storage import fetch_model
from jobs.command_line import MODEL, names
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.evaluation.sweep.endpoint import Endpoint, EndpointAddress, find_endpoint, read_keys, try_decoding

if TYPE_CHECKING:
    from mbd_core.evaluation.sweep.plan import Sweep

Models = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...", help="Shipped models' names, model folders, or their URLs.", rich_help_panel=MODEL
    ),
]
Endpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint",
        metavar="NAME=URL[#MODEL]",
        help="An OpenAI endpoint that is asked instead of an engine, as mine=http://host:8000/v1; repeatable.",
        rich_help_panel=MODEL,
    ),
]
EndpointKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint-key",
        metavar="NAME=VARIABLE",
        help="The environment variable that holds an endpoint's API key; repeatable.",
        rich_help_panel=MODEL,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Subjects:
    """The models of a sweep.

    fetched    the folder of each model that was named
    endpoints  those that answered; `keys` has the keys of some of them, by name
    """

    fetched: dict[str, str]
    endpoints: Sequence[Endpoint]
    keys: dict[str, str]

    @classmethod
    def find(cls, models: str | None, endpoints: Sequence[str] | None, keys: Sequence[str] | None) -> Self:
        """Fetch the models and ask the endpoints; `ValueError` for what is not there, or if nothing is named."""
        if models is None and not endpoints:
            raise ValueError("nothing is to be swept: give --models, or --endpoint")
        addresses = [EndpointAddress.parse(text) for text in endpoints or ()]
        found = read_keys(keys or (), [address.name for address in addresses])
        return cls(
            fetched={} if models is None else {model: fetch_model(model) for model in names(models, "--models")},
            endpoints=[find_endpoint(address, found.get(address.name)) for address in addresses],
            keys=found,
        )

    @property
    def urls(self) -> dict[str, str]:
        """Where the folders of models that were fetched come from."""
        return {path: model for model, path in self.fetched.items() if path != model}

    def model_folders(self, sweep: Sweep) -> dict[str, Path | None]:
        """The user's own folder of each model, `None` for one that is elsewhere."""
        folders = {name: None if path in self.urls else model_folder(path) for name, path in sweep.models.items()}
        return folders | dict.fromkeys(sweep.endpoints)

    def try_decoding(self, sweep: Sweep) -> None:
        """Raise `ValueError` for a configuration that an endpoint refuses."""
        for name, endpoint in sweep.endpoints.items():
            configs = [json.loads(variant.config) for variant in sweep.variants[name]]
            try_decoding(endpoint, self.keys.get(name), configs)
