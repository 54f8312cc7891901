"""Compares what backward rebuilds with what forward consumed, at a few places of each tensor.

[Note: witnesses] A tensor is trusted by what it holds. Two comparisons together span the way of a value from its
producer to backward:

1. Forward. A note on a tensor holds values of it (`sample`). A reader that finds the note compares them, bit for bit,
   with what it consumes. A write that torch does not count (through NumPy, `.data`, DLPack, a collective, a kernel of
   one's own) makes them differ: then the reader packs what it really got. On a CUDA device that look would make the
   host wait, so it is made late there, and what differs is refused.
2. Backward. A packed tensor has a `Witness`: values and scales from the moment of packing. What is dequantized has to
   lie within the bound of the format around these values, and the scales have to be the same bits. A gated product,
   which is never dequantized, is held to bounds that follow from those of its factors. A parameter that backward
   reads has to hold what it held in forward (`check_unchanged`).

The first comparison reads host memory in every forward, at a microsecond a tensor. The second, and the first on CUDA
devices, cost a few calls of torch a tensor: they are made in a model's first forwards and then in one of some.

So they find: codes or scales of another tensor, step or layer, of a neighbouring block, of the other factor, written
over in memory or by hooks around; a kernel that dequantizes wrongly by more than the format's own rounding; a note that
does not stand for what is read.

They do not find: what touches none of the places; an error below the bound; a wrong formula on a right base (a norm,
an activation or an attention that is computed again); a wrong gradient of a rightly rebuilt tensor; masks and other
exact codes; graphs of torch.compile and CUDA, which have no witnesses. The first step's comparison of whole gradients
is for these.

Nothing here waits for a CUDA device: what it finds is a `LateCheck`, which the host makes before a later forward of a
converted model or a later step of an optimizer, as soon as the device has got there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from laconic.activations.host.audited import AUDITED
from laconic.activations.host.traceable import is_traced_by_make_fx, untraced
from laconic.errors import ModelError
from laconic.formats import BlockFormat
from laconic.ops.codebooks import AFFINE, ARITHMETIC, LEVEL_MAX, codebook
from laconic.ops.constants import constant_tensor
from laconic.ops.gated_activations import CURVES

Tensors = tuple[Tensor, ...]
Glances = tuple[bytes | Tensor | None, ...]

NUM_PLACES = 16
"""Values of each tensor that are compared, spread evenly from the first to the last."""

ALWAYS, EVERY = 10, 50
"""A model's first training forwards have witnesses, and then one in so many; outside of a root forward all have."""

_SLOPE, _CURVATURE = 1.2, 1.0
"""More than the largest first and second derivative of any activation in CURVES."""

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class _Root:
    """The outermost forward of a converted model that runs in a thread; `entries` are compared at its end."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []


class _Running(threading.local):
    """What runs in a thread: the site, for errors; whether what is packed gets witnesses."""

    root: _Root | None = None
    watches = True
    site = ""


RUNNING = _Running()


class RootForward:
    """Base of the forwards of whole models: the outermost one in a thread is the root forward of all inside."""

    _num_forwards = 0

    def run_root(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`forward(*args, **kwargs)`, of this model.

        Raises:
            ModelError: a CUDA device has found that something it did earlier was wrong (see `make_checks`).
        """
        if torch.compiler.is_compiling() or RUNNING.root is not None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if _LEFT:
            make_checks()
        self._num_forwards = number = self._num_forwards + 1
        RUNNING.root = root = _Root()
        RUNNING.watches = number <= ALWAYS or number % EVERY == 0
        try:
            result = forward(*args, **kwargs)
        finally:
            RUNNING.root, RUNNING.watches, RUNNING.site = None, True, ""
        if root.entries:
            _compare(root.entries)
        return result


def root() -> object | None:
    """What stands for the root forward that runs in this thread; None outside of one."""
    return RUNNING.root


