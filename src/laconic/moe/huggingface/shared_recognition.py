"""Finds out whether, and where, a Hugging Face block calls shared experts that need nothing of its routed ones.

A copy of the block runs on a few random tokens, in training and in evaluation mode, with a stand-in for its experts.
Shared experts are the child that is called once with the block's own input, whatever its name, and returns as much.
Then the copy runs with that call moved, and its output and all gradients must have the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from laconic.moe.huggingface.shared_experts import Place, SharedCall, SharedExperts
from laconic.moe.meanwhile import next_number, nodes_since

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _CannotTellError(Exception):
    """The block's shared experts cannot be moved; the message says why."""


def find_shared_experts(model: nn.Module, experts: str) -> SharedExperts | None:
    """Return the shared experts of the block with the routed experts `experts`; None if it has none.

    Nothing in the model changes, and no random number is drawn.
    """
    owner, _, child = experts.rpartition(".")
    block = model.get_submodule(owner)
    with _random_numbers_kept(block):
        try:
            twin = _twin(block, child)
            found = [_moved(twin, child, training) for training in (True, False)]
            if found[0] is not None and found[1] is not None and found[0][0:2] == found[1][0:2]:
                name, place, num_nodes = found[0]
                return SharedExperts(name, place, num_nodes=num_nodes)
            if found != [None, None]:
                raise _CannotTellError("its block calls it otherwise in training than in evaluation")
        except _CannotTellError as reason:
            why = str(reason)
        else:
            why = "it is called outside of the block of its routed experts"
    above, _, name = owner.rpartition(".")
    candidates = _shared_by_name(block, child) or _shared_by_name(model.get_submodule(above), name)
    return SharedExperts(candidates[0], None, why) if candidates else None


def _shared_by_name(owner: nn.Module, other: str) -> list[str]:
    """List children that seem to be shared experts, by their names; gates with one output are none."""
    return [
        name for name, child in owner.named_children() if name != other and "shared" in name and _has_matrices(child)
    ]


def _has_matrices(module: nn.Module) -> bool:
    """Return whether a module has a matrix of several outputs, as shared experts have and their gates have not."""
    return any(p.dim() > 2 or (p.dim() == 2 and len(p) > 1) for p in module.parameters())


# --- the copy ---


class _StandIn(nn.Module):
    """Takes the place of the routed experts: as fast as can be, and it depends on all that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.window: Callable[[Tensor], Any] = lambda rows: None

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        sent = hidden_states.view_as(hidden_states)  # where an exchange begins and ends
        meanwhile = self.window(hidden_states)
        if meanwhile is not None:
            meanwhile.run()
        rows = sent.view_as(sent)
        if top_k_index is None or top_k_weights is None:  # rows for each expert
            return 2 * rows
        scale = (top_k_weights * (1 + top_k_index % 3)).sum(-1).reshape(-1, 1)
        return (rows.reshape(-1, rows.shape[-1]) * scale.to(rows.dtype)).reshape(rows.shape)


def _twin(block: nn.Module, experts: str) -> nn.Module:
    """Return a copy of a block without hooks, with a stand-in for its experts."""
    try:
        twin = copy.deepcopy(block, {id(getattr(block, experts)): _StandIn()})
    except Exception as error:  # foreign code
        raise _CannotTellError(f"its block cannot be copied to try it: {type(error).__name__}: {error}") from error
    for module in twin.modules():
        for name in _HOOKS:
            getattr(module, name).clear()
    return twin


@contextmanager
def _random_numbers_kept(block: nn.Module) -> Iterator[None]:
    devices = {p.device for p in block.parameters() if p.device.type not in ("cpu", "meta")}
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]), torch.enable_grad():
        torch.manual_seed(0)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield


# --- trials ---


@dataclass
class _Called:
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any = None
    draws: bool = False
    num_nodes: int = 0


@dataclass
class _Trial(TorchDispatchMode):
    """What the children of a block are called with, and which of them draws random numbers."""

    calls: list[_Called] = field(default_factory=list)
    running: list[_Called] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            for call in self.running:
                call.draws = True
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self, block: nn.Module) -> Iterator[None]:
        handles = []
        first: dict[int, int] = {}

        def begins(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            call = _Called(name, args, kwargs)
            first[id(call)] = next_number()
            self.calls.append(call)
            self.running.append(call)

        def ends(module: nn.Module, args: Any, out: Any) -> None:
            call = self.running.pop()
            call.out = out
            if isinstance(out, Tensor):
                call.num_nodes = len(nodes_since(out, first[id(call)], next_number()))

        for name, child in block.named_children():
            handles.append(child.register_forward_pre_hook(partial(begins, name), with_kwargs=True))
            handles.append(child.register_forward_hook(ends))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()


def _moved(twin: nn.Module, experts: str, training: bool) -> tuple[str, Place, int] | None:
    """Return name, place and number of nodes of the shared experts, proved in one mode; None if there are none."""
    twin.train(training)
    kept = {name: buffer.clone() for name, buffer in twin.named_buffers()}

    def start() -> None:
        torch.manual_seed(1)
        twin.zero_grad()
        for name, buffer in twin.named_buffers():
            buffer.data.copy_(kept[name])

    # 1. As it is.
    x: Tensor | None = None
    error: Exception | None = None
    for width in _widths(twin, experts):
        start()
        try:
            x = _tokens(twin, width)
            trial, hidden = _Trial(), x * 1
            with trial.watching(twin):
                expected = _forward(twin, hidden)
            break
        except Exception as reason:  # foreign code
            x, error = None, error or reason
    if x is None:
        raise _CannotTellError(f"its block cannot be tried: {type(error).__name__}: {error}")
    call, place = _shared_call(trial, hidden, experts, twin)
    if call is None:
        return None
    before = _backward(twin, x, expected)

    # 2. With the call moved.
    num_nodes = max(48, 3 * call.num_nodes)  # packed activations have other graphs
    moved = SharedCall(twin, call.name, place, num_nodes)
    moved.attach()
    ran: list[bool] = []

    def window(rows: Tensor) -> Any:
        meanwhile = moved.window(rows)
        ran.append(meanwhile is not None)
        return meanwhile

    stand_in: Any = twin.get_submodule(experts)
    stand_in.window = window
    try:
        start()
        again = _tokens(twin, x.shape[-1])
        out = _forward(twin, again * 1)
        after = _backward(twin, again, out)
    except Exception as reason:  # foreign code
        raise _CannotTellError(f"moving the call fails: {type(reason).__name__}: {reason}") from reason
    finally:
        stand_in.window = lambda rows: None
        for module in (twin, moved.module):
            module.__class__ = type(module).__mro__[2]
            del module.__dict__["_shared_call"]
    if ran != [True]:
        raise _CannotTellError("its output is read before the routed experts are called")
    if x.device.type != "meta":
        same = [torch.equal(a, b) for a, b in zip([expected, *before], [out, *after], strict=True)]
        if not all(same):
            raise _CannotTellError("the block computes something else when the call is moved")
    return call.name, place, num_nodes


def _forward(twin: nn.Module, hidden: Tensor) -> Tensor:
    out = twin(hidden)
    found = next((one for one in (out if isinstance(out, tuple) else (out,)) if isinstance(one, Tensor)), None)
    if found is None:
        raise TypeError(f"it returns a {type(out).__name__} without tensors")
    return found


def _backward(twin: nn.Module, x: Tensor, out: Tensor) -> list[Tensor]:
    weights = torch.linspace(0.5, 1.5, out.numel(), device=out.device, dtype=torch.float32).view(out.shape)
    (out.float() * weights).sum().backward()
    return [p.grad for p in (x, *twin.parameters()) if p.grad is not None]


def _tokens(twin: nn.Module, width: int) -> Tensor:
    weight = next(p for p in twin.parameters() if p.is_floating_point())
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, width, generator=generator, dtype=torch.float32, device="cpu")
    return x.to(weight.device, weight.dtype).requires_grad_()


def _widths(twin: nn.Module, experts: str) -> list[int]:
    """List the inputs of the block's matrices, the most frequent first: one of them is the width of its tokens."""
    matrices = [p.shape[1] for p in twin.parameters() if p.dim() == 2]
    return sorted(set(matrices), key=lambda width: (-matrices.count(width), width))


