"""Training steps without numbers: what autograd keeps, what is computed and what is alive, at no memory.

Parameters, inputs and all that is computed of them are torch's fake tensors: shapes, dtypes and storages that know
their size. So a model of any size runs in the time that its Python code takes, and saves for backward what it would
save.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from laconic.activations import SavedTensorTracker
from laconic.activations.forwards.mixer import MixerForward
from laconic.activations.forwards.replacement import replacements_of
from laconic.collectives import api
from laconic.moe.experts import grouped_mm

PHASES = ("forward", "loss", "backward", "end")
"""Parts of a step: until the last block has run, until backward reaches its output, until it reaches the first block's
input, and the rest."""


@dataclass(frozen=True)
class Step:
    """One step of a model.

    Attributes:
        saved: bytes saved for backward, by module.
        flops: of forward, by module.
        peaks: most bytes alive beside parameters, buffers and gradients, by phase; 0 where there was no such phase.
        modules: in the order in which they began.
    """

    saved: Mapping[str, int]
    flops: Mapping[str, int]
    peaks: Mapping[str, int]
    modules: tuple[str, ...]

    @property
    def saved_nbytes(self) -> int:
        """Bytes saved for backward by all modules."""
        return sum(self.saved.values())


class FakeRuns:
    """Steps of a model whose parameters and buffers become fake tensors on the CPU, in place.

    Args:
        model: with parameters on any device, also on the meta device.
        blocks: names of the first and the last block, between which phases change; None for no such.
    """

    def __init__(self, model: nn.Module, blocks: tuple[str, str] | None) -> None:
        self.model, self._blocks = model, blocks
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        _make_fake(model, self._mode)
        self.inputs: Mapping[str, Any] = {}
        self.layer_input: tuple[int, ...] | None = None
        """Shape of what the first block gives on, as it takes it in."""

    @contextmanager
    def inside(self, recorder: _Recorder | None = None) -> Iterator[None]:
        """Everything that is computed is fake, and random numbers come from a generator that is put back."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(_without_values())
            stack.enter_context(self._mode)
            stack.enter_context(_Recorder([], ()) if recorder is None else recorder)
            yield

    def step(
        self, loss_of: Callable[[Any], Tensor], autocast: bool, backward: bool, adds_in_place: bool = False
    ) -> Step:
        """A forward, and a backward whose gradients are added to those of an earlier one.

        `adds_in_place`: autograd will add the second gradient of a shared parameter into the first. It does where that
        is no view, as a linear layer's own backward makes it, but never among fake tensors.
        """
        model = self.model
        for module in model.modules():
            for replacement in replacements_of(module):
                if isinstance(replacement, MixerForward):  # whose trial compares values
                    replacement.repeats = True
        for parameter in model.parameters():
            with self._mode:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        names = {id(module): name for name, module in model.named_modules()}
        order: dict[str, None] = {}
        stack: list[str] = []
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        times = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        shared = [p for p in model.parameters() if times[id(p)] > 1] if adds_in_place else []
        recorder = _Recorder(stack, [*model.parameters(), *model.buffers(), *grads], shared)
        ends = self._blocks or ("", "")

        def enter(module: nn.Module, args: Any) -> None:
            stack.append(name := names.get(id(module), stack[-1] if stack else ""))
            order.setdefault(name)
            if name == ends[0]:
                _at_gradient(args, lambda: recorder.begin("end"))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            name = stack.pop()
            if name == ends[0] and self.layer_input is None:
                self.layer_input = next(tuple(x.shape) for x in tree_leaves(output) if isinstance(x, Tensor))
            if name == ends[1] and self._blocks is not None:
                recorder.begin("loss")
                _at_gradient(output, lambda: recorder.begin("backward"))

        with ExitStack() as hooks:
            hooks.enter_context(self.inside(recorder))
            hooks.callback(register_module_forward_pre_hook(enter).remove)
            hooks.callback(register_module_forward_hook(leave).remove)
            with SavedTensorTracker(model) as tracker, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model(**self.inputs))
            counting = dict(recorder.flops)
            if backward:
                loss.backward()
            del loss
        model.zero_grad(set_to_none=True)
        return Step(dict(tracker.by_module), counting, dict(recorder.peaks), tuple(order))


def _at_gradient(values: Any, begin: Callable[[], None]) -> None:
    """Call `begin` when backward has the gradient of the first tensor of `values` that has one."""
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.requires_grad and value.is_floating_point():
            value.register_hook(lambda _: begin())
            return


