"""A device that is not the host, computed on the host: what an engine does to a GPU, seen without one.

Tensors of the fake device say that they are on `cuda:0` and hold a host tensor that only `FakeDevice` looks into. An
operation that takes tensors of both sides is an error, as on a GPU. Whatever makes the host wait for the device, or
copies to it from memory that is not pinned, is counted; while a graph is captured it is an error.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.gpu.step_nodes import StandIn

FREE, TOTAL, PEAK = 6 << 20, 10 << 20, 1 << 20  # the fake device's memory, and what a forward takes of it
HOST = torch.device("cpu")
aten = torch.ops.aten

# Their result's shape, or the result itself, depends on values: on a GPU the host waits for them.
WAITS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
    aten.equal,
    aten.is_nonzero,
}
# The result's shape depends on values for some arguments (`_counts`).
COUNTS = {aten.repeat_interleave, aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class OnDevice(StandIn):
    """A tensor of the fake device; `content` holds its values on the host."""

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: "OnDevice") -> None:  # torch sets it without telling a dispatch mode
        self.content = value.content


class Facts:
    """What one operation does, whatever its arguments."""

    def __init__(self, func: Any) -> None:
        self.packet = func.overloadpacket
        self.copies = self.packet in (aten._to_copy, aten.copy_)
        self.waits = self.packet in WAITS
        self.counts = self.packet in COUNTS
        self.writes = func._schema.is_mutable
        self.may_be_view = not self.writes and any(result.alias_info is not None for result in func._schema.returns)
        self.kernel = KERNELS.get(self.packet, func)


class FakeDevice(TorchDispatchMode):
    """Computes for `OnDevice` tensors. `waits` counts what makes the host wait, `uploads` what comes from it. Copies
    to and from pinned memory that are told not to block are neither."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self.graph: Graph | None = None
        self._facts: dict[Any, Facts] = {}
        self._pinned: dict[int, Tensor] = {}  # kept, so that no other tensor gets their place
        self._pools: dict[int, list[Graph]] = {}  # kept, likewise

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch's guard against it costs as much as an operation, and imports Dynamo."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = Facts(func)
        tensors: list[Tensor] = []
        host_args = _to_host(args, tensors)
        host_kwargs = _to_host(kwargs, tensors) if kwargs else {}
        has_device = any(type(t) is OnDevice for t in tensors)
        device = host_kwargs.get("device")
        to_device = has_device if device is None else torch.device(device).type == "cuda"
        if facts.copies:
            self._check_copy(facts.packet, tensors, args, host_kwargs, to_device)
        elif has_device:
            if any(type(t) is not OnDevice and t.ndim for t in tensors):
                raise AssertionError(f"{func} takes tensors of the device and of the host")
            if facts.waits or (facts.counts and _counts(func, args, host_kwargs)):
                self.wait(str(facts.packet))
        pin_memory = host_kwargs.pop("pin_memory", None)
        if device is not None:
            host_kwargs["device"] = HOST
        call = Call(facts.kernel, host_args, host_kwargs)
        if facts.writes:
            output = (kwargs or {}).get("out", args[0])
            assert isinstance(output, Tensor), f"{func} writes to several tensors, which is not told here"
            self._run(call, on_device=to_device, writes=True)
            return output
        out = self._run(call, on_device=to_device, may_be_view=facts.may_be_view)
        if pin_memory:
            self.pin(out)
        return out

    def _check_copy(self, packet: Any, tensors: list[Tensor], args: Any, kwargs: Any, to_device: bool) -> None:
        source = args[0] if packet is aten._to_copy else args[1]
        target = to_device if packet is aten._to_copy else isinstance(args[0], OnDevice)
        is_async = kwargs.get("non_blocking", args[2:] == (True,))
        is_free = is_async and any(_place(t) in self._pinned for t in tensors if not isinstance(t, OnDevice))
        if isinstance(source, OnDevice) and not target and not is_free:
            self.wait(f"{packet} to the host")
        elif target and not isinstance(source, OnDevice) and source.ndim and not is_free:
            self.upload(f"{packet} from the host")

    def _run(self, call: "Call", *, on_device: bool, writes: bool = False, may_be_view: bool = False) -> Any:
        if self.graph is not None and on_device:
            self.graph.record(call, writes, may_be_view)
        else:
            call.run()
        if not on_device or writes:
            return call.out
        return self.put(call.out) if isinstance(call.out, Tensor) else _map_tensors(self.put, call.out)

    def pin(self, host: Tensor) -> Tensor:
        """`host`, known from now on as pinned memory."""
        self._pinned[_place(host)] = host
        return host

    def put(self, value: Any) -> Any:
        """A host tensor as one of the device; other values as they are."""
        return OnDevice.of(value) if isinstance(value, Tensor) else value

    def move(self, module: nn.Module) -> nn.Module:
        """`module`, its parameters and buffers put on the device."""
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(self.put(parameter.detach().clone()), requires_grad=False)
            for name, buffer in part._buffers.items():
                part._buffers[name] = self.put(buffer)
        return module

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, written for host tensors, as a kernel: all its tensors must be on the device. It may write to
        temporaries only."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors: list[Tensor] = []
            host_call = Call(function, *_to_host((args, kwargs), tensors))
            strange = sum(not isinstance(t, OnDevice) for t in tensors)
            assert not strange, f"{function.__name__} was given {strange} tensors of the host"
            with _disable_current_modes():
                return self._run(host_call, on_device=True)

        return call

    @contextmanager
    def capture(
        self, graph: "Graph", pool: Any = None, stream: object = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """Stands for `torch.cuda.graph`: nothing may wait or come from the host, and nothing is done yet."""
        self.graph = graph
        graph.pool = self._pool(pool)
        try:
            yield
        finally:
            self.graph = None
            graph.undo()
            graph.pool.append(graph)

    def _pool(self, pool: "list[Graph] | None") -> "list[Graph]":
        """Torch keeps a pool whose last graph is gone while a tensor in it lives, and refuses to capture into it."""
        pool = [] if pool is None else pool
        assert pool or id(pool) not in self._pools, "a pool that no graph uses any more is captured into"
        self._pools[id(pool)] = pool
        return pool

    def wait(self, what: str) -> None:
        assert self.graph is None, f"{what} makes the host wait, which no graph can capture"
        self.waits[what] += 1

    def upload(self, what: str) -> None:
        assert self.graph is None, f"{what} copies from the host, which no graph can capture"
        self.uploads[what] += 1


@dataclass
class Call:
    """An operation on host tensors, and what it gave."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    out: Any = None

    def run(self) -> None:
        self.out = self.function(*self.args, **self.kwargs)

    def repeat(self) -> None:
        """Once more, its results put where the first ones lie."""
        results = self.function(*self.args, **self.kwargs)
        for target, result in zip(_tensors(self.out), _tensors(results), strict=True):
            if target.data_ptr() != result.data_ptr():
                target.copy_(result)


class Graph:
    """Stands for `torch.cuda.CUDAGraph`: the operations of a capture, made again over the same memory."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._made: list[Tensor] = []
        self._saved_memory: dict[int, tuple[Tensor, Tensor]] = {}
        self._has_run = False
        self.pool: list[Graph] = []

    def record(self, call: Call, writes: bool, may_be_view: bool) -> None:
        if writes:
            output = call.kwargs.get("out", call.args[0])
            if (place := _place(output)) not in self._saved_memory:
                storage = output.new_empty(0).set_(output.untyped_storage())
                self._saved_memory[place] = storage, storage.clone()
        call.run()
        made: list[Tensor] = []
        if not writes:
            inputs = {_place(t) for t in _tensors((call.args, call.kwargs))}
            made = [t for t in _tensors(call.out) if _place(t) not in inputs]
            self._made += made
        if made or not may_be_view:  # a view shows what its memory holds
            self._calls.append(call)

    def undo(self) -> None:
        """A capture does nothing: what was written is as it was."""
        for memory, values in self._saved_memory.values():
            memory.copy_(values)

    def replay(self) -> None:
        with _disable_current_modes():
            for other in self.pool:
                other.spoil()
            for call in self._calls:
                call.repeat()
        self._has_run = True

    def reset(self) -> None:
        self._calls.clear()
        self._made.clear()
        self.pool.remove(self)

    def spoil(self) -> None:
        """Another graph of the same pool runs: what this one made is gone, something else stands there."""
        for tensor in self._made if self._has_run else ():
            tensor.fill_(torch.nan if tensor.dtype.is_floating_point else True if tensor.dtype == torch.bool else 99)
        self._has_run = False


class _Stream:
    """A stream or an event: all is done in the order it is asked for."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False) -> None: ...

    def record(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, other: object) -> None: ...

    def elapsed_time(self, other: object) -> float:
        return 1.0


class _Generator(torch.Generator):
    """A generator of any device draws on the host."""

    def __new__(cls, device: Any = None) -> "_Generator":
        return super().__new__(cls, "cpu")


@contextmanager
def fake_device() -> Iterator[FakeDevice]:
    """The fake device, and as much of `torch.cuda` as an engine asks for."""
    found, make, read = FakeDevice(), torch.tensor, Tensor.tolist

    def tensor(data: Any, *, device: Any = None, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            return found.pin(make(data, **options))
        if torch.device(device or "cpu").type != "cuda":
            return make(data, device=device, **options)
        found.upload("torch.tensor")
        return found.put(make(data, **options))

    def tolist(x: OnDevice) -> Any:
        found.wait("tolist")
        return read(x.content)

    with ExitStack() as stack:
        for name, value in {
            "_lazy_init": lambda: None,
            "get_device_capability": lambda device=None: (9, 0),
            "graph_pool_handle": list,
            "Event": _Stream,
            "Stream": _Stream,
            "current_stream": lambda device=None: _Stream(),
            "stream": lambda stream: nullcontext(),
            "device": lambda device: nullcontext(),
            "CUDAGraph": Graph,
            "graph": found.capture,
            "synchronize": lambda device=None: None,
            "mem_get_info": lambda device=None: (FREE, TOTAL),
            "memory_allocated": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: PEAK,
            "reset_peak_memory_stats": lambda device=None: None,
            "empty_cache": lambda: None,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        # torch tells a dispatch mode of neither
        stack.enter_context(mock.patch.object(torch, "tensor", tensor))
        stack.enter_context(mock.patch.object(OnDevice, "tolist", tolist))
        stack.enter_context(found)
        yield found


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists and dictionaries (torch's own trees do more, and cost most of a test)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _to_host(value: Any, tensors: list[Tensor]) -> Any:
    """`value` with the contents of tensors of the device; its tensors are added to `tensors`."""
    kind = type(value)
    if kind is OnDevice:
        tensors.append(value)
        return value.content
    if kind is tuple:
        return tuple([_to_host(part, tensors) for part in value])
    if kind is list:
        return [_to_host(part, tensors) for part in value]
    if kind is dict:
        return {key: _to_host(part, tensors) for key, part in value.items()}
    if isinstance(value, Tensor):
        tensors.append(value)
    return value


def _map_tensors(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with each of its leaves changed."""
    if isinstance(value, tuple | list):
        parts = [_map_tensors(change, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: _map_tensors(change, part) for key, part in value.items()}
    return change(value)


def _counts(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the shape of what is made or written is found by counting: masks as indices, repeats without a size."""
    if func.overloadpacket is aten.repeat_interleave:
        return func is not aten.repeat_interleave.self_int and kwargs.get("output_size") is None
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """FP8 products with a scale a row and a column, under the conditions that CUDA sets."""
    (rows, inner), columns = a.shape, b.shape[1]
    assert a.dtype == b.dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16
    assert a.stride() == (inner, 1) and b.stride() == (1, inner) and inner % 16 == columns % 16 == 0
    assert (
        scale_a.shape == (rows, 1)
        and scale_b.shape == (1, columns)
        and scale_a.dtype == scale_b.dtype == torch.float32
    )
    assert scale_a.is_contiguous() and scale_b.is_contiguous()
    return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)


KERNELS = {aten._scaled_mm: _scaled_mm}