def _shared_call(trial: _Trial, hidden: Tensor, experts: str, twin: nn.Module) -> tuple[_Called | None, Place]:
    """Return the one call that can be moved, and where it is."""
    names = [call.name for call in trial.calls]
    if names.count(experts) != 1:
        raise _CannotTellError(f"its block calls the routed experts {names.count(experts)} times")
    at = names.index(experts)
    routed = trial.calls[at]
    rows = routed.args[0] if routed.args else routed.kwargs.get("hidden_states")
    found: list[tuple[_Called, Place]] = []
    problems: list[str] = []
    for number, call in enumerate(trial.calls):
        child = twin.get_submodule(call.name)
        if call.name == experts or not _has_matrices(child):
            continue
        first = call.args[0] if call.args else None
        if not (
            isinstance(first, Tensor)
            and isinstance(call.out, Tensor)
            and call.out.shape == first.shape
            and first.numel() == hidden.numel()
        ):
            if "shared" in call.name:
                problems.append(f"it is called with something else than the block's input ({_arguments(call)})")
        elif len(call.args) > 1 or call.kwargs:
            problems.append(f"it needs more than hidden states ({_arguments(call)})")
        elif names.count(call.name) > 1:
            problems.append("it is called more than once")
        elif call.draws:
            problems.append("it draws random numbers, whose order would change")
        elif call.out.dtype != first.dtype:
            problems.append(f"it returns {call.out.dtype} of {first.dtype}")
        elif _storage(first) != _storage(hidden):
            problems.append("it is called with something else than the block's input")
        elif number < at:
            found.append((call, "before"))
        elif (place := _place_of(first, rows, hidden)) is not None:
            found.append((call, place))
        else:
            problems.append("it is called with something else than the block's input")
    if len(found) == 1:
        return found[0]
    if problems or len(found) > 1:
        raise _CannotTellError(problems[0] if problems else "its block has several")
    return None, "before"


def _arguments(call: _Called) -> str:
    return ", ".join([*(type(one).__name__ for one in call.args), *call.kwargs])


def _storage(x: Tensor) -> tuple[int, Any]:
    return x.untyped_storage()._cdata, x.storage_offset()


def _place_of(first: Tensor, rows: Any, hidden: Tensor) -> Place | None:
    """Return which tensor `first` is, of those that the layer knows when it calls the routed experts."""
    if first is hidden:
        return "input"
    if first is rows:
        return "rows"
    is_view = isinstance(rows, Tensor) and _storage(first) == _storage(rows)
    return "view" if is_view and first.shape == hidden.shape else None
