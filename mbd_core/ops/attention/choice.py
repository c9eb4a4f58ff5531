"""The choice of an attention kernel for a device, with the reason why each other kernel is not used.

All kernels compute `definition.paged_attention`. GPU packages are imported only for a CUDA device.
`AttentionKernel.bind` prepares the layers' common part once a step.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mbd_core.ops.attention import cpu as attention_cpu
from mbd_core.ops.attention import flash, paged_attention
from mbd_core.ops.attention.definition import BoundAttention, RowLayout


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """The kernel in use. `reasons` has one sentence for every other kernel: why it is not used.

    A `capturable` kernel reads nothing on the host if the layout has its `max_q`, so a CUDA graph can hold its calls.
    `bind` prepares a batch once a step for all layers: each row's queries attend to keys of its pages
    (`definition.paged_attention`).
    """

    name: str
    bind: Callable[[RowLayout], BoundAttention]
    capturable: bool
    reasons: dict[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """One line to print when an engine starts."""
        return "; ".join([f"attention: {self.name}", *(f"not {name}: {why}" for name, why in self.reasons.items())])


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """A case that a kernel must support. `windows`: layouts with a sliding window. `capability` is the CUDA device's,
    None elsewhere."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    page_size: int
    num_heads: int
    num_kv_heads: int
    windows: bool
    capability: tuple[int, int] | None
    load: Callable[[str], Any] = importlib.import_module


class UnavailableError(Exception):
    """A kernel cannot serve a case; the message says why."""


def resolve(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    page_size: int,
    preference: str | None = None,
    *,
    num_heads: int = 1,
    num_kv_heads: int = 1,
    windows: bool = False,
    capability: tuple[int, int] | None = None,
    load: Callable[[str], Any] = importlib.import_module,
) -> AttentionKernel:
    """The first kernel that can serve the case, or `preference` if it can.

    On a CPU the kernel is "reference" (`cpu.py`). On CUDA the order is the order of `KERNELS`; "reference" comes last.
    `capability` and `load` (an importer) default to the device's and Python's. Raises `ValueError` for sizes that no
    kernel takes, for an unknown preference, and for a preference that the case rules out, with the reason.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
    if preference not in (None, "reference", *KERNELS):
        raise ValueError(f"attention={preference!r} is unknown; choose one of {', '.join([*KERNELS, 'reference'])}")
    if capability is None and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    case = KernelCase(
        device=device,
        dtype=dtype,
        head_dim=head_dim,
        page_size=page_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        windows=windows,
        capability=capability,
        load=load,
    )
    reasons: dict[str, str] = {}
    selection = _first_flash(case, preference, reasons)
    if preference not in (None, "reference" if selection is None else selection[0]):
        raise ValueError(
            f"attention={preference!r} cannot be used: {reasons[str(preference)]}; leave it unset to choose"
        )
    if selection is None:
        return AttentionKernel(name="reference", bind=attention_cpu.bind, capturable=False, reasons=reasons)
    name, kernel = selection
    reasons["reference"] = f"{name} is faster on {device.type}"
    return flash_attention(name, kernel, reasons)


def flash_attention(name: str, kernel: flash.FlashKernel, reasons: dict[str, str]) -> AttentionKernel:
    """The `AttentionKernel` of a kernel that takes its rows as flash-attention packages do.

    No package's kernel hides keys inside a row, so our own serves the layouts with a gap.
    """

    def bind(layout: RowLayout) -> BoundAttention:
        rows = layout.for_kernels()
        return kernel(rows) if rows.gap_R is None else paged_attention.bind(rows)

    return AttentionKernel(name=name, bind=bind, capturable=True, reasons=reasons)


def _first_flash(
    case: KernelCase, preference: str | None, reasons: dict[str, str]
) -> tuple[str, flash.FlashKernel] | None:
    """The first of `KERNELS` that can serve the case, or `None`; adds the other kernels' obstacles to `reasons`."""
    selection: tuple[str, flash.FlashKernel] | None = None
    for name, build in KERNELS.items():
        if selection is not None:
            reasons[name] = f"{selection[0]} comes first"
        elif preference is not None and preference != name:
            reasons[name] = f"{preference} was asked for"
        elif name in _ON_REQUEST and preference != name:
            reasons[name] = "it is fetched from the network, so it is used only when asked for by name"
        else:
            try:
                selection = name, build(case)
            except UnavailableError as error:
                reasons[name] = str(error)
    return selection


