"""Activation checkpointing that keeps the input of a region packed.

A checkpointed region saves nothing but its input and runs again in backward. Here the input is kept in 8 or 4 bits; the
first run, and so every forward value, stays exact, and the second starts from the dequantized input. It decides as the
first one did (see backward.decisions). Inside of a region sites save exact tensors: these live for one
layer's backward only, and the input has been quantized once already.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from laconic.activations.backward.decisions import Decisions, Habit
from laconic.activations.backward.derivatives import innermost_transform, is_transformed, may_hook
from laconic.activations.backward.replay import Attributes, ReadState, forgets
from laconic.activations.backward.saving import Held, is_no_nest
from laconic.activations.forwards.replacement import Replacement
from laconic.activations.host.audited import AUDITED
from laconic.activations.host.cuda_graph import is_captured, without_draws
from laconic.activations.host.modules import modules_of
from laconic.activations.host.patched import RunningCode
from laconic.activations.host.storages import laid_out, overlaps, place_of
from laconic.activations.host.streams import stream_of
from laconic.activations.host.traceable import graphs_are_exact, is_exporting
from laconic.activations.keep.kept import Kept, Memo, pack
from laconic.activations.keep.packer import hooks_around
from laconic.activations.keep.witnesses import glance, same
from laconic.formats import BlockFormat
from laconic.ops import DTYPES


def runs_twice() -> bool:
    """Whether tensors saved now live for one layer's backward only, or not at all.

    That is so inside of a checkpointed region, in its first run or in the second one in backward, and where code runs
    for its value alone or is exported: torch.export and torch.jit.trace get a module's own code. A forward that a hook
    runs in backward (cached gradients of contrastive losses do) is one like any other: its own backward comes later.
    """
    if torch.compiler.is_compiling():
        return is_exporting() or graphs_are_exact()
    if _is_tracing() or torch.is_inference_mode_enabled():  # also where gradients are enabled inside
        return True
    hooks: Any = _innermost_hooks(False)
    if hooks is not None and (forgets(hooks[0]) or getattr(hooks[0], "__module__", "") == _CHECKPOINT):
        return True  # of checkpoints that are not reentrant, both runs
    return _backward_pass() != -1 and _runs_again()


def is_plain() -> bool:
    """Whether this thread runs code for the first time, eagerly, with a gradient wanted and nothing watching torch.

    One answer to all that a site asks of its surroundings: True only where `runs_twice` and `is_transformed` are False,
    no function mode and no hooks are in force and no backward runs. False says nothing.
    """
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and num_modes() == 0
        and _backward_pass() == -1
        and _innermost_hooks(False) is None
        and may_hook()
        and innermost_transform() is None
        and forward_ad._current_level < 0
        and not AUDITED.originals
        and not _is_tracing()
        and not torch.is_inference_mode_enabled()
    )


num_modes: Callable[[], int] = torch._C._len_torch_function_stack
_CHECKPOINT = torch.utils.checkpoint.__name__
_is_tracing: Callable[[], bool] = torch._C._is_tracing
_innermost_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_backward_pass: Callable[[], int] = torch._C._current_graph_task_id


def _runs_again() -> bool:
    """Whether a function of a checkpoint, or of laconic, runs this code in its backward."""
    code = _code_of_second_runs(getattr(torch._C._current_autograd_node(), "_forward_cls", None))
    if code is None:
        return False
    # Hooks on what the function returned run in the name of its node, too, but not below its backward.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _ENGINE:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


_ENGINE = torch.autograd.graph._engine_run_backward.__code__


@cache
def _code_of_second_runs(function: type | None) -> CodeType | None:
    """The code of an autograd function's backward, if that runs again what the forward ran; else None.

    Checkpoints have that in their name: torch's, DeepSpeed's, FairScale's and Megatron's. Code in the backward of any
    other function is packed like any other code.
    """
    if function is None:
        return None
    ours = function.__module__.partition(".")[0] == "laconic"
    code: CodeType | None = getattr(getattr(function, "backward", None), "__code__", None)
    return code if ours or "checkpoint" in function.__name__.lower() else None


EIGHT_BITS = BlockFormat("int8")
"""Default format of saved inputs: everything recomputed from them has their error."""


def checkpoint(function: Callable[..., Any], *args: Any, format: BlockFormat | None = EIGHT_BITS, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, run again in backward from its packed arguments.

    As `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, which does the work, but those of `args` that are
    float32, bfloat16 or float16 tensors and require grad are kept in `format` (None: exact). Random state and autocast
    of the second run are those of the first, and so is what it decides by values. Tensors in `kwargs` are kept exactly.

    Raises:
        ModelError: see `run_again`; in backward, the function decides something else than in forward.
    """
    with packed_inputs(args, format, Decisions(getattr(function, "__name__", type(function).__name__))) as region:
        return run_again(region(function), args, kwargs)


