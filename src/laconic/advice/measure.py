"""`advise` measures the ways to keep less for backward on copies of a model, one round of all after the other."""

from __future__ import annotations

import copy
import gc
import logging
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.activations import SavedTensorTracker
from laconic.activations.forwards.attention import attention_core_of
from laconic.activations.forwards.replacement import replacements_of
from laconic.activations.keep.preserve import noted_random_states
from laconic.activations.keep.rounding import seeds_restored
from laconic.activations.whole_model.report import SAVINGS_LOGGER, brief
from laconic.advice.advice import Advice, Row
from laconic.advice.link import measure_link
from laconic.advice.methods import EXACT, METHODS, Method, compiled
from laconic.auditing.training_call import LossOf, TrainingCall
from laconic.errors import LaconicError, ModelError
from laconic.train.memory.step_peak import peak_nbytes

_BUDGETS = (1.0, 0.5)
_LEAST_FACTOR = 2.0  # below it a report of compress_activations proposes mode="combined"
_NEGLIGIBLE = 1e-3  # of the whole gradient's norm: a bias whose gradient is zero but for rounding says nothing


def advise(
    model: nn.Module,
    batch: Any,
    *,
    loss_of: LossOf | None = None,
    rounds: int = 5,
    autocast: torch.dtype | None = None,
    compile: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Advice:
    """Measure, on this model and machine, each way to keep less for backward.

    Exact, activations in 4 and 8 bits, the chunked loss, checkpointing, offload: bytes kept, time, peak memory and how
    far gradients are off. The model, its gradients, the batch and all random states are as before: copies of the model
    are measured, which take memory for its parameters and gradients a second time, and gradients a third. A model in
    evaluation is measured in training mode, a compiled one as it is written.

    Args:
        model: any module, not compressed, neither wrapped in DDP nor sharded.
        batch: a dict of keyword arguments of its forward, a tuple or list of positional ones, or a tensor; on the
            model's device.
        loss_of: the loss of what the model returns. None takes `output.loss`, or the number that the model returns, or
            its outputs times fixed random numbers; the advice says which.
        rounds: of timing; each times every way once.
        autocast: dtype of torch.autocast around forward and loss, for example torch.bfloat16.
        compile: also measure the model under torch.compile, and with torch's activation memory budget. Compiling takes
            minutes.
        group: ranks that average gradients, each of which calls this with the same model; what their link takes for
            them is measured too, coded and not. None is the default group of torch.distributed, if there is one.

    Returns:
        The table; `print` it.

    Raises:
        ModelError: the model cannot be copied, does not run on the batch as it is, has no loss or no gradient, or is
            one of those named above.
    """
    _check(model, rounds)
    call = TrainingCall(model, batch, loss_of, autocast)
    with _untouched(model), _quiet():
        copies = _Copies(model)
        ways = _Ways(copies, call)
        ways.measure_exact()
        for method in (*METHODS[1:], *map(compiled, _BUDGETS if compile else ())):
            ways.measure(method)
        if not compile:
            ways.left_out["compiled, memory budget"] = "compiling takes minutes; compile=True (--compile) does it"
        seconds, host_seconds = ways.time(rounds)
        exact = seconds[EXACT]
        quotients = {name: [a / b for a, b in zip(found, exact, strict=True)] for name, found in seconds.items()}
        link = None
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and group.size() > 1:
            link = measure_link(list(ways.reference.values()), group, rounds)
        rows = [
            Row(name, seconds=statistics.median(seconds[name]), fastest_seconds=min(seconds[name]),
                slowest_seconds=max(seconds[name]), slowdown=statistics.median(quotients[name]),
                least_slowdown=min(quotients[name]), most_slowdown=max(quotients[name]),
                host_seconds=statistics.median(host_seconds[name]) if host_seconds[name] else None, **found)
            for name, found in ways.found.items()
        ]  # fmt: skip
    number = sum(parameter.numel() for parameter in model.parameters())
    described = f"{type(model).__name__}, {number:,} parameters"
    return Advice(described, _device_name(call.device), call.loss_from, rounds, tuple(rows), ways.left_out, link)


class _Copies:
    """Copies of a model's modules that share one copy of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        try:
            self._shared: dict[int, Any] = {id(p): copy.deepcopy(p) for p in model.parameters()}
            # What the old weight_norm computes and copy.deepcopy refuses; it is computed anew in each forward.
            values = (value for module in model.modules() for value in vars(module).values())
            computed = [value for value in values if isinstance(value, Tensor) and not value.is_leaf]
            self._shared.update({id(value): value.detach().clone() for value in computed})
            self.make()
        except Exception as error:
            raise ModelError(
                f"{type(model).__name__} cannot be copied ({brief(error)}), and advise measures copies so that the"
                " model stays as it is; build it anew without what copy.deepcopy refuses"
            ) from error

    def make(self) -> nn.Module:
        """Another copy, in training mode; buffers are its own."""
        made = copy.deepcopy(self._model, dict(self._shared))
        for module in made.modules():
            module._compiled_call_impl = None  # of `nn.Module.compile`, which would run the original
        return made if made.training else made.train()

    def check_apart(self) -> None:
        """Check that a step of a copy has left no gradient in the model.

        Raises:
            ModelError: it has.
        """
        if any(parameter.grad is not None for parameter in self._model.parameters()):
            raise ModelError(
                f"copies of {type(self._model).__name__} compute with the parameters of the model itself: a function"
                " stored in it refers to the model; pass the model before it is prepared or patched"
            )


class _Ways:
    """Models that each keep less in another way, and what was found out about them."""

    def __init__(self, copies: _Copies, call: TrainingCall) -> None:
        self._copies, self._call = copies, call
        self._models: dict[str, nn.Module] = {}
        self.reference: dict[str, Tensor] = {}
        self._norm = 0.0
        self.found: dict[str, dict[str, Any]] = {}
        self.left_out: dict[str, str] = {}

    def measure_exact(self) -> None:
        """Make the gradients with which all others are compared, then measure the exact model like any other.

        Raises:
            ModelError: the model does not run on the batch or is not apart from its copies, or its gradient is zero or
                not finite.
        """
        model = self._copies.make()
        try:
            self.reference = self._gradients(model)
        except LaconicError:
            raise
        except Exception as error:
            raise ModelError(f"{type(model).__name__} does not train on the batch as it is: {brief(error)}") from error
        self._copies.check_apart()
        self._norm = sum(float(g.float().norm()) ** 2 for g in self.reference.values()) ** 0.5
        if not 0 < self._norm < float("inf"):
            raise ModelError(
                f"the norm of the exact gradient is {self._norm}, but gradients are compared with it; pass another"
                " batch or loss_of="
            )
        self.measure(METHODS[0])

    def measure(self, method: Method) -> None:
        """Bytes, peak and gradients of one way; or the reason why it is left out."""
        if method.only_below in self.found:
            kept, exact = self.found[method.only_below]["nbytes"], self.found[EXACT]["nbytes"]
            if exact >= _LEAST_FACTOR * kept:
                self.left_out[method.name] = f"{method.only_below!r} saves {exact / max(1, kept):.1f}x already"
                return
        try:
            model = self._copies.make()
            self._models[method.name] = model
            lines = method.apply(model, self._call.named(model))
            errors = self._errors(self._gradients(model))
            kept, host = self._kept(model)
            self.found[method.name] = {
                "nbytes": kept,
                "host_nbytes": host,
                "peak_nbytes": self._peak(model),
                **errors,
                "lines": lines,
            }
        except Exception as error:  # a model may refuse for any reason
            if method.name == EXACT:
                raise
            self._models.pop(method.name, None)
            why = getattr(error, "inner_exception", error)  # of torch.compile's backend
            self.left_out[method.name] = str(why) if isinstance(why, LaconicError) else brief(why)
        finally:
            self._clear()

    def time(self, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Seconds of forward and backward of each way in each round, and of the host in these; none of it on the CPU.

        Every round begins with another way.
        """
        seconds: dict[str, list[float]] = {name: [] for name in self.found}
        host_seconds: dict[str, list[float]] = {name: [] for name in self.found}
        names = list(self.found)
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                model, arguments = self._models[name], self._call.arguments()
                gc.collect()
                whole, host = timed(partial(self._backward, model, arguments), self._call.device)
                seconds[name].append(whole)
                if host is not None:
                    host_seconds[name].append(host)
                self._clear()
        return seconds, host_seconds

    def _backward(self, model: nn.Module, arguments: Any) -> None:
        self._call.loss(model, arguments).backward()

    def _gradients(self, model: nn.Module) -> dict[str, Tensor]:
        self._backward(model, self._call.arguments())
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        self._clear(model)
        return found

    def _errors(self, gradients: Mapping[str, Tensor]) -> dict[str, Any]:
        total, worst, parameter = 0.0, 0.0, ""
        for name, exact in self.reference.items():
            found = gradients.get(name)
            off = exact.float() if found is None else found.to(exact.dtype).float() - exact.float()
            distance, norm = float(off.norm()), float(exact.float().norm())
            total += distance**2
            if norm >= _NEGLIGIBLE * self._norm and distance / norm > worst:
                worst, parameter = distance / norm, name
        error = total**0.5 / self._norm
        return {"gradient_error": error, "worst_error": worst, "worst_parameter": parameter}

    def _kept(self, model: nn.Module) -> tuple[int, int]:
        """Bytes that one forward keeps for backward on the device and in pinned host memory."""
        arguments = self._call.arguments()
        with SavedTensorTracker(model) as tracker:
            loss = self._call.loss(model, arguments)
        del loss
        return tracker.nbytes, tracker.host_nbytes

    def _peak(self, model: nn.Module) -> int | None:
        """The most bytes in use during a step whose gradients are added to those of an earlier one."""
        if self._call.device.type not in ("cpu", "cuda"):
            return None
        self._backward(model, self._call.arguments())
        arguments = self._call.arguments()
        return peak_nbytes(lambda: self._backward(model, arguments), self._call.device)

    def _clear(self, model: nn.Module | None = None) -> None:
        for one in self._models.values() if model is None else (model,):
            one.zero_grad(set_to_none=True)


def timed(step: Callable[[], object], device: torch.device) -> tuple[float, float | None]:
    """Seconds of a step, and of the host in it: until it has given the device all its work; None on the CPU."""
    if device.type == "cpu":
        started = time.perf_counter()
        step()
        return time.perf_counter() - started, None
    torch.accelerator.synchronize(device)
    started = time.perf_counter()
    step()
    given = time.perf_counter()
    torch.accelerator.synchronize(device)
    return time.perf_counter() - started, given - started


def _check(model: nn.Module, rounds: int) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is a {type(model).__name__}, but it must be a torch.nn.Module")
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ModelError(f"rounds is {rounds!r}, but it must be a whole number of 1 or more")
    name, parameters = type(model).__name__, list(model.parameters())
    if any([*replacements_of(module)] or attention_core_of(module) is not None for module in model.modules()):
        raise ModelError(f"{name} has compressed activations; call laconic.decompress_activations(model) before")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel) or hasattr(model, "_orig_mod"):
        raise ModelError(f"model is a {name} around another module; pass that module itself")
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise ModelError(f"{name} is sharded; pass the model before fully_shard, or a smaller one of its kind")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
        raise ModelError(f"{name} has parameters that get their shape in its first forward; run it once before")
    if any(parameter.is_meta for parameter in parameters):
        raise ModelError(f"parameters of {name} are on the meta device and hold no values; build the model on a device")
    if not any(parameter.requires_grad for parameter in parameters):
        raise ModelError(f"no parameter of {name} requires a gradient, so nothing is kept for backward")


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Without gradients inside; afterwards gradients and all random states are those from before."""
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    put_back_random_states = noted_random_states()
    with seeds_restored():
        try:
            for parameter in gradients:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            put_back_random_states()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without laconic's warnings about what each conversion saves, which the table says."""
    logger = logging.getLogger(SAVINGS_LOGGER)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.processor() or platform.machine()} ({threads} thread{'s' * (threads > 1)})"
