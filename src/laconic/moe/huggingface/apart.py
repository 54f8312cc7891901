"""Experts that are called apart: modules of their own, or stacks of one product, as those of Switch, NLLB and JetMoE.

A list, of two families of transformers, calls modules of one kind, each with its rows. A module with a stack `weight`
[E, N, M] alone, in any model of transformers, is called with (rows [q, M] sorted by expert, the numbers of their rows),
and returns [q, N].

In one process their own code runs. Over processes what each process holds of an expert's parameters is its part of a
stack over all experts, [E, ...], a DTensor as those of fused experts are; `own_names` has the names before.

[Note: asking twice]
The code of a list of experts runs twice in each forward over processes. The first time every expert that it calls notes
its rows and answers zeros. Then all rows travel to their experts at once, and the second time each answers what came
back. So routing, capacities, weights and what is behind experts are the model's own code. Random numbers of the first
run are drawn again in the second. That needs code that notes nothing in attributes, gives experts rows that depend on
no other's answer and calls them under its own autocast, and experts that compute each row alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from laconic.errors import ConfigError, ModelError
from laconic.moe.dispatch.staged import experts_of
from laconic.moe.experts.grouped_mm import grouped_mm
from laconic.moe.huggingface.drawn_dropout import GivenDropout, drawn, drops_in, num_columns, packed, unpacked
from laconic.moe.huggingface.experts import FusedExperts
from laconic.moe.huggingface.layer import ExpertsLayer
from laconic.moe.huggingface.sharding import as_sharded, shard
from laconic.moe.parallel.grid import Grid

ExchangeRows = Callable[[Tensor, Tensor], Tensor]
"""Returns the outputs of rows [q, M], given the numbers of their experts, int64 [q]."""

_SWITCH = "transformers.models.switch_transformers.modeling_switch_transformers.SwitchTransformers"
_NLLB = "transformers.models.nllb_moe.modeling_nllb_moe.NllbMoe"
_LISTS = (f"{_SWITCH}Experts", f"{_NLLB}Experts")
"""Classes of lists that do what [Note: asking twice] needs."""
_IN_LISTS = (f"{_SWITCH}DenseActDense", f"{_NLLB}DenseActDense")
"""Classes of the experts in them."""
_STACKS = "transformers.models."
"""Package of stacks, of which each is tried."""


def find_apart(model: nn.Module) -> dict[str, list[str]]:
    """Find all experts that are called apart: by module name, the names of the experts in it, which a stack has not."""
    found = {}
    for name, module in model.named_modules():
        if type(module).__module__.startswith(_STACKS) and _is_stack(module):
            found[name] = list[str]()
        elif _class_of(module) in _LISTS and (keys := _experts_in(module)):
            found[name] = keys
    return found


def _class_of(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _is_stack(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and weight.dim() == 3
        and len(weight) == getattr(module, "num_experts", None)
        and len([*module.parameters()]) == 1
        and "layer" not in module.__dict__  # a layer's already
        and len(inspect.signature(type(module).forward).parameters) == 3
        and _is_product(module, len(weight))
    )


def _is_product(module: nn.Module, number: int) -> bool:
    """Return whether a module multiplies the rows of each expert by its weight, as it does narrow random ones."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(number, 5, 3, generator=generator, dtype=torch.float32, device="cpu")
    sizes = [1 + e % 3 for e in range(number)]
    rows = torch.randn(sum(sizes), 3, generator=generator, dtype=torch.float32, device="cpu")
    expected = torch.cat([part @ one.T for part, one in zip(rows.split(sizes), weight, strict=True)])
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            got = functional_call(module, {"weight": weight}, (rows, sizes))
        return bool(torch.allclose(got, expected, 1e-4, 1e-5))
    except Exception:  # foreign code may raise anything
        return False