def run_again(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parts: Sequence[nn.Module] = (),
    name: str = "",
) -> Any:
    """`function(*args, **kwargs)`, run again in backward; autograd saves every tensor in the arguments.

    torch's function would hold those that are given by name, or lie in a tuple, a list or a dict, in a closure: past
    backward, where no hook packs, moves or counts them and no change in place is noticed.

    Args:
        function: whose tensors inside are not saved.
        args: its arguments by position; tensors and any nest of tuples, lists and dicts with tensors among them.
        kwargs: its arguments by name, likewise.
        parts: modules whose code it runs.
        name: of the code, for errors.

    Raises:
        ModelError: a CUDA graph is captured, and the function draws on the device; in backward, torch's attention
            or the forward of a part is another one than in forward, or what the parts hold has changed.
    """
    leaves, spec = tree_flatten((args, kwargs), is_leaf=is_no_nest)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    # One that is given twice is one in the second run, too: torch's attention asks whether the key is the value.
    tensors = list({id(leaves[place]): leaves[place] for place in places}.values())
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    filled_from = [(place, numbers[id(leaves[place])]) for place in places]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    code, state = RunningCode(parts), ReadState(parts, name)
    attributes = Attributes(parts, name)

    def run(*tensors: Tensor) -> Any:
        filled = list(rest)
        for place, number in filled_from:
            filled[place] = tensors[number]
        args, kwargs = tree_unflatten(filled, spec)
        with ExitStack() as undo:
            code.again(undo)
            with state.run(), attributes.run():
                return function(*args, **kwargs)

    if not any(is_captured(x.device) for x in tensors):
        return torch.utils.checkpoint.checkpoint(run, *tensors, use_reentrant=False)
    # A graph that is captured has no random state that torch could note.
    undrawn = without_draws()(run)
    return torch.utils.checkpoint.checkpoint(undrawn, *tensors, use_reentrant=False, preserve_rng_state=False)