class _Recorder(TorchDispatchMode):
    """Counts operations by module and bytes of storages while they live, and helps out where fake tensors have none.

    Args:
        stack: names of the modules that run, innermost last.
        others: whose storages do not count; they outlive the recorder.
        shared: parameters whose gradients are added up in place.
    """

    def __init__(self, stack: list[str], others: Iterable[Tensor], shared: Collection[nn.Parameter] = ()) -> None:
        super().__init__()
        self._stack = stack
        self._shared = shared
        self._others = {tensor.untyped_storage()._cdata for tensor in others}
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._now, self._phase, self._draws = 0, PHASES[0], 0
        self.flops: Counter[str] = Counter()
        self.peaks = dict.fromkeys(PHASES, 0)

    def begin(self, phase: str) -> None:
        """Another part of the step begins."""
        self._phase = phase
        self.peaks[phase] = max(self.peaks[phase], self._now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default:
            out = _grouped_mm(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if _draws(func, args, kwargs):
            # Code that asks whether something drew looks at the generator's state.
            self._draws += 1
            torch.default_generator.manual_seed(self._draws)
        counter = _FLOPS.get(func) or flop_registry.get(func.overloadpacket)
        if counter is not None:
            self.flops[self._stack[-1] if self._stack else ""] += counter(*args, **kwargs, out_val=out)
        is_in_place = func is torch.ops.aten.add.Tensor and any(
            [getattr(x, "shape", None) for x in args] == [p.shape, p.shape] and _makes_gradient_of(p)
            for p in self._shared
        )
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._note(value.untyped_storage(), 0 if is_in_place else value.untyped_storage().nbytes())
        return out

    def _note(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = storage._cdata
        if key in self._alive or key in self._others:
            return
        self._alive[key] = weakref.ref(storage, lambda _: self._forget(key)), nbytes
        self._now += nbytes
        self.peaks[self._phase] = max(self.peaks[self._phase], self._now)

    def _forget(self, key: int) -> None:
        self._now -= self._alive.pop(key)[1]


def _makes_gradient_of(parameter: nn.Parameter) -> bool:
    """Whether backward has just run what gives a gradient of `parameter`, which autograd adds to an earlier one."""
    node = torch._C._current_autograd_node()
    return node is not None and any(getattr(to, "variable", None) is parameter for to, _ in node.next_functions)


def _grouped_flops(a: Tensor, b: Tensor, *rest: Any, **kwargs: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any) -> int:
    is_causal = rest[1] if len(rest) > 1 else kwargs.get("is_causal", False)
    whole = 2 * query.numel() * key.shape[-2] + 2 * query.numel() // query.shape[-1] * key.shape[-2] * value.shape[-1]
    return whole // 2 if is_causal else whole


# Operations of which torch's counter does not know.
_FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._grouped_mm.default: _grouped_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_flops,
}


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers; torch's attention does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *rest: Any, **kwargs: Any) -> Tensor:
    """The result of a grouped product; torch 2.13 has shapes of it for bf16 only, though the CPU computes others."""
    if a.dim() == 2 and b.dim() == 2:  # a gradient of weights
        assert offs is not None
        return a.new_empty(offs.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(*a.shape[:-1], b.shape[-1])


@contextmanager
def _without_values() -> Iterator[None]:
    """What asks for values is answered: sequences are not packed into one, random states need not be put back.

    Experts do not look at the numbers of their rows, and nothing is sent.
    """
    answers: list[tuple[Any, str, Any]] = [
        (torch, "set_rng_state", lambda state: None),
        (grouped_mm, "_check_counts", lambda *args: None),
        (grouped_mm, "_parts", lambda rows, counts: rows.tensor_split(len(counts))),
        (api, "all_to_all", lambda *args, **options: None),
    ]
    with suppress(ImportError):
        import transformers.masking_utils as masks

        answers.append((masks, "find_packed_sequence_indices", lambda position_ids: None))
    before = [getattr(owner, name) for owner, name, _ in answers]
    try:
        for owner, name, answer in answers:
            setattr(owner, name, answer)
        yield
    finally:
        for (owner, name, _), function in zip(answers, before, strict=True):
            setattr(owner, name, function)


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    made: dict[int, Any] = {}

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = parameter, nn.Parameter(fake(parameter), parameter.requires_grad)
                module._parameters[name] = made[id(parameter)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in made:
                    made[id(buffer)] = buffer, fake(buffer)
                module._buffers[name] = made[id(buffer)][1]
