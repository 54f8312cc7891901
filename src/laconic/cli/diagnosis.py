"""Checks this installation for `laconic doctor`: versions, machine, kernels, devices, backends, and whether they work.

Its `problems` keep laconic from working here; `faster` names what slows it down, and `hints` missing extras.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

import laconic
from laconic.cli.host import improvements, links, read_host
from laconic.cost.sizes import format_nbytes
from laconic.errors import LaconicError

_PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "triton", "safetensors", "tensorboard", "wandb")
_EXTRAS = {
    "transformers": "laconic train needs transformers: pip install 'laconic[train]'",
    "tqdm": "the live progress bar needs tqdm: pip install 'laconic[train]'",
    "scipy": "laconic plan --memory chooses by integer programming with scipy: pip install 'laconic[plan]'",
    "matplotlib": "pictures (--plot, --chart, --gantt) need matplotlib: pip install 'laconic[plots]'",
    "tensorboard": "laconic train --tensorboard needs tensorboard: pip install 'laconic[tensorboard]'",
    "wandb": "laconic train --wandb needs wandb: pip install 'laconic[wandb]'",
    "starlette": "laconic serve needs starlette: pip install 'laconic[serve]'",
    "uvicorn": "laconic serve needs uvicorn: pip install 'laconic[serve]'",
}

_DRIVER_FILE = Path("/proc/driver/nvidia/version")

Quantize = Callable[[Tensor, str], tuple[Tensor, Tensor]]
Dequantize = Callable[[Tensor, Tensor, str, int], Tensor]


@dataclass(frozen=True)
class Diagnosis:
    """State of this machine and installation, as plain data."""

    versions: dict[str, str | None]
    machine: dict[str, Any]
    kernels: dict[str, dict[str, str]]
    devices: list[dict[str, Any]]
    backends: dict[str, bool]
    links: list[dict[str, Any]]
    """Network interfaces, and what a connection over loopback carries."""
    self_test: dict[str, str]
    """Result of each implementation: "ok", or what is wrong with it."""
    problems: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    faster: list[dict[str, str]] = field(default_factory=list)
    """What would be faster: "finding" and "remedy" of each."""


def diagnose() -> Diagnosis:
    """Inspect this machine and run the self test: about a second, and on a GPU what compiling its kernels takes."""
    problems: list[str] = []
    kernels: dict[str, dict[str, str]] = {}
    self_test: dict[str, str] = {}
    try:
        from laconic.ops import kernels_in_use

        kernels = kernels_in_use()
        self_test = _test_kernels()
    except LaconicError as error:  # an environment variable asks for kernels that are missing
        problems.append(str(error))
    backends = _backends()
    if backends.get("gloo"):
        self_test["gloo"] = _test_gloo()
    problems += [f"{name}: {result}" for name, result in self_test.items() if result != "ok"]
    if not backends.get("gloo"):
        problems.append("this torch has no gloo backend, so several processes cannot talk on CPU")
    own = {"laconic": laconic.__version__, "python": platform.python_version()}
    packages = {package: _version(package) for package in _PACKAGES} | {"torch": torch.__version__}  # with its build
    return Diagnosis(
        versions=own | packages | _cuda_versions(),
        machine=_machine(),
        kernels=kernels,
        devices=_devices(),
        backends=backends,
        links=links(),
        self_test=self_test,
        problems=problems,
        hints=[hint for package, hint in _EXTRAS.items() if _version(package) is None],
        faster=[{"finding": found, "remedy": remedy} for found, remedy in improvements(read_host(kernels))],
    )


def render(diagnosis: Diagnosis) -> str:
    """Format `diagnosis` as text for a terminal."""
    machine = diagnosis.machine
    sections: list[tuple[str, list[tuple[str, str]]]] = [
        ("versions", [(name, version or "not installed") for name, version in diagnosis.versions.items()]),
        ("machine", [(name, str(value)) for name, value in machine.items()]),
        ("kernels", [(device, _kernel_text(kernel)) for device, kernel in diagnosis.kernels.items()]),
        ("devices", [(device["name"], device["detail"]) for device in diagnosis.devices]),
        (
            "backends",
            [(name, "available" if there else "not in this torch") for name, there in diagnosis.backends.items()],
        ),
        ("links", [(link["name"], link["detail"]) for link in diagnosis.links]),
        ("self test", list(diagnosis.self_test.items())),
    ]
    width = max(len(name) for _, entries in sections for name, _ in entries)
    lines = []
    for title, entries in sections:
        lines += [title, *(f"  {name:<{width}}  {value}" for name, value in entries), ""]
    if diagnosis.faster:
        lines += ["what would be faster"]
        lines += [f"  {one['finding']}\n    {one['remedy']}" for one in diagnosis.faster]
        lines += [""]
    lines += [f"hint: {hint}" for hint in diagnosis.hints]
    lines += [f"PROBLEM: {problem}" for problem in diagnosis.problems] or ["Everything laconic needs works here."]
    return "\n".join(lines)


def _kernel_text(kernel: dict[str, str]) -> str:
    isa = f" ({kernel['isa']})" if kernel.get("isa") else ""
    return f"{kernel.get('implementation', '?')}{isa}: {kernel.get('reason', '')}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_versions() -> dict[str, str | None]:
    """CUDA and NCCL that torch was built with, and the driver's version; nothing where torch has no CUDA."""
    if torch.version.cuda is None:
        return {}
    nccl = None
    if dist.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"cuda": torch.version.cuda, "nccl": nccl, "nvidia driver": _driver_version(_DRIVER_FILE)}