@contextmanager
def packed_inputs(
    inputs: Any, format: BlockFormat | None, decisions: Decisions | None = None, *, with_data: bool = False
) -> Iterator[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """While the block runs, autograd saves the tensors in `inputs` (any nest) that require grad in packed form.

    A tensor that is saved several times is packed once.

    Args:
        inputs: of a region.
        format: how they are packed; None keeps them exact.
        decisions: where the region's decisions are noted; None if it makes none.
        with_data: pack also tensors that require no grad.

    Yields:
        What makes of the region's function one that decides, whenever it is called again, as at its first call. The
        packed inputs hold the decisions, and are freed together with them.
    """
    tensors = [x for x in tree_leaves(inputs) if _packable(x, with_data)]
    if format is None or not tensors or AUDITED.originals:
        yield _as_it_is
        return
    # Held meanwhile, so that no address can be reused. Values that share memory are kept exactly: that takes no more
    # than the exact model does, and what is rebuilt could not have their strides.
    places = {_place(x): x for x in tensors if not overlaps(x)}
    known: dict[Any, Kept] = {}
    outer = hooks_around()  # such as a tracker, or what takes all that is saved to the host

    def packed(x: Tensor) -> _SavedInput:
        place = _place(x) if x.layout == torch.strided else ()
        if place not in places:
            return _SavedInput(Held((x.detach(),), outer))  # with the node that made it, the graph would hold itself
        key = place, stream_of(x)
        kept = known.get(key)
        if kept is None:
            kept = known[key] = _shared(places[place], x, format)
        return _SavedInput(Held(kept.tensors, outer), kept.memo, x.stride(), decisions)

    def unpack(saved: _SavedInput) -> Tensor:
        tensors = saved.held.tensors()
        return tensors[0] if saved.memo is None else laid_out(saved.memo.take(tensors), saved.stride)

    try:
        with torch.autograd.graph.saved_tensors_hooks(packed, unpack):
            yield _as_it_is if decisions is None else _DecidesOnce(decisions).of
    finally:
        places.clear()  # torch holds the hooks, and what they refer to, as long as what they have packed
        known.clear()


class _SavedInput(NamedTuple):
    """A tensor that is held as it is, or codes, the memo that makes the tensor of them, and the region's decisions."""

    held: Held
    memo: Memo | None = None
    stride: tuple[int, ...] = ()
    decisions: Decisions | None = None


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class _DecidesOnce:
    """The function of a region: at its first call it notes what it decides, at every further one it repeats that."""

    def __init__(self, decisions: Decisions) -> None:
        # What packed no input is given the exact one, and needs none.
        self._decisions = weakref.ref(decisions)

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, deciding once."""
        has_run = False

        def decided(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_run
            decisions = self._decisions()
            is_first, has_run = not has_run, True
            if decisions is None or not (is_first or decisions.calls):
                return function(*args, **kwargs)
            with decisions.first_run() if is_first else decisions.again():
                return function(*args, **kwargs)

        return decided


_Shared = tuple[int, bytes | Tensor | None, BlockFormat, Kept]
_SHARED: MutableMapping[Tensor, dict[torch.cuda.Stream | None, _Shared]] = WeakTensorKeyDictionary()
"""By stream, what is kept of inputs of regions as long as these live: a model gives one to all layers of a decoder."""


def _shared(given: Tensor, x: Tensor, format: BlockFormat) -> Kept:
    """What is kept of `given` in a format; `x` is the same, as autograd saves it."""
    notes = {} if given.is_leaf else _SHARED.setdefault(given, {})  # a leaf may be filled again
    stream = stream_of(given)
    if stream in notes:
        version, values, of_format, kept = notes[stream]
        if (version, of_format) == (given._version, format) and values is not None and same(values, given):
            return kept
    kept = pack(x.detach(), format, "input of a checkpointed layer")
    notes[stream] = given._version, glance(given), format, kept
    return kept


def _place(x: Tensor) -> tuple[Any, ...]:
    return place_of(x), x.storage_offset(), x.shape, x.stride()


def _packable(x: Any, with_data: bool) -> bool:
    if not isinstance(x, Tensor) or isinstance(x, DTensor) or x.layout != torch.strided:
        return False
    return x.dtype in DTYPES and (x.requires_grad or with_data)


class LayerForward(Replacement):
    """The forward of a layer whose input is kept packed wherever the layer is checkpointed.

    Args:
        module: whose forward is replaced.
        format: how the input is packed; None keeps it exact.
        recompute: checkpoints the layer; otherwise it is left to Hugging Face's `gradient_checkpointing_enable`.
    """

    def __init__(self, module: nn.Module, format: BlockFormat | None, recompute: bool) -> None:
        super().__init__(module)
        self.format = format
        self.recompute = recompute
        self.habit = Habit(type(module).__name__)

    @property
    def is_checkpointed(self) -> bool:
        """Whether a training forward of the layer would run again in backward."""
        return self.recompute or self._checkpoints_itself

    @property
    def _checkpoints_itself(self) -> bool:
        module = self.module
        return (
            module.training
            and bool(getattr(module, "gradient_checkpointing", False))
            and (_HOSTS_FUNCTION in module.__dict__)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward; in training, checkpointed with its input packed where the layer is checkpointed."""
        args, kwargs = self.positional(args, kwargs)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self.is_checkpointed:
            return self.original(*args, **kwargs)
        if runs_twice() or is_transformed():
            return self.original(*args, **kwargs)
        if self._checkpoints_itself:
            return self._under_host(args, kwargs)
        caches = [leaf for leaf in (*args, *kwargs.values()) if _is_of(leaf, "Cache")]
        if caches:
            # The second run would write to the cache again. Hugging Face's own checkpointing drops it as well.
            if any(not is_cache(cache) or self._is_filled(cache) for cache in caches):
                _warn_filled_cache(type(self.module).__name__)
                return self.original(*args, **kwargs)
            _warn_no_cache(type(self.module).__name__)
            args, kwargs = without_caches(args, kwargs)
        decisions = self.habit.decisions(modules_of(self.module), args, kwargs)
        with packed_inputs(args, self.format, decisions) as region:
            return run_again(
                region(self.original), args, kwargs, modules_of(self.module), f"a layer {type(self.module).__name__}"
            )

    def _is_filled(self, cache: Any) -> bool:
        """Whether a cache has entries for this layer that its caller has made, as those of prefix tuning are."""
        index = next(
            (i for part in modules_of(self.module) if (i := getattr(part, "layer_idx", None)) is not None), None
        )
        return index is not None and not is_empty(cache, index)

    def _under_host(self, args: Any, kwargs: Any) -> Any:
        """The forward of a layer that Hugging Face's function checkpoints."""
        decisions = self.habit.decisions(modules_of(self.module), args, kwargs)
        with packed_inputs(args, self.format, decisions) as region:
            if decisions is None:
                return self.original(*args, **kwargs)
            attributes = self.module.__dict__
            before = attributes[_HOSTS_FUNCTION]

            def host(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                return before(region(function), *args, **kwargs)

            attributes[_HOSTS_FUNCTION] = host
            try:
                return self.original(*args, **kwargs)
            finally:
                attributes[_HOSTS_FUNCTION] = before


_HOSTS_FUNCTION = "_gradient_checkpointing_func"
"""The attribute by which Hugging Face's layers call what runs them again: `function(forward, *args)`."""


def is_checkpointed_layer(module: nn.Module) -> bool:
    """Whether Hugging Face's `gradient_checkpointing_enable` can make this module run again in backward."""
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of Hugging Face's that grows; others may be asked for more than keys and values."""
    return _is_of(value, "DynamicCache", "EncoderDecoderCache")


def _is_of(value: Any, *classes: str) -> bool:
    """Whether the class of a value is one of these of transformers, or derived from one."""
    return any(base.__name__ in classes and "transformers" in base.__module__ for base in type(value).__mro__)


def is_empty(cache: Any, layer: int) -> bool:
    """Whether a cache holds nothing for a layer; one that does not say so counts as filled."""
    parts = [getattr(cache, name, cache) for name in ("self_attention_cache", "cross_attention_cache")]
    try:
        return all(int(part.get_seq_length(layer)) == 0 for part in parts)
    except Exception:  # caches of state-space models have no lengths
        return False


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with None in the place of caches."""
    args = tuple([None if is_cache(arg) else arg for arg in args])
    return args, {name: None if is_cache(value) else value for name, value in kwargs.items()}


@cache
def _warn_filled_cache(layer: str) -> None:
    logging.getLogger("laconic").warning(
        "%s is called with a cache of keys and values that is filled or no DynamicCache, so it keeps what it saves and "
        "does not run again in backward",
        layer,
    )


@cache
def _warn_no_cache(layer: str) -> None:
    logging.getLogger("laconic").warning(
        "%s is computed again in backward, so it runs without the cache of keys and values; pass use_cache=False", layer
    )
