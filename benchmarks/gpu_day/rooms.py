"""Part 7: a layer of experts, offload to pinned host memory, a captured step, and the inference engine (engine.py).

What a device computes stands beside the CPU's result. In a rehearsal offload and the captured step run on a simulated
device, the others on the CPU.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import laconic
from benchmarks.gpu_day.setting import Setting, relative_error
from benchmarks.registry import Table
from laconic.activations.keep.choice import Choice, Offload
from laconic.activations.recognize.sites import Site
from laconic.formats import BlockFormat
from laconic.moe import GatedExperts, MoELayer, SoftmaxGate

_NEAR = 2e-2
"""Relative error of values that bf16 products on a device and fp32 ones on the CPU may have of each other."""


def run(setting: Setting) -> None:
    """Each room alone."""
    rooms: dict[str, Callable[[Setting], Table]] = {
        "layer of experts": _experts_table,
        "offload": _offload_table,
        "CUDA graph": _graph_table,
    }
    for name, room in rooms.items():
        with setting.report.section(name):
            setting.table(room(setting))
        setting.free()
    _run_engine(setting)


def _run_engine(setting: Setting) -> None:
    """The engine in a process of its own, which finds the transformers that was brought along for it."""
    path = [os.environ.get("LACONIC_GPU_DAY_INFERENCE", ""), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "benchmarks.gpu_day", "engine", *(["--rehearse"] if setting.rehearses else [])]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}, check=False)
    if done.returncode:
        setting.report.problem("inference", f"its process ended with exit code {done.returncode}; it says more itself")


def _need(is_right: bool, what: str) -> None:
    if not is_right:
        raise AssertionError(what)


def _experts_table(setting: Setting) -> Table:
    """Forward and backward of a layer, in bf16, beside fp32 on the CPU; the gate decides in fp32."""
    tokens, width, hidden, experts, top_k = setting.sized((4096, 2048, 1024, 64, 8), (16, 32, 16, 4, 2))
    torch.manual_seed(0)
    layer = MoELayer(SoftmaxGate(experts, width, top_k), GatedExperts(experts, width, hidden))
    x = torch.randn(tokens, width)
    few = slice(0, min(tokens, 256))  # what the CPU computes as well
    twin = copy.deepcopy(layer).to(setting.device)
    source = x.to(setting.device).requires_grad_()

    def step() -> None:
        twin(source).sum().backward()
        twin.zero_grad(set_to_none=True)
        source.grad = None

    with torch.no_grad():
        error = relative_error(twin(source[few]), layer(x[few]))
    _need(error < _NEAR, f"the layer's output on the device is off by {error:.1e} of its norm")
    step()
    row = [
        "fp32",
        f"{error:.1e}",
        f"{setting.device_seconds(step) * 1e3:.2f}",
        f"{setting.host_seconds(step) * 1e3:.2f}",
    ]
    return Table(
        f"A layer of {experts} experts, {width} x {hidden}, top-{top_k}, {tokens} tokens",
        ["", "error beside the CPU", "forward and backward: device ms", "host ms"],
        [row],
        "The host waits for the number of rows of each expert.",
    )


def _offloaded(site: Site) -> Choice:
    return Offload(BlockFormat("int8")) if site.kind not in ("attention", "mixer") else None


def _offload_table(setting: Setting) -> Table:
    """Gradients of a model whose packed values wait on the host, beside those of one that keeps them."""
    from tests.activations.models import make_ids, make_model
    from tests.streams.cuda import CUDA, cuda
    from tests.streams.test_activations import on_device, step

    kept = make_model("llama", hidden_act="gelu")  # gradients of silu are made from codes on the device alone
    sent = copy.deepcopy(kept)
    laconic.compress_activations(kept, policy=_kept, sequence_length=4)
    laconic.compress_activations(sent, policy=_offloaded, sequence_length=4)
    ids = make_ids(length=setting.sized(1024, 32))
    if setting.rehearses:
        expected = _gradients(kept, lambda: step(kept, ids))
        with cuda() as device:
            on_device(sent)
            found = _gradients(sent, lambda: step(sent, ids.to(CUDA)))
        device.check(20)
        peaks = ["not measured"] * 2
    else:
        kept, sent, ids = kept.cuda(), sent.cuda(), ids.cuda()
        expected = _gradients(kept, lambda: step(kept, ids))
        found = _gradients(sent, lambda: step(sent, ids))
        before = torch.cuda.memory_allocated()
        peaks = [f"{(setting.peak_nbytes(lambda m=m: step(m, ids)) - before) / 2**20:.1f} MiB" for m in (kept, sent)]
    error = max(relative_error(found[name], gradient) for name, gradient in expected.items())
    _need(error < 1e-5, f"a gradient is off by {error:.1e} of its norm")
    return Table(
        "Packed values in pinned host memory until backward: a tiny Llama",
        ["", "largest error of a gradient", "peak of a step"],
        [["kept on the device", "", peaks[0]], ["offloaded", f"{error:.1e}", peaks[1]]],
    )


def _kept(site: Site) -> Choice:
    choice = _offloaded(site)
    return choice.format if isinstance(choice, Offload) else choice


def _gradients(model: nn.Module, run_step: Callable[[], object]) -> dict[str, Tensor]:
    run_step()
    found = {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _graph_table(setting: Setting) -> Table:
    """A step of a compressed model, captured and replayed, gives the eager step's gradients."""
    from tests.activations.models import make_ids
    from tests.streams.test_activations import check_step, compressed

    rows = []
    for attention in ("exact", "int8", "recompute")[: setting.sized(3, 1)]:
        model = compressed(bits=4, attention=attention)
        if setting.rehearses:
            check_step(model)
            rows.append([attention, "equal, and the host waited for nothing", "not measured", "not measured"])
            continue
        model, ids = model.cuda(), make_ids(length=32).cuda()

        def step(model: nn.Module = model, ids: Tensor = ids) -> Tensor:
            loss: Any = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            return loss

        expected = _gradients(model, step)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
                model.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        setting.wait()
        found = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        # Some of torch's kernels add in another order each time.
        error = max(relative_error(found[name], gradient) for name, gradient in expected.items())
        _need(
            error < 1e-5, f"attention {attention}: a gradient of the replayed graph is off by {error:.1e} of its norm"
        )
        eager, replayed = setting.host_seconds(step), setting.device_seconds(graph.replay)
        rows.append([attention, f"off by {error:.1e}", f"{eager * 1e3:.2f}", f"{replayed * 1e3:.2f}"])
        del graph
    return Table(
        "A captured step of a tiny compressed Llama",
        ["attention", "gradients", "eager, host ms", "replayed, device ms"],
        rows,
    )
