"""A model that answers the rows of a data set: its options, the folder of its answers, and its engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jobs.api.call_options import OF_VARIABLE, ray_address
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.config import decoding_config
from mbd_core.decoding.blocks.methods import METHODS, MULTI
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.fields import CLUSTER, DECODING, OUTPUT, Flag, Ge, configuration
from mbd_core.files import check_target_folder, folder_kind
from mbd_core.json_text import merge_fields
from mbd_core.storage.folder import Folder
from mbd_core.storage.models import fetch_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from actors.paths import JobPaths
    from mbd_core.batch.decoding_model import DecodingModel
    from mbd_core.batch.model_answers import Answering, DecodeParts, ModelAnswers


@configuration(panel=DECODING)
class AnswerOptions:
    """How a model answers the rows. Every option needs --answers-from."""

    answers_from: Annotated[str | None, Flag(metavar="MODEL", opened_by="workers")] = None
    """Let this model answer the rows: a shipped model's name, a model folder, or its URL."""
    method: Annotated[
        str | None,
        Flag(
            help=f"How the model decodes: one of {', '.join(METHODS)}.",
            metavar="NAME",
            default="as its folder recommends",
        ),
    ] = None
    decoding: Annotated[dict[str, Any] | None, Flag(metavar="JSON")] = None
    """Fields of the method, as {"tau_m2t": 0.8}."""
    max_tokens: Annotated[int | None, Ge(1), Flag(default="1024")] = None
    """Tokens of an answer, at most."""
    temperature: Annotated[float | None, Flag(default="0")] = None
    """0 takes the likeliest token; a larger value draws tokens."""
    seed: Annotated[int | None, Ge(0), Flag(default="0")] = None
    """Random seed of drawn answers."""
    keep_unfinished: Annotated[bool | None, Flag(name="--keep-unfinished")] = None
    """Keep answers that --max-tokens cut."""
    max_rows: Annotated[int | None, Ge(1), Flag(default="16")] = None
    """Answers decoded at once."""
    answers: Annotated[str | None, Flag(panel=OUTPUT, metavar="DIR", default="OUT.answers", opened_by="job")] = None
    """Folder that keeps finished answers; the same command continues from them."""
    actors: Annotated[int | None, Ge(1), Flag(panel=CLUSTER, default="one in this process, without Ray")] = None
    """Engines that answer in parallel, as actors with one GPU each if there are GPUs, on the cluster of RAY_ADDRESS or
    on a new local cluster."""

    def __post_init__(self) -> None:
        names = [name for name, value in vars(self).items() if value is not None]
        if self.answers_from is None and names:
            option = names[0].replace("_", "-")
            raise ValueError(f"--{option} has no meaning without --answers-from: nothing is decoded")


@contextmanager
def cluster_of(
    cluster: str | None, workers: int | None, actors: int | None, models: Mapping[str, str]
) -> Iterator[JobPaths | None]:
    """Connect to a cluster, if one is needed. Yields the paths at which the cluster's nodes find `models`, a map from
    options to models.

    Ray is imported here because its import takes seconds.
    """
    if workers is None and actors is None:
        if cluster not in (None, OF_VARIABLE):
            raise ValueError(f"cluster={cluster} has no work: give workers that tokenise, or actors that answer")
        yield None
        return
    if cluster is None:
        raise ValueError("workers and actors need a cluster: name one, or leave them out")
    address = ray_address(cluster)
    from actors.paths import known_paths, model_paths
    from cluster.failures import CLUSTER_FAILURES, reason
    from cluster.local import connect, disconnect

    is_ours = connect(address=address, num_cpus=(workers or 0) + (actors or 0) + 1, worker_logs=False)
    try:
        opened = [path for option, model in models.items() for path in model_paths(option, model)]
        with known_paths(opened, bundle={"CPU": 1.0}) as paths:
            yield paths
    except CLUSTER_FAILURES as error:
        raise RuntimeError(f"the work failed on the cluster: {reason(error)}; repeat the command") from error
    finally:
        if is_ours:
            disconnect()


@dataclass(frozen=True, kw_only=True)
class Answerer:
    """A model that answers: its name as given, its tokenizer, its settings, and the folder of its answers."""

    model: str
    tokenizer: PreTrainedTokenizerBase
    answering: Answering
    folder: Path

    @classmethod
    def find(cls, model: str, target: Folder, options: AnswerOptions) -> Answerer:
        """Check every option before the first answer is decoded.

        Raises `ValueError` for an option that is not possible.
        """
        from mbd_core.batch.model_answers import ANSWERS_KIND, PART, Answering
        from mbd_core.checkpoint.folder import read_folder
        from mbd_core.checkpoint.model_digest import model_digest

        answers = Folder.at(options.answers or f"{target}.answers")
        if answers.is_remote:
            raise ValueError(
                f"{answers} is a URL; give --answers a folder on this machine, which keeps the answers as they come"
            )
        if folder_kind(answers.path) != ANSWERS_KIND:
            check_target_folder(answers.path, ANSWERS_KIND, in_place=True)
        name = options.method or MULTI
        if name not in METHODS:
            raise ValueError(f"--method {name}: known are {', '.join(METHODS)}")
        if (options.max_rows or 1) > PART:
            raise ValueError(f"--max-rows {options.max_rows} must be at most {PART}")
        fields = merge_fields(METHODS[name], options.decoding or {})
        folder = read_folder(model_folder(fetch_model(model)))
        answering = Answering(
            model=model,
            digest=model_digest(folder.path),
            decoding=decoding_config(folder.defaults, fields, block_size=folder.config.block_size),
            sampling=Sampling(temperature=options.temperature or 0.0, seed=options.seed or 0),
            max_tokens=options.max_tokens or 1024,
            keep_unfinished=bool(options.keep_unfinished),
            max_rows=options.max_rows or Answering.max_rows,
        )
        return cls(model=model, tokenizer=folder.tokenizer, answering=answering, folder=answers.path)

    @contextmanager
    def begin(self, num_rows: int, *, num_actors: int | None, paths: JobPaths | None) -> Iterator[ModelAnswers]:
        """The answers to `num_rows` rows, from an engine in this process or from `num_actors` actors on the cluster.

        The model is loaded only if an answer is missing."""
        from mbd_core.batch.model_answers import PART, ModelAnswers, PartDecoder

        engine = EngineConfig(max_rows=self.answering.max_rows, buffer_size=self.answering.decoding.buffer_size)

        def load() -> DecodingModel:
            from mbd_core.batch.decoding_model import DecodingModel
            from mbd_core.serving.tokens.load import load_engine

            loaded = load_engine(model_folder(fetch_model(self.model)), engine)
            return DecodingModel(loaded.engine, loaded.tokenizer)

        decode: DecodeParts
        if num_actors is not None:
            from actors.training.answer_pool import AnswerPool

            assert paths is not None
            decode = AnswerPool(self.model, self.answering, engine, num_actors=num_actors, paths=paths)
            rows = 4 * PART * num_actors
        else:
            decode, rows = PartDecoder(self.answering, load), PART
        answers = ModelAnswers(self.answering, decode, self.folder, rows_at_once=rows, num_rows=num_rows)
        with closing(answers), closing(decode):
            yield answers