def _driver_version(file: Path) -> str | None:
    """The version that the kernel module states in its file, e.g. "NVRM version: ... x86_64  560.35.03  Release"."""
    try:
        found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", file.read_text(encoding="utf-8").partition("\n")[0])
    except OSError:
        return None
    return found.group() if found else None


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "memory": format_nbytes(psutil.virtual_memory().total),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _devices() -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = [{"name": "cpu", "detail": "always"}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        detail = f"{properties.name}, {format_nbytes(properties.total_memory)}, {capability}"
        devices.append({"name": f"cuda:{index}", "detail": detail})
    return devices


def _backends() -> dict[str, bool]:
    if not dist.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}


def _test_kernels() -> dict[str, str]:
    """Test every op of every implementation that runs here: the reference's bits, and its own errors within bounds."""
    from laconic.ops import native, reference

    def quantize(x: Tensor, code: str) -> tuple[Tensor, Tensor]:
        return reference.quantize_blockwise(x, code, 64, torch.bfloat16, None)

    def dequantize(codes: Tensor, scales: Tensor, code: str, length: int) -> Tensor:
        return reference.dequantize_blockwise(codes, scales, code, 64, length, torch.float32)

    results = {"reference": _test_values(quantize, dequantize)}

    def native_with(isa: str, op: str) -> Callable[..., Any] | None:
        kernel = getattr(native, op, None)
        return None if kernel is None else partial(kernel, isa=isa)

    for isa in native.supported_isas():
        results[f"c++ {isa}"] = _test_bits(partial(native_with, isa), "cpu")
    for index in range(torch.cuda.device_count()):
        device = f"cuda:{index}"
        results[device] = _test_bits(lambda op: getattr(torch.ops.laconic, op).default, device)
    return results


def _test_bits(implementation_of: Callable[[str], Callable[..., Any] | None], device: str) -> str:
    """Compare every op with the reference on small inputs that reach the code of all its kernels."""
    from laconic.ops.declarations import OPS
    from laconic.ops.self_check import difference, examples

    for op in OPS:
        implementation = implementation_of(op)
        if implementation is None:  # without kernels of its own the reference runs
            continue
        for choices, arguments in examples(op):
            where = f"{op} ({', '.join(map(str, choices))})"
            try:
                wrong = difference(op, implementation, arguments, device)
            except Exception as error:  # a self test reports whatever goes wrong, it does not stop at it
                return f"{where} fails: {type(error).__name__}: {error}"
            if wrong:
                return f"{where} gives other bits than the reference: {wrong}"
    return "ok"


def _test_values(quantize: Quantize, dequantize: Dequantize) -> str:
    from laconic.ops.codebooks import AFFINE, BITS, rounding_error

    x = torch.randn(16, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    blocks = torch.nn.functional.pad(x, (0, 24)).view(16, -1, 64)
    largest = blocks.abs().amax(-1, keepdim=True).expand_as(blocks).reshape(16, -1)[:, :1000]
    for code in BITS:
        # With room for the rounding of a bfloat16 scale (2**-9), or of a step and a minimum.
        bound = rounding_error(code) + (0.01 if code in AFFINE else 0.002)
        try:
            values = dequantize(*quantize(x, code), code, 1000)
        except Exception as error:  # a self test reports whatever goes wrong, it does not stop at it
            return f"{code} fails: {type(error).__name__}: {error}"
        if not bool(((values - x).abs() <= bound * largest).all()):
            return f"{code} gives values back that are too far from what went in"
    return "ok"


def _test_gloo() -> str:
    """Run one all-reduce in a group of one process: gloo must find a usable network interface."""
    if dist.is_initialized():
        return "ok"
    try:
        timeout = timedelta(seconds=10)
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timeout)
        try:
            value = torch.ones(1, dtype=torch.float32, device="cpu")
            dist.all_reduce(value)
            return "ok" if value.item() == 1.0 else f"all_reduce of 1 over one process gives {value.item()}"
        finally:
            dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        return f"cannot start: {error}; name a network interface in GLOO_SOCKET_IFNAME, e.g. lo"