def _experts_in(module: nn.Module) -> list[str]:
    """Return the names of modules of one kind that a list of modules calls itself; none if they differ."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return []
    children = [*module._modules.values()]
    if None in children or len({*children}) < len(children) or module._parameters or module._buffers:
        return []
    found = {name: child for name, child in module.named_children() if [*child.parameters()]}
    if not all(_class_of(child) in _IN_LISTS for child in found.values()):
        return []
    return [*found] if len(found) > 1 and len({_kind(child) for child in found.values()}) == 1 else []


def _kind(expert: nn.Module) -> tuple[object, ...]:
    """Return what modules have in common of which one can stand for another."""
    tensors = [(name, p.shape, p.dtype, p.requires_grad) for name, p in expert.named_parameters()]
    plain = [
        {key: value for key, value in vars(part).items() if isinstance(value, bool | int | float | str)}
        for part in expert.modules()
    ]
    return type(expert), str(expert), str(tensors), str(plain)


def own_names(model: nn.Module) -> dict[str, list[str]]:
    """Return for each stack of experts that lay apart, by its name, the names of its parameters before, by expert."""
    return {
        f"{prefix}.{stack}": [f"{prefix}.{name}" for name in names]
        for prefix, module in model.named_modules()
        if isinstance(module, ExpertsApart)
        for stack, names in module.own_names().items()
    }


def check_apart(model: nn.Module, found: dict[str, list[str]], grid: Grid | None) -> None:
    """Refuse experts of `find_apart` that cannot be spread over the grid.

    Raises:
        ModelError: an expert has buffers, hooks, adapters or a forward that its part of a stack would not have.
        ConfigError: there are fewer experts than N_EP, or the grid has mp or esp.
    """
    for name, keys in found.items():
        module: Any = model.get_submodule(name)
        number = len(keys) or int(module.num_experts)
        if grid is None:
            continue
        if grid.layout.mp > 1 or grid.layout.esp > 1:
            raise ConfigError(
                f"the grid has mp = {grid.layout.mp} and esp = {grid.layout.esp}, but the experts of {name} are called"
                " apart and cannot be cut, nor share their tokens; use ep alone, as in Grid(ep=2)"
            )
        if number < grid.layout.ep:
            raise ConfigError(
                f"{name} has {number} experts, but ep = {grid.layout.ep} processes need at least one each; lower ep to"
                f" {number} or less"
            )
        for part_name, part in module.named_modules(prefix=name) if grid.layout.ep > 1 else ():
            held = [key for key, value in vars(part).items() if "hook" in key and value and part is not module]
            held += ["a forward that was put there"] if "forward" in part.__dict__ else []
            held += [f"buffer {key}" for key, _ in part.named_buffers(recurse=False)]
            is_run = bool([*part.parameters()])  # others stay modules of their own
            held += (
                [f"training {part.training}, other than the list"]
                if part.training != module.training and is_run
                else []
            )
            held += ["an adapter"] if hasattr(part, "base_layer") else []
            held += ["shards"] if any(isinstance(p, DTensor) for p in part.parameters(recurse=False)) else []
            if held:
                raise ModelError(
                    f"{part_name} has {', '.join(held)}, but over processes experts are parts of stacks, which would"
                    " not have that; call parallelize on the plain model, before compress_activations, adapters and"
                    " hooks, or without a mesh"
                )


class ExpertsApart(FusedExperts):
    """Experts that are called apart; see the module.

    Attributes:
        is_cut: whether each process has a part of them; then `forward` is that of all experts, with (rows, counts), and
            else the original's.
        width: elements of a row, if it is known; columns behind them are bits of dropout.
    """

    is_cut: bool
    width: int | None

    def __init__(self, original: nn.Module, parameters: dict[str, nn.Parameter], number: int, is_cut: bool) -> None:
        super().__init__(original, parameters)
        # Around `__setattr__`: the original may have attributes of these names.
        self.__dict__.update(is_cut=is_cut, num_global_experts=number, width=None)
        if not is_cut:
            self.num_experts = number
            self.__dict__["_behaviour"].__dict__["_parameters"] = self._parameters

    def __getattr__(self, name: str) -> Any:
        """Return an attribute, also a public one, or a method, that only the original has."""
        behaviour = self.__dict__.get("_behaviour")
        if behaviour is None or name.startswith("_") or name in self._modules or name in self._parameters:
            return super().__getattr__(name)
        return getattr(behaviour, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer as the original is called, and `forward` while the layer runs."""
        layer = self.__dict__.get("layer")
        return (
            nn.Module.__call__(self, *args, **kwargs) if layer is None or layer.is_running else layer(*args, **kwargs)
        )

    def forward(self, *call: Any, **kwargs: Any) -> Any:
        if self.is_cut:
            return self.compute(*call)
        return self.__dict__["_behaviour"].forward(*call, **kwargs)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return outputs [q, N] of rows [q, M] sorted by local expert."""
        raise NotImplementedError

    def asked(self, exchange: ExchangeRows, *call: Any, **kwargs: Any) -> Tensor:
        """Return what the original would, with outputs of experts from `exchange`, which is called once."""
        raise NotImplementedError

    def own_names(self) -> dict[str, list[str]]:
        """Return the names of the parameters of each stack before, in the original; none if they are the same."""
        return {}

    def is_grouped(self, rows: Tensor) -> bool:
        return False


class StackApart(ExpertsApart):
    """A stack of one product: rows [q, M] sorted by expert to [q, N], by `weight` [E, N, M]."""

    def __init__(self, original: Any, grid: Grid | None) -> None:
        whole = original.get_parameter("weight")
        is_cut = grid is not None and grid.layout.ep > 1
        weight = shard("weight", whole, original, grid) if grid is not None and is_cut else whole
        super().__init__(original, {"weight": weight}, len(whole), is_cut)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        return grouped_mm(rows, self._local("weight").transpose(1, 2), counts)

    def forward(self, *call: Any, **kwargs: Any) -> Any:
        """See `ExpertsApart.forward`; adapters are added to the weight in one process as well."""
        if self.is_cut or not self.adapters:
            return super().forward(*call, **kwargs)
        return self.compute(*self._rows_and_counts(*call, **kwargs))

    def asked(self, exchange: ExchangeRows, *call: Any, **kwargs: Any) -> Tensor:
        rows, counts = self._rows_and_counts(*call, **kwargs)
        return exchange(rows, torch.arange(len(counts), device=rows.device).repeat_interleave(counts))

    def _rows_and_counts(self, *call: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, sizes = inspect.signature(self.__dict__["_behaviour"].forward).bind(*call, **kwargs).args
        return rows, torch.as_tensor(sizes, dtype=torch.int64, device=rows.device)


class ModulesApart(ExpertsApart):
    """Modules of one kind that the code of their list calls; see [Note: asking twice].

    What has no parameters in an expert, such as dropout, is one module for all over processes, `expert_<name>` here.
    """

    def __init__(self, original: nn.Module, keys: list[str], grid: Grid | None) -> None:
        if grid is None or grid.layout.ep == 1:
            super().__init__(original, {}, len(keys), False)
            self._keys = keys
            return
        experts = [original.get_submodule(key) for key in keys]
        kept = {key: child for key, child in original._modules.items() if key not in keys}
        template = copy.deepcopy(experts[0]).to("meta")
        inner = {name.replace(".", "_"): name for name, _ in template.named_parameters()}
        bare = copy.copy(original)
        bare.__dict__["_modules"] = kept | {
            f"expert_{name.replace('.', '_')}": part
            for name, part in template.named_modules()
            if name and not [*part.parameters()] and not [*part.children()]
        }
        super().__init__(
            bare,
            {flat: _stacked([expert.get_parameter(name) for expert in experts], grid) for flat, name in inner.items()},
            len(keys),
            True,
        )
        self._keys, self._inner, self._kept = keys, inner, [*kept]
        self.__dict__["_template"] = template
        stubs = {key: _ExpertStub(number, template, [*inner]) for number, key in enumerate(keys)}
        self.__dict__["_behaviour"].__dict__["_modules"] = {
            key: stubs.get(key, child) for key, child in original._modules.items()
        }

    def __getitem__(self, key: Any) -> Any:
        """Return an expert as the original does; over processes, one that has no values."""
        return self.__dict__["_behaviour"][key]

    def __len__(self) -> int:
        return len(self.__dict__["_behaviour"])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__dict__["_behaviour"])

    def own_names(self) -> dict[str, list[str]]:
        return (
            {flat: [f"{key}.{name}" for key in self._keys] for flat, name in self._inner.items()} if self.is_cut else {}
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Take stacks, or what they are stacked of."""
        for stack, names in self.own_names().items():
            if all(prefix + name in state_dict for name in names):
                state_dict[prefix + stack] = torch.stack([state_dict.pop(prefix + name) for name in names])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(self, *call: Any, **kwargs: Any) -> Any:
        out = super().forward(*call, **kwargs)
        if self.is_cut or not self.__dict__["layer"].is_fully_sharded or not torch.is_grad_enabled():
            return out
        # FSDP2 reduces what has a gradient, which has to be the same on all processes: no rows give zeros.
        nothing = _no_rows(*call, **kwargs)
        return out + sum(self.get_submodule(key)(nothing).sum() for key in self._keys)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        template, sizes = self.__dict__["_template"], counts.tolist()
        rows, columns = rows[:, : self.width], rows[:, self.width or rows.shape[1] :]
        if columns.shape[1] and rows.dtype != self.rows_dtype:
            raise ModelError(
                f"experts get rows as {rows.dtype} that were sent as {self.rows_dtype} with what dropout keeps of them,"
                " which a cast destroys, as FSDP2's mp_policy makes it; give them hidden states in that dtype, or set"
                " the experts' dropout to 0"
            )
        stacks = {name: self._local(flat).unbind() for flat, name in self._inner.items()}
        outs = [rows[:0]]
        # Experts without rows too: backward on this process is to reach them as on the others.
        for e, (part, kept) in enumerate(zip(rows.split(sizes), unpacked(columns).split(sizes), strict=True)):
            with GivenDropout(kept) if columns.shape[1] else nullcontext():
                outs.append(functional_call(template, {name: stack[e] for name, stack in stacks.items()}, (part,)))
        return torch.cat(outs[1:] or outs)

    def asked(self, exchange: ExchangeRows, *call: Any, **kwargs: Any) -> Tensor:
        """See `ExpertsApart.asked`; ModelError if the second run calls other experts, or with other numbers of rows."""
        like = _no_rows(*call, **kwargs)
        self.__dict__["width"], self.__dict__["rows_dtype"] = like.shape[1], like.dtype
        template, asks = self.__dict__["_template"], list[tuple[int, Tensor]]()
        for part in template.modules():
            if [*part.parameters()] or [*part.children()]:  # the others are modules of this one
                part.training = self.training
        drops = drops_in(template, like)
        num, kept = num_columns(drops, like.dtype), list[Tensor]()

        def note(number: int, rows: Tensor) -> Tensor:
            asks.append((number, rows))
            if num:
                kept.append(drawn(drops, rows))
            return torch.zeros_like(rows)

        with torch.random.fork_rng([like.device] if like.is_cuda else [], device_type=like.device.type):
            self._run(note, *call, **kwargs)
        sizes = [len(rows) for _, rows in asks]
        numbers = torch.tensor([number for number, _ in asks], dtype=torch.int64, device=like.device)
        rows = torch.cat([rows for _, rows in asks]) if asks else like
        if num:
            columns = packed(torch.cat(kept), num, rows.dtype) if asks else rows.new_empty(0, num)
            rows = torch.cat((rows, columns), 1)
        numbers = numbers.repeat_interleave(torch.tensor(sizes, dtype=torch.int64, device=like.device))
        out = exchange(rows, numbers)
        called, answers = list[tuple[int, int]](), iter(out.split(sizes))
        expected = [(number, len(rows)) for number, rows in asks]

        def answer(number: int, rows: Tensor) -> Tensor:
            called.append((number, len(rows)))
            if called[-1:] != expected[len(called) - 1 : len(called)]:
                raise self._differs()
            if num:
                drawn(drops, rows)
            return next(answers)

        result = self._run(answer, *call, **kwargs)
        if len(called) < len(expected):
            raise self._differs()
        return result if asks else result + out.sum().to(result.dtype)  # for backward, which the others wait for

    def _differs(self) -> ModelError:
        return ModelError(
            f"{type(self.__dict__['_behaviour']).__name__} calls its experts otherwise once they have answered, but"
            " over processes the rows of all experts travel at once; call parallelize without a mesh"
        )

    def _run(self, ask: Callable[[int, Tensor], Tensor], *call: Any, **kwargs: Any) -> Any:
        """Run the original's code with experts that answer by `ask`."""
        behaviour = self.__dict__["_behaviour"]
        behaviour._modules.update({key: self._modules[key] for key in self._kept})  # which may have been replaced
        stubs = [behaviour._modules[key] for key in self._keys]
        for stub in stubs:
            stub.ask = ask
        try:
            return behaviour.forward(*call, **kwargs)
        finally:
            for stub in stubs:
                del stub.ask  # which holds the rows and their graph


