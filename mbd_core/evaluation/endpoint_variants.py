"""The configurations with which a sweep asks an endpoint, and what a reader must know of its numbers."""

from collections.abc import Mapping, Sequence

from mbd_core.evaluation.asking import Asked
from mbd_core.evaluation.endpoint import ENDPOINT_DEFAULT, Endpoint
from mbd_core.evaluation.grid import Grid, Methods, Variant, plan_variants


def endpoint_variants(endpoint: Endpoint, grid: Grid, names: Sequence[str], methods: Methods) -> list[Variant]:
    """An endpoint's configurations: those of the methods if it is one of this project, else its default alone.

    Raises `ValueError` as `plan_variants` does, and for a buffer_size that the endpoint does not take.
    """
    default = Variant(method=ENDPOINT_DEFAULT, decoding=None)
    if endpoint.defaults is None:
        return [default]
    own = [name for name in names if name != ENDPOINT_DEFAULT]
    found = [default] if ENDPOINT_DEFAULT in names else []
    if own:
        block_size = endpoint.defaults["block_size"]
        found += plan_variants(grid, own, methods=methods, defaults=endpoint.defaults, block_size=block_size)
    for variant in found:
        if variant.decoding and endpoint.slots and variant.decoding.buffer_size > endpoint.slots:
            raise ValueError(
                f"method '{variant.method}' with buffer_size={variant.decoding.buffer_size} exceeds the "
                f"{endpoint.slots} slots of endpoint '{endpoint.name}'"
            )
    return found


def check_default_alone(endpoints: Sequence[Endpoint], asked: Sequence[str]) -> None:
    """Raise `ValueError` if methods or a grid are asked for and nothing but endpoints without any is there."""
    if set(asked) - {ENDPOINT_DEFAULT} and not any(endpoint.is_ours for endpoint in endpoints):
        raise ValueError(
            f"endpoint '{endpoints[0].name}' takes no decoding fields, so its only method is {ENDPOINT_DEFAULT}; "
            "leave out --methods, --method and --grid"
        )


def endpoint_notes(endpoint: Endpoint, asked: Mapping[str, Asked]) -> Sequence[str]:
    """What a reader must know of numbers from an endpoint; `ValueError` for answers that it cannot hold."""
    for task, one in asked.items():
        if endpoint.positions is not None and one.max_tokens >= endpoint.positions:
            raise ValueError(
                f"endpoint '{endpoint.name}' holds {endpoint.positions} positions, prompt and answer together, and an "
                f"answer of {task} may have {one.max_tokens} tokens; give --max-tokens"
            )
    known = "" if endpoint.is_ours else "; it says neither forwards nor TPF, and decodes as it likes"
    return [f"model '{endpoint.name}' is '{endpoint.model}' at {endpoint.url}, asked at temperature 0{known}"]
