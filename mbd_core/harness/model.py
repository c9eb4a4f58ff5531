"""The model `mbd` of lm-evaluation-harness: this project's engine behind the harness's interface.

    lm_eval --model mbd --model_args pretrained=DIR,method=multi,tau_m2t=0.9 --tasks ...

Only the harness imports this module, which needs the package lm_eval.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from mbd_core.batch.answer_ends import fit_request, generate_until
from mbd_core.batch.inputs import NUM_DRAWS, hidden_controls
from mbd_core.batch.likelihood import Draws, log_likelihood
from mbd_core.batch.rows import before_stop
from mbd_core.batch.scoring import is_greedy
from mbd_core.checkpoint.chat import chat_text, decode_text
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.literal_text import Masking, evaluated_ids, fixed_masking
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.config import DecodingConfig, decoding_config
from mbd_core.decoding.blocks.methods import MULTI, NAMED_METHODS
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.sequences.admission import RequestRefused
from mbd_core.evaluation.sweep.grid import DEFAULT_SLOTS, parse_grid
from mbd_core.evaluation.tasks.generation_fields import Generation, read_generation
from mbd_core.files import check_new_file, write_text
from mbd_core.harness.scoring import CountedText
from mbd_core.json_text import merge_fields, merge_paths
from mbd_core.serving.tokens.load import load_engine

LOGGER = logging.getLogger("lm_eval.mbd")


class HarnessModel(TemplateLM):
    """An engine behind the harness's interface: texts in, answers with counts (`CountedText`) out.

    pretrained   a shipped model's name, or a model folder
    method       a method's name (`decoding.methods`); the default is that of the model's `generation_config.json`
    batch_size   sequences decoded at once; `auto` is the engine's default
    mc_num, seed number of draws of a log-likelihood, and their seed
    log          a new file: for each generation a JSON line of task, document, counts and finish reason
    decoding     any decoding field, as `tau_m2t=0.9` or `t2t.tau=0.5`
    """

    def __init__(
        self,
        pretrained: str,
        method: str | None = None,
        *,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        num_pages: int | None = None,
        kv_memory_fraction: float = EngineConfig.kv_memory_fraction,
        tensor_parallel: int = 1,
        mc_num: int = NUM_DRAWS,
        seed: int = 0,
        log: str | None = None,
        **decoding: Any,
    ) -> None:
        super().__init__()
        del max_batch_size  # the engine takes requests from a queue as rows become free
        if method is not None and method not in NAMED_METHODS:
            raise ValueError(f"unknown method '{method}'; known: {', '.join(NAMED_METHODS)}")
        self._method, self._fields = method, _decoding_fields(decoding)
        if log is not None:
            check_new_file(Path(log))
        folder = model_folder(pretrained)
        contents = read_folder(folder)
        self._defaults = contents.defaults
        self._block_size = self._fields.get("block_size", contents.config.block_size)
        self.decoding = self._decoding({})
        rows = EngineConfig.max_rows if str(batch_size).startswith("auto") else int(batch_size)
        self._model = load_engine(
            folder,
            EngineConfig(
                max_rows=rows,
                num_pages=num_pages,
                kv_memory_fraction=kv_memory_fraction,
                buffer_size=self.decoding.buffer_size,
                block_size=self._fields.get("block_size"),
            ),
            device=_device(device),
            tensor_parallel=tensor_parallel,
        )
        self.tokenizer = self._model.tokenizer
        self._masking = fixed_masking(self.tokenizer)
        self._rows, self._draws, self._log = rows, Draws(number=mc_num, seed=seed), log
        self._uses_chat, self._records = False, list[dict[str, Any]]()

    def _decoding(self, changes: Mapping[str, Any]) -> DecodingConfig:
        """The model's defaults, overridden by the method, then by `model_args`, then by a generation's own fields."""
        fields = dict(NAMED_METHODS[self._method]) if self._method is not None else {}
        if self._method == MULTI and self._defaults.get("buffer_size", 1) == 1:
            fields["buffer_size"] = DEFAULT_SLOTS
        fields = merge_fields(merge_fields(fields, self._fields), _decoding_fields(changes))
        return decoding_config(self._defaults, fields, block_size=self._block_size)

    # -- generation -------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[CountedText]:
        """The answers, each cut before its first stop string.

        A prompt that is too long for the model gets a warning and an empty answer without counts. Any other refusal
        ends the run, because the user must change a setting.
        """
        answers: list[CountedText] = []
        group = 4 * self._rows
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for start in range(0, len(requests), group):
                part = requests[start : start + group]
                answers += self._answers(part)
                bar.update(len(part))
                self._write_log()
        return answers

    def _answers(self, instances: Sequence[Instance]) -> list[CountedText]:
        generations = [read_generation(instance.args[1]) for instance in instances]
        requests: list[Request] = []
        refusals: dict[str, str] = {}
        for number, (instance, generation) in enumerate(zip(instances, generations, strict=True)):
            request = self._request(str(number), instance.args[0], generation)
            try:
                self._model.engine.admission.check(request)
                requests.append(request)
            except RequestRefused as error:
                if error.code != "context_length_exceeded":
                    raise
                refusals[request.request_id] = str(error)
                LOGGER.warning("document %s of %s has no answer: %s", instance.doc_id, instance.task_name, error)
        stops = {str(number): generation.stop for number, generation in enumerate(generations)}
        decode = partial(decode_text, self.tokenizer)
        outputs = {o.request_id: o for o in generate_until(self._model.engine, requests, stops, decode)}
        answers = []
        for number, instance in enumerate(instances):
            output = outputs.get(str(number))
            answer = CountedText("")
            if output is not None:
                text = before_stop(decode(output.tokens), stops[str(number)])
                answer = CountedText(text, output.counts, output.finish_reason)
            answers.append(answer)
            self.cache_hook.add_partial("generate_until", instance.args, answer)
            self._record(instance, answer, refusals.get(str(number)))
        return answers

    def _request(self, name: str, context: str, generation: Generation) -> Request:
        request = Request(
            request_id=name,
            prompt=tuple(self.tok_encode(context)),
            max_tokens=generation.max_tokens,
            decoding=self._decoding(generation.decoding) if generation.decoding else self.decoding,
            sampling=generation.sampling,
        )
        return fit_request(request, self._model.config.max_positions)

    def _record(self, instance: Instance, answer: CountedText, error: str | None) -> None:
        row = {"task": instance.task_name, "doc_id": instance.doc_id, "error": error, **answer.measures()}
        self._records.append({**row, "finish_reason": answer.finish_reason})

    def _write_log(self) -> None:
        if self._log is not None:
            write_text(Path(self._log), "".join(json.dumps(row) + "\n" for row in self._records))

    def get_model_info(self) -> dict[str, Any]:
        """The model's part of a harness report: its decoding, and its counts over all generations."""
        rows = [row for row in self._records if "nfe" in row]
        info: dict[str, Any] = {"mbd_backend": self._model.backend, "mbd_decoding": repr(self.decoding)}
        if rows:
            forwards, tokens = (sum(row[name] for row in rows) for name in ("nfe", "tokens"))
            info |= {
                "mbd_generations": len(self._records),
                "mbd_not_decoded": len(self._records) - len(rows),
                "mbd_cut": sum(row["cut"] for row in rows),
                "mbd_nfe_mean": forwards / len(rows),
                "mbd_tpf_mean": sum(row["tpf"] for row in rows) / len(rows),
                "mbd_tpf_ratio_of_sums": tokens / forwards if forwards else 0.0,
            }
        return info

    # -- log-likelihoods ----------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Monte Carlo estimates (`likelihood.py`), and whether greedy decoding gives the same tokens.

        A text that is too long for the model ends the run, because no number could replace its likelihood.
        """
        results = []
        for texts, context, continuation in tqdm(
            requests, disable=kwargs.get("disable_tqdm", False), desc="Running loglikelihood requests"
        ):
            nats = log_likelihood(
                self._model.engine.model,
                context,
                continuation,
                block_size=self._model.engine.block_size,
                draws=self._draws,
            )
            result = nats, is_greedy(self._model.engine, context, continuation, self.decoding)
            self.cache_hook.add_partial("loglikelihood", texts, result)
            results.append(result)
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Not offered: a whole document has no prefix, and no published work reports its perplexity."""
        raise NotImplementedError(
            "model 'mbd' does not give loglikelihood_rolling (perplexity of whole documents); take tasks that "
            "generate, or that compare continuations (loglikelihood)"
        )

    # -- texts and tokens ---------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return int(self._model.config.eos_token_ids[0])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text (`evaluated_ids`), which holds a chat if the run uses the model's template."""
        return evaluated_ids(
            self.tokenizer, string, self._masking, in_chat=self._uses_chat, add_special_tokens=add_special_tokens
        )

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        return super()._encode_pair(context, self._masked(continuation) if self._uses_chat else continuation)

    def _masked(self, text: str) -> str:
        """A text whose control tokens are hidden, so that a chat holds only the template's own control tokens."""
        return hidden_controls(text, self._masking)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True, **_: Any
    ) -> str:
        """The chat in the model's template; without `add_generation_prompt` the last assistant turn stays open."""
        self._uses_chat = True
        turns = [{**turn, "content": self._masked(turn["content"])} for turn in chat_history]
        if add_generation_prompt:
            return chat_text(self.tokenizer, turns, masking=Masking()).text
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, continue_final_message=True)
        assert isinstance(text, str)
        return text

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The model's template, for the harness's records."""
        if isinstance(chat_template, str):
            raise ValueError(f"--apply_chat_template {chat_template}: the model has one template; name none")
        self._uses_chat = self._uses_chat or chat_template
        return str(self.tokenizer.chat_template) if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        return self._model.name


def _device(name: str | None) -> torch.device | None:
    """The device, or `None` if the engine chooses: `cuda:0` is the harness's default, also without a GPU."""
    if name is None or (name in ("cuda", "cuda:0") and not torch.cuda.is_available()):
        return None
    return torch.device(name)


def _decoding_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Decoding fields, with dotted names as nested fields.

    Raises `ValueError` for an unknown field or a wrong type.
    """
    values = {}
    for path, value in fields.items():
        text = {True: "true", False: "false", None: "none"}.get(value, value) if _is_name(value) else value
        (values[path],) = parse_grid(f"{path}={text}")[path]
    return merge_paths({}, values)


def _is_name(value: Any) -> bool:
    return value is None or isinstance(value, bool)