class _ExpertStub:
    """Stands for an expert in the code that calls it; its parameters have no values."""

    def __init__(self, number: int, template: nn.Module, stacks: list[str]) -> None:
        self._number, self._template, self._stacks = number, template, stacks
        self.ask: Callable[[int, Tensor], Tensor]

    def __call__(self, rows: Tensor) -> Tensor:
        return self.ask(self._number, rows)

    def __getattr__(self, name: str) -> Any:
        if "ask" not in self.__dict__ and not name.startswith("__"):
            raise ModelError(
                f"expert {self.__dict__.get('_number')} is a part of stacks over processes, so its {name} is not to be"
                f" had alone; take the stacks {', '.join(self.__dict__.get('_stacks', ()))} of the module that holds it"
            )
        return getattr(self._template, name)


class ApartLayer(ExpertsLayer):
    """ExpertsLayer of experts that are called apart, each row of which is a token with one expert of weight 1.

    In one process it has no rows, and records none in `load`.
    """

    experts: ExpertsApart

    @torch.compiler.disable
    def forward(self, *call: Any, **kwargs: Any) -> Tensor:
        """Return what the original would."""
        if self.experts.is_cut:
            return self.experts.asked(self._exchange, *call, **kwargs)
        self._note_ddp()
        self.is_running = True
        try:
            out: Tensor = self.experts(*call, **kwargs)
        finally:
            self.is_running = False
        return out

    def _exchange(self, rows: Tensor, numbers: Tensor) -> Tensor:
        codecs = getattr(self.dispatcher, "codecs", (getattr(self.dispatcher, "codec", "auto"),))
        has_bits = rows.shape[1] > (self.experts.width or rows.shape[1])
        if has_bits and not all(getattr(codec, "lossless", True) for codec in codecs):
            raise ConfigError(
                "experts have dropout, whose bits travel with their rows, but the dispatcher's codec rounds what"
                ' travels; take a lossless codec, as "auto", or set the experts\' dropout to 0'
            )
        return super().forward(rows, numbers[:, None], rows.new_ones(len(rows), 1))


def _no_rows(*call: Any, **kwargs: Any) -> Tensor:
    """Return [0, M] of the first tensor [..., M] of a call that is floating."""
    first = next(one for one in (*call, *kwargs.values()) if isinstance(one, Tensor) and one.is_floating_point())
    return first.reshape(-1, first.shape[-1])[:0]


def _stacked(parameters: list[nn.Parameter], grid: Grid) -> nn.Parameter:
    """Return this process's part of the stack of one parameter of all experts."""
    here, first = experts_of(grid.ep.rank(), len(parameters), grid.layout.ep), parameters[0]
    held = [parameter.detach() for parameter in parameters[here.start : here.stop]]
    local = torch.stack(held) if held else first.detach().new_empty(0, *first.shape)
    whole = torch.empty(len(parameters), *first.shape, dtype=first.dtype, device="meta")
    return as_sharded(local, grid.expert_mesh["ep"], [Shard(0)], whole, first)