@constant_tensor
def _places(numel: int, device: torch.device) -> Tensor:
    """Int64 [NUM_PLACES]: which values of a tensor are compared."""
    return (torch.arange(NUM_PLACES, device="cpu") * (numel - 1) // (NUM_PLACES - 1)).to(device)


@constant_tensor
def _scale_places(numel: int, length: int, code: str, block_size: int, device: torch.device) -> Tensor:
    """Int64 [NUM_PLACES], of affine codes twice as many (steps, minima): where the scales of `_places` lie."""
    places = _places(numel, torch.device("cpu"))
    blocks = places // length * -(-length // block_size) + places % length // block_size
    return (torch.cat((2 * blocks, 2 * blocks + 1)) if code in AFFINE else blocks).to(device)


def sample(x: Tensor) -> Tensor | None:
    """[NUM_PLACES] values of a tensor; None where there are none: tracing, fake and meta tensors, captured graphs."""
    if not _is_real(x) or x.numel() == 0 or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return x.detach().take(_places(x.numel(), x.device))


def _is_real(x: Tensor) -> bool:
    # Dynamo looks into code of ours that runs between the graphs it breaks.
    return not torch.compiler.is_compiling() and _has_memory(x)


def _has_memory(x: Tensor) -> bool:
    is_read = type(x) in _CLASSES and (x.is_cpu or x.is_cuda) and x.layout is torch.strided
    return is_read and not is_traced_by_make_fx()


_CLASSES = (Tensor, torch.nn.Parameter)


@untraced
def glance(x: Tensor) -> bytes | Tensor | None:
    """What `same` compares: values of a tensor, on CUDA devices of a forward with witnesses only; None for no real one.

    Of a tensor in host memory it takes a microsecond: it is read as memory, past the dispatcher of torch.
    """
    words = _WORDS.get(x.dtype) if type(x) in _CLASSES and x.is_cpu and x.layout is torch.strided else None
    # A tensor without gaps that is not contiguous is a transposed matrix, or images channel by channel.
    if words is not None and (
        x.is_contiguous()
        or ((dim := x.dim()) == 2 and x.stride() == (1, x.shape[0]))
        or (dim == 4 and x.is_contiguous(memory_format=_CHANNELS_LAST))
    ):
        address = x.data_ptr()
        if address:
            return _window(address, words, x.numel()).tobytes()
        return None if x.numel() else b""  # memory that FSDP2 has given back for a while
    if not _has_memory(x):
        return None
    if x.is_cuda or x.numel() == 0:
        values = sample(x) if RUNNING.watches and not AUDITED.is_running else None
        return b"" if values is None else values
    return sample(x)


_STEPS = NUM_PLACES - 1
_CHANNELS_LAST = torch.channels_last
_WORDS: dict[torch.dtype, Any] = {
    torch.float32: ctypes.c_uint32,
    torch.bfloat16: ctypes.c_uint16,
    torch.float16: ctypes.c_uint16,
}


@lru_cache(maxsize=4096)
def _window(address: int, word: Any, numel: int) -> memoryview:
    """The compared words of the memory at an address, to be read only while a tensor of so many words lies there."""
    array = word * (1 << (numel - 1).bit_length())  # a type for each length would take 3 KB, and 15 microseconds
    return memoryview(array.from_address(address))[: numel : max(1, (numel - 1) // _STEPS)]


def same(before: bytes | Tensor, x: Tensor) -> bool:
    """Whether `x`, of which `before` was the glance, looks alike; of a CUDA tensor True, and compared later."""
    now = glance(x)
    if type(now) is bytes and type(before) is bytes:
        return before == now
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        if before.is_cuda:
            _record(_Entry(_differs, (), (before, now), (RUNNING.site,), "a write between two layers"))
            return True
        return torch.equal(_bits(before), _bits(now))
    return before == now or x.is_cuda


def glances(tensors: Sequence[Tensor | None]) -> Glances:
    """What `check_unchanged` compares: glances of the parameters and other floats that backward is going to read."""
    return tuple([None if x is None or not x.is_floating_point() else glance(x) for x in tensors]) if tensors else ()


def check_unchanged(before: Glances, tensors: Sequence[Tensor | None], what: str = "a parameter") -> None:
    """Check that parameters hold in backward what they held in forward. On CUDA devices that is found later.

    torch sees a change by its version counter, but not one through `.data`, NumPy or a kernel of one's own, nor another
    tensor in the parameter's place (`p.data = ...`); torch's own backward has kept some of the old values then.

    Args:
        before: their `glances` in forward.
        tensors: the parameters now.
        what: they are, for the error.

    Raises:
        ModelError: one holds other values.
    """
    for values, x in zip(before, tensors, strict=True):
        if values is None or x is None:
            continue
        if x.is_cuda and type(values) is bytes and not values:
            continue  # a forward without witnesses
        now = glance(x)
        if now is None or (type(now) is bytes and now == values):
            continue
        if isinstance(values, Tensor) and isinstance(now, Tensor):
            if values.is_cuda:
                _record(_Entry(_differs, (), (values, now), (RUNNING.site,), f"{what} that was changed"))
                continue
            is_same = values.dtype == now.dtype and torch.equal(_bits(values), _bits(now))
        else:
            is_same = _holds(x, values)
        if not is_same:
            raise ModelError(
                f"{what} {list(x.shape)} holds other values in backward than in forward, so the gradient would be "
                f"wrong; it was changed in place after the forward that saved it (also through .data, NumPy or a "
                f"kernel of one's own), another tensor was put in its place, or hooks on saved tensors gave back "
                f"others than they had got. Call backward before the change, or "
                f"train these layers exactly: laconic.decompress_activations(model)"
            )


def _holds(x: Tensor, before: bytes | Tensor) -> bool:
    """Whether a tensor on the CPU has the values of a glance, though in another layout than then.

    Hooks on saved tensors that write them into files or into NumPy's arrays may give back contiguous ones. A glance
    reads memory, so that it depends on the layout.
    """
    if isinstance(before, Tensor):
        return (now := sample(x)) is not None and now.dtype == before.dtype and torch.equal(_bits(before), _bits(now))
    layouts = [x.contiguous()]
    if x.dim() == 2:
        layouts.append(x.t().contiguous())
    elif x.dim() == 4:
        layouts.append(x.contiguous(memory_format=_CHANNELS_LAST))
    return any(glance(layout) == before for layout in layouts if layout.is_cpu)


@dataclass(frozen=True, eq=False, slots=True)
class Witness:
    """What a packed tensor held when it was packed.

    Attributes:
        values: [NUM_PLACES], in the dtype of the tensor.
        scales: [NUM_PLACES] or twice as many, of the blocks of these values.
        format: how it was packed.
        shape: of the tensor.
        site: where, for errors.
    """

    values: Tensor
    scales: Tensor
    format: BlockFormat
    shape: torch.Size
    site: str

    def saw(self, values: Tensor, scales: Tensor) -> None:
        """Compare what backward has dequantized, by the scales it had.

        Args:
            values: of the shape of the tensor.
            scales: as they were packed.

        Raises:
            ModelError: they are not those of forward. It is raised by the end of backward; on CUDA by what comes later.
        """
        got = sample(values)
        if got is not None:
            key, now = (self.format, self.values.dtype), _scales_in(scales, self.shape, self.format)
            _record(_Entry(_dequantized_wrongly, key, (self.values, self.scales, got, now), (self.site,)))


def witness_of(x: Tensor, scales: Tensor, format: BlockFormat, origin: str) -> Witness | None:
    """The witness of a tensor that is packed now, where there is one (see `sample`, `RUNNING.watches`); else None.

    Args:
        x: [..., L].
        scales: that were made of it.
        format: how it is packed.
        origin: kind of the site, for errors.
    """
    if AUDITED.is_running or type(scales) is not Tensor or (values := sample(x)) is None:
        return None
    site = f"{RUNNING.site} ({origin})" if RUNNING.site else origin
    return Witness(values, _scales_in(scales, x.shape, format), format, x.shape, site)


def _scales_in(scales: Tensor, shape: torch.Size, format: BlockFormat) -> Tensor:
    """Those of the compared values of a tensor of this shape."""
    length = shape[-1] if shape else 1
    return scales.take(_scale_places(shape.numel(), length, format.code, format.block_size, scales.device))


def saw_product(product: Tensor, factors: tuple[Witness, Witness], scales: Tensors, activation: str) -> None:
    """Compare activation(gate) * up that backward has computed from codes.

    Args:
        product: [..., features].
        factors: gate, up.
        scales: of the two, as backward had them.
        activation: a name in CURVES.
    """
    got = sample(product)
    if got is not None:
        _record(_gated(_product_wrong, factors, scales, activation, (got,)))


def saw_gradients(
    grad: Tensor, of_gate: Tensor, of_up: Tensor, factors: tuple[Witness, Witness], scales: Tensors, activation: str
) -> None:
    """Compare the gradients of gate and up that backward has computed from codes and the product's gradient `grad`."""
    parts = sample(grad), sample(of_gate), sample(of_up)
    if all(part is not None for part in parts):
        _record(_gated(_gradients_wrong, factors, scales, activation, parts))


def _gated(check: Any, factors: tuple[Witness, Witness], scales: Tensors, activation: str, parts: Any) -> _Entry:
    gate, up = factors
    key = gate.format, gate.values.dtype, activation
    now = (_scales_in(s, witness.shape, witness.format) for s, witness in zip(scales, factors, strict=True))
    return _Entry(check, key, (gate.values, gate.scales, up.values, up.scales, *now, *parts), (gate.site, up.site))


@dataclass(frozen=True, eq=False, slots=True)
class _Entry:
    """One comparison to be made: `wrong(*key, *parts)` of many at once, each part stacked, says where it fails."""

    wrong: Callable[..., Tensor]
    key: tuple[Any, ...]
    parts: Tensors
    sites: tuple[str, ...]
    cause: str = "codes or scales that changed after they were packed"
    stream: torch.cuda.Stream | None = None


_PENDING: dict[int, list[_Entry]] = {}
"""By backward pass, what is compared at its end."""

_MAX_PENDING = 16
"""Backward passes; one that failed never ends."""


def _record(entry: _Entry) -> None:
    if entry.parts[0].is_cuda:
        entry = replace(entry, stream=torch.cuda.current_stream(entry.parts[0].device))
    task = torch._C._current_graph_task_id()
    if task == -1:
        if RUNNING.root is None:
            _compare([entry])
        else:
            RUNNING.root.entries.append(entry)
        return
    entries = _PENDING.get(task)
    if entries is None:
        while len(_PENDING) >= _MAX_PENDING:
            _PENDING.pop(next(iter(_PENDING)), None)
        entries = _PENDING[task] = []
        torch.autograd.Variable._execution_engine.queue_callback(partial(_end, task))
    entries.append(entry)


def _end(task: int) -> None:
    _compare(_PENDING.pop(task, []))


@torch.no_grad()
def _compare(entries: Sequence[_Entry]) -> None:
    groups: dict[Any, list[_Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.wrong, entry.key, entry.parts[0].dtype, entry.stream), []).append(entry)
    for (wrong, key, _, stream), group in groups.items():
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            bad = wrong(*key, *(torch.stack(parts) for parts in zip(*(entry.parts for entry in group), strict=True)))
            if stream is not None:
                _leave(bad, group)
            elif bool(bad.any()):
                _refuse(group[int(bad.int().argmax())])


def _bits(x: Tensor) -> Tensor:
    return x.view(_INTEGERS[x.element_size()])


def _differs(before: Tensor, now: Tensor) -> Tensor:
    return (_bits(before) != _bits(now)).any(-1)


@cache
def _rounding(format: BlockFormat, dtype: torch.dtype) -> tuple[float, float, float]:
    """Of a rounded value: its error in scales, as a share of the value, and absolute.

    Half of the largest gap between levels, or all of it where rounding is stochastic; what the rounding of the scale
    leaves outside of the levels; the rounding of the result to `dtype`; blocks below the smallest scale, which vanish.
    """
    code = format.code
    if code in AFFINE:
        gap = 1.0
    elif code in ARITHMETIC:
        gap = 0.5
    else:
        levels = codebook(code).sorted_levels
        gap = max(b - a for a, b in pairwise(levels)) / 2
    of_scale = 2 * torch.finfo(format.scale_dtype).eps + 2.0**-20
    least = 2.0**-24 if torch.float16 in (format.scale_dtype, dtype) else 2.0**-124
    return gap + LEVEL_MAX[code] * of_scale, torch.finfo(dtype).eps, 2 * LEVEL_MAX[code] * least


def _dequantized_wrongly(
    format: BlockFormat, dtype: torch.dtype, values: Tensor, scales: Tensor, got: Tensor, now: Tensor
) -> Tensor:
    """Bool [n]: which of n rebuilt tensors are none of what was packed; all arguments [n, NUM_PLACES] or so."""
    in_scales, share, least = _rounding(format, dtype)
    largest = torch.finfo(dtype).max
    scale, rebuilt = scales[:, :NUM_PLACES].double(), got.double().clamp(-largest, largest)
    near = (rebuilt - values.double()).abs() <= in_scales * scale + share * rebuilt.abs() + least
    # A block with an infinity or NaN has a scale that is NaN, and becomes NaN.
    right = torch.where(scale.isfinite(), near, rebuilt.isnan())
    return ~right.all(-1) | _differs(scales, now)


def _factors(
    format: BlockFormat, dtype: torch.dtype, activation: str, gate: Tensors, up: Tensors
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of (values, scales) of gate and up: f(gate), f'(gate), up, the bounds of gate and up, and where all is finite."""
    in_scales, share, least = _rounding(format, dtype)
    (g, g_scale), (u, u_scale) = ((v.double(), s[:, :NUM_PLACES].double()) for v, s in (gate, up))
    g_bound, u_bound = (in_scales * s * (1 + share) + share * v.abs() + least for v, s in ((g, g_scale), (u, u_scale)))
    linear, cubic, slope = CURVES[activation]
    sigmoid = torch.sigmoid(g * (linear + cubic * g * g))
    derivative = sigmoid + g * sigmoid * (1 - sigmoid) * (linear + slope * g * g)
    return g * sigmoid, derivative, u, g_bound, u_bound, g_scale.isfinite() & u_scale.isfinite()


def _product_wrong(format: BlockFormat, dtype: torch.dtype, activation: str, *parts: Tensor) -> Tensor:
    """Bool [n]: which of n rebuilt products activation(gate) * up are none of what was packed."""
    g, g_scales, u, u_scales, g_now, u_now, got = parts
    f, _, u_values, g_bound, u_bound, finite = _factors(format, dtype, activation, (g, g_scales), (u, u_scales))
    most = (f.abs() + _SLOPE * g_bound) * (u_values.abs() + u_bound)
    bound = most - f.abs() * u_values.abs() + 4 * torch.finfo(dtype).eps * most + 2.0**-24 * (dtype == torch.float16)
    wrong = _far(got, f * u_values, bound, finite & (most < torch.finfo(dtype).max / 2))
    return wrong | _differs(g_scales, g_now) | _differs(u_scales, u_now)


def _gradients_wrong(format: BlockFormat, dtype: torch.dtype, activation: str, *parts: Tensor) -> Tensor:
    """Bool [n]: which of n pairs of gradients are none of gate and up that were packed."""
    g, g_scales, u, u_scales, g_now, u_now, of_product, of_gate, of_up = parts
    f, slope, u_values, g_bound, u_bound, finite = _factors(format, dtype, activation, (g, g_scales), (u, u_scales))
    grad = of_product.double()
    size, u_most, eps = grad.abs(), u_values.abs() + u_bound, 4 * torch.finfo(dtype).eps
    # What is too large for the dtype on the way may stay so, be the gradient that it is multiplied by ever so small.
    finite &= size.clamp_min(1) * (u_most + f.abs() + 1) < torch.finfo(dtype).max / 2
    least = 2.0**-24 if dtype == torch.float16 else 2.0**-120
    up_bound = size * (_SLOPE * g_bound + eps * (f.abs() + _SLOPE * g_bound)) + least
    gate_bound = size * (u_most * _CURVATURE * g_bound + _SLOPE * u_bound + eps * _SLOPE * u_most) + least
    wrong = _far(of_up, grad * f, up_bound, finite) | _far(of_gate, grad * u_values * slope, gate_bound, finite)
    return wrong | _differs(g_scales, g_now) | _differs(u_scales, u_now)


def _far(got: Tensor, expected: Tensor, bound: Tensor, where: Tensor) -> Tensor:
    largest = torch.finfo(got.dtype).max
    near = (got.double().clamp(-largest, largest) - expected.clamp(-largest, largest)).abs() <= bound
    return (where & ~near).any(-1)


def _refuse(entry: _Entry) -> None:
    """Raise what a comparison has found."""
    sites = " and ".join(dict.fromkeys(site for site in entry.sites if site)) or "a compressed layer"
    raise ModelError(
        f"{sites}: what backward computes with is not what the layer consumed in forward, so the gradient would be "
        f"wrong. Likely causes: {entry.cause}; a write that torch does not see (through NumPy, .data, DLPack, a "
        f"collective or a kernel of one's own) between the layer that made a tensor and the one that read it, or "
        f"between forward and backward; saved-tensor hooks that hand back another tensor. Write before the tensor is "
        f"first read or to a copy of it, or train these layers exactly: laconic.decompress_activations(model)"
    )


# Late checks of CUDA devices, as they were left.
_LEFT: list[Any] = []


def _leave(bad: Tensor, group: list[_Entry]) -> None:
    """Leave what the device finds to `make_checks`."""
    from laconic.collectives.runtime.late_checks import LateCheck  # only CUDA needs it

    def check(numbers: list[int]) -> bool:
        if numbers[0] >= 0:
            _refuse(group[numbers[0]])
        return False

    _hook_optimizers()
    first = torch.where(bad.any(), bad.int().argmax(), -1)
    _LEFT.append(LateCheck([first], check, bad.device))


def make_checks(*, wait: bool = False) -> None:
    """Make the checks that devices have got to; with `wait` all. None while a stream is captured, which forbids asking.

    Raises:
        ModelError: one has found that backward computed with another tensor than forward.
    """
    if _LEFT and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return
    while _LEFT and (wait or _LEFT[0].is_over):
        _LEFT.pop(0).make()


@cache
def _hook_optimizers() -> None:
    register_optimizer_step_pre_hook(lambda *_: make_checks())
