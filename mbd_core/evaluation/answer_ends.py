"""Where answers end: at a stop string, which ends the decoding of its request, or at the limit of their tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mbd_core.canvas.limits import canvas_max_tokens
from mbd_core.decoding.request import Output, Request, StepOutput
from mbd_core.engine.engine import Engine

Decode = Callable[[Sequence[int]], str]
Stops = Mapping[str, Sequence[str]]


def fitted(request: Request, positions: int) -> Request:
    """The request with as many tokens as a model of `positions` holds behind its prompt, at most its own number. Where
    nothing fits it stays as it is, and the engine refuses it."""
    most = positions - len(request.prompt)
    if most < 1:
        return request
    canvas = request.decoding.canvas
    if canvas is None:
        return replace(request, max_tokens=min(request.max_tokens, most))
    return replace(request, max_tokens=canvas_max_tokens(canvas, preferred=request.max_tokens, most=most))


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the stop string that comes first; all of it without one."""
    return text[: min((place for s in stop if (place := text.find(s)) >= 0), default=len(text))]


class AnswerEnds:
    """Sees where requests end as their steps come: at one of their stop strings (`stops`, by the request's id), or by
    themselves.

    At a stop string the reason is `stop`, the tokens and their count end with the token that completes the string, and
    the forwards are those up to the step that committed it. The caller aborts what the engine still does for it.
    """

    def __init__(self, stops: Stops, decode: Decode) -> None:
        self._stops, self._decode = stops, decode
        self._tokens: dict[str, list[int]] = {}
        self._ended: set[str] = set()

    def end(self, step: StepOutput) -> Output | None:
        """The output, if the request ends with this step. Steps after the end have none."""
        name, stop = step.request_id, self._stops.get(step.request_id, ())
        if name in self._ended:
            return None
        tokens = self._tokens.setdefault(name, [])
        tokens += step.new_tokens
        output = step.output
        if any(s in self._decode(tokens) for s in stop):
            number = len(tokens) - len(step.new_tokens) + 1
            while not any(s in self._decode(tokens[:number]) for s in stop):
                number += 1
            counts = replace(step.counts, num_tokens=number)
            output = Output(request_id=name, tokens=tuple(tokens[:number]), finish_reason="stop", counts=counts)
        if output is not None:
            self._ended.add(name)
        return output


def generate_until(engine: Engine, requests: Sequence[Request], stops: Stops, decode: Decode) -> list[Output]:
    """The outputs of `requests`, in their order, ended as `AnswerEnds` sees it; raises as `Engine.generate` does."""
    if not any(stops.get(request.request_id) for request in requests):
        return engine.generate(list(requests))
    engine.check_idle("generate_until")
    for admitted in [engine.admission.check(request) for request in requests]:
        engine.add_admitted(admitted)
    ends, outputs = AnswerEnds(stops, decode), dict[str, Output]()
    while engine.has_work:
        for step in engine.step():
            if (output := ends.end(step)) is not None:
                outputs[step.request_id] = output
                if step.output is None:
                    engine.abort(step.request_id)
    return [outputs[request.request_id] for request in requests]