def _require(case: KernelCase, *, page_multiple: int, most_channels: int = 256, windows: bool = False) -> None:
    """Raises `UnavailableError` if a kernel for GPUs does not support the case. `windows`: whether the kernel takes
    sliding windows."""
    if case.device.type != "cuda" or case.capability is None:
        raise UnavailableError(f"it needs a CUDA device, this is {case.device.type}")
    if case.capability < (8, 0):
        raise UnavailableError("it needs compute capability 8.0, this device has {}.{}".format(*case.capability))
    if case.dtype not in (torch.float16, torch.bfloat16):
        raise UnavailableError(f"it takes float16 and bfloat16, not {str(case.dtype).removeprefix('torch.')}")
    if case.head_dim > most_channels or case.head_dim % 8:
        raise UnavailableError(f"it takes head sizes up to {most_channels} in steps of 8, not {case.head_dim}")
    if case.windows and not windows:
        raise UnavailableError("it is called without sliding windows, which this model's layers have")
    if case.page_size % page_multiple:
        raise UnavailableError(f"its pages are multiples of {page_multiple} tokens, these have {case.page_size}")


def _load(case: KernelCase, module: str, *attributes: str) -> tuple[Any, ...]:
    try:
        package = case.load(module)
        return tuple(getattr(package, attribute) for attribute in attributes)
    except (ImportError, OSError, AttributeError) as error:
        raise UnavailableError(f"{module} cannot be imported ({error})") from error


def _takes(function: Callable[..., Any], *arguments: str) -> None:
    missing = [name for name in arguments if name not in inspect.signature(function).parameters]
    if missing:
        raise UnavailableError(f"the installed {function.__name__} takes no {missing[0]}; a newer one does")


def _vllm(case: KernelCase) -> flash.FlashKernel:
    _require(case, page_multiple=16)
    (function,) = _load(case, "vllm.vllm_flash_attn", "flash_attn_varlen_func")
    (supports,) = _load(case, "vllm.vllm_flash_attn.flash_attn_interface", "is_fa_version_supported")
    return flash.vllm_flash(function, fa_version=3 if supports(3) else 2)


def _torch_paged(case: KernelCase) -> flash.FlashKernel:
    _require(case, page_multiple=16)
    (varlen_attn,) = _load(case, "torch.nn.attention.varlen", "varlen_attn")
    _takes(varlen_attn, "block_table", "num_splits")
    major = case.capability[0] if case.capability is not None else 0
    packages = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute.interface")}
    if major not in packages:
        raise UnavailableError("torch takes block tables only with FlashAttention 3 or 4 (capability 9 or 10)")
    implementation, package = packages[major]
    _load(case, package)
    (activate,) = _load(case, "torch.nn.attention", "activate_flash_attention_impl")
    try:
        activate(implementation)
    except (RuntimeError, ValueError) as error:
        raise UnavailableError(f"{implementation} cannot be activated ({error})") from error
    return flash.torch_varlen(varlen_attn)


def _flash_attn(case: KernelCase) -> flash.FlashKernel:
    _require(case, page_multiple=256)
    (function,) = _load(case, "flash_attn", "flash_attn_varlen_func")
    return flash.flash_2(function)


def _hub(case: KernelCase) -> flash.FlashKernel:
    _require(case, page_multiple=16)
    if case.capability is not None and case.capability[0] > 9:
        raise UnavailableError(
            "FlashAttention 3 is built for capability 8 and 9, this device has {}.{}".format(*case.capability)
        )
    (get_kernel,) = _load(case, "kernels", "get_kernel")
    _takes(get_kernel, "version")
    try:
        module = get_kernel("kernels-community/vllm-flash-attn3", version=1)
    except (OSError, ValueError, RuntimeError) as error:
        raise UnavailableError(f"the hub has no build for this machine or cannot be reached ({error})") from error
    return flash.flash_3(module.flash_attn_with_kvcache)


def _triton(case: KernelCase) -> flash.FlashKernel:
    _require(case, page_multiple=1, most_channels=512, windows=True)
    _load(case, "triton")
    return paged_attention.bind


KERNELS: dict[str, Callable[[KernelCase], flash.FlashKernel]] = {
    "vllm-flash-attn": _vllm,
    "torch-varlen": _torch_paged,
    "flash-attn": _flash_attn,
    "kernels-hub": _hub,
    "triton": _triton,
}
_ON_REQUEST = frozenset({"kernels-hub"})
