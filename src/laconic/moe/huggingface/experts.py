"""Experts of a Hugging Face block on rows sorted by expert, in parameters of their original names."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from laconic.errors import CheckpointError, ModelError
from laconic.formats.shards import local_part, local_runs, sharded_like, taken
from laconic.moe.experts.grouped_mm import expert_by_expert, grouped_mm, runs_expert_by_expert, way_of
from laconic.moe.experts.modules import Experts
from laconic.moe.experts.shard import local_weights
from laconic.moe.huggingface.blocks import FLAGS, FLAT, described, lies_flat, takes_rows
from laconic.moe.huggingface.sharding import hidden_placement
from laconic.moe.layer import MoELayer
from laconic.moe.parallel.calling_host import check_not_listed
from laconic.moe.parallel.cut_tensors import is_cut
from laconic.moe.placement.expert_map import Placement

_AROUND_ROWS = ("torch.distributed.fsdp.", "laconic.")
"""Modules with hooks that are about the parameters and what is saved for backward, not about the block's call."""
_HOOKS_OF_CALLS = tuple(name for name in vars(nn.Module()) if name.endswith(("forward_hooks", "forward_pre_hooks")))
_NAMES = {"gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"}


class FusedExperts(Experts):
    """Computes down(act(gate(x)) * up(x)), or the original's own gating and activation, expert by expert.

    The parameters are the original's: `gate_up_proj` (`up_proj` without gating) [E, 2 I, M] and `down_proj` [E, M, I],
    with the last two dimensions exchanged if the original has them so, and biases [E, 2 I] and [E, M] if it has any.
    Over processes they are DTensors, see `laconic.moe.huggingface.sharding`, and rows are those of the local experts.
    Where processes share experts (esp), each computes a part of a sum.
    """

    def __init__(self, original: Any, parameters: Mapping[str, nn.Parameter], *, adds_down_bias: bool = True) -> None:
        """Take the behaviour of `original`, with its parameters or parts of them; `check` tests that it is the same.

        `adds_down_bias` is False on all but one of the processes whose outputs are added up.
        """
        super().__init__()
        self.training = original.training
        self._adds_down_bias = adds_down_bias
        self.placement: Placement | None = None
        self.adapters: list[Any] = []
        """Wrappers around this module that add to its parameters; see laconic.moe.huggingface.adapters."""
        for flag in FLAGS:
            if hasattr(original, flag):
                setattr(self, flag, getattr(original, flag))  # PEFT reads the layout
        if hasattr(original, "_is_described"):  # of whose own class PEFT reads none, and makes adapters for this one
            self.__dict__["is_transposed"] = False
        for name, child in original.named_children():
            self.register_module(name, child)
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        stack = parameters.get("down_proj", next(iter(parameters.values()), None))
        if stack is not None:
            self.num_experts, self.num_global_experts = len(local_part(stack)), len(stack)
        # A copy without parameters runs the original's gating, which may read its attributes and modules.
        behaviour = copy.copy(original)
        behaviour.__dict__ = {**original.__dict__, "_parameters": {}, "_modules": self._modules}
        self.__dict__["_behaviour"] = behaviour

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, also for the original's gating, which may read it; one that is not ours only there."""
        gating = self._of_gating()
        is_ours = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        is_ours = is_ours or isinstance(value, nn.Module | nn.Parameter)
        is_ours = is_ours or not gating or name in self._modules or name in self._parameters
        if is_ours:
            super().__setattr__(name, value)
        if name in gating or not is_ours:
            gating[name] = value

    def __getattr__(self, name: str) -> Any:
        """Return an attribute, also a public one that only the original has."""
        found = {} if name.startswith("_") else self._of_gating()
        return found[name] if name in found else super().__getattr__(name)

    def _of_gating(self) -> dict[str, Any]:
        behaviour = self.__dict__.get("_behaviour")
        return {} if behaviour is None else behaviour.__dict__

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled and copied with a part of the experts, whose process groups cannot be.

        Raises:
            CheckpointError: experts are spread over processes.
        """
        if any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            raise CheckpointError(
                "experts are spread over processes, whose groups can be neither pickled nor copied; save the model with"
                " save_pretrained, or with laconic.moe.huggingface.save_sharded, which all processes call; for a second"
                " one here, as averages of weights need it, parallelize a new model and load this one's state_dict()"
            )
        return super().__reduce_ex__(protocol)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters, as of any module, unless FSDP or `replicate` asks for spread experts, a ConfigError.

        `laconic.moe.fully_shard_layers` may ask.
        """
        layer = self.__dict__.get("layer")
        if layer is not None and layer.has_own_replicas and not layer.is_fully_sharded:
            check_not_listed([p for p in self._parameters.values() if p is not None])
        return super().named_parameters(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert cut parameters in place, as torch converts whole ones: it would drop their hooks and marks."""
        parameters, rest = self._parameters, dict[str, Any]()
        with torch.no_grad():
            for name, parameter in parameters.items():
                held: Any = parameter
                if not is_cut(held) or not torch._has_compatible_shallow_copy_type(held, made := fn(held)):
                    rest[name] = held
                    continue
                held.data = made
                if held.grad is not None:
                    held.grad.data = fn(held.grad)
        self.__dict__["_parameters"] = rest
        try:
            return super()._apply(fn, recurse)
        finally:
            parameters.update(rest)
            self.__dict__["_parameters"] = parameters

    def stand_for(self, layer: MoELayer) -> None:
        """Forward calls of the block to `layer`; see laconic.moe.huggingface.layer [Note: the seam]."""
        self.__dict__["layer"] = layer

    def register_forward_hook(self, hook: Any, **options: Any) -> RemovableHandle:
        """Register a hook around the block's call, or around `forward` if it is FSDP's; so do all such methods."""
        return self._register("register_forward_hook", hook, options)

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> RemovableHandle:
        """See `register_forward_hook`."""
        return self._register("register_forward_pre_hook", hook, options)

    def register_full_backward_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """See `register_forward_hook`."""
        return self._register("register_full_backward_hook", hook, {"prepend": prepend})

    def register_full_backward_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """See `register_forward_hook`."""
        return self._register("register_full_backward_pre_hook", hook, {"prepend": prepend})

    def _register(self, method: str, hook: Any, options: Mapping[str, Any]) -> RemovableHandle:
        layer = self.__dict__.get("layer")
        owner = super() if layer is None or is_of(hook, *_AROUND_ROWS) else layer
        handle: RemovableHandle = getattr(owner, method)(hook, **options)
        return handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer with the block's arguments, or with (rows, counts) and while the layer runs `forward`."""
        layer = self.__dict__.get("layer")
        if layer is None or layer.is_running or (len(args) == 2 and not kwargs):
            return super().__call__(*args, **kwargs)
        return layer(*layer.arguments(*args, **kwargs))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return outputs [q, M] of rows [q, M] sorted by expert, counts int64 [E_local]; autocast as in Linear."""
        kind: Any = self.__dict__["_behaviour"]
        activation, first = (kind._apply_gate, "gate_up_proj") if kind.has_gate else (kind.act_fn, "up_proj")
        up, down = self._weights(first), self._weights("down_proj")
        if not kind.has_bias:
            if runs_expert_by_expert(rows, self.num_experts):
                return expert_by_expert(rows, counts, lambda part, e: activation(part @ up[e]), down)
            return grouped_mm(activation(grouped_mm(rows, up, counts)), down, counts)
        of_row = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))

        def biased(out: Tensor, name: str) -> Tensor:
            bias = self._local(f"{name}_bias")
            if name == "down_proj" and not self._adds_down_bias:
                # Nothing, with the gradient that the process has that adds it; adapters' is added up over all.
                own = local_part(getattr(self, f"{name}_bias"))
                bias = own - own.detach() + 0 * (bias - own).to(own.dtype)
            return out + bias.to(out.dtype)[of_row]

        inner = activation(biased(grouped_mm(rows, up, counts), first))
        return biased(grouped_mm(inner, down, counts), "down_proj")

    def is_grouped(self, rows: Tensor) -> bool:
        """Return whether `forward` multiplies such rows in one call for all experts, and adds no biases.

        On a GPU no host reads the counts then, and rows behind their sum are allowed, whose outputs are undefined.
        """
        kind: Any = self.__dict__["_behaviour"]
        names = ("gate_up_proj" if kind.has_gate else "up_proj", "down_proj")
        return not kind.has_bias and all(way_of(rows, self._weights(name)) == "grouped" for name in names)

    def _weights(self, name: str) -> Tensor:
        """Return a weight as [E_local, inputs, outputs], whatever the parameter's layout."""
        weights, behaviour = self._local(name), self.__dict__["_behaviour"]
        if getattr(behaviour, "num_identities", 0):  # LongCat has rows of gate and up for these, too, and reads none
            weights = weights[: self.num_experts]
        return weights if behaviour.is_transposed else weights.transpose(1, 2)

    def _local(self, name: str) -> Tensor:
        """Return this process's part of a parameter, with what adapters add to it."""
        parameter = getattr(self, name)
        held = local_weights(parameter)
        for adapter in self.adapters:
            held = adapter.added_to(name, held, parameter)
        return held

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Take this process's part of whole tensors, which hosts load; DTensors of its own part are loaded as ever."""
        parameters: dict[str, Any] = self._parameters
        for name, like in parameters.items():
            value: Any = state_dict.get(prefix + name)
            if isinstance(like, DTensor) and isinstance(value, DTensor):
                place, own = value.device_mesh.get_coordinate(), like.device_mesh.get_coordinate()
                if place != own and value.device_mesh == like.device_mesh:
                    raise CheckpointError(
                        f"{prefix}{name} is the part of a process at {place} of {like.device_mesh.mesh_dim_names}, and"
                        f" is loaded at {own}; let each process read the file that it wrote, or save with"
                        " save_pretrained, or with laconic.moe.huggingface.save_sharded"
                    )
            is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
            if isinstance(like, DTensor) and is_whole and value.shape == like.shape:  # other shapes torch refuses
                part = taken(value, local_runs(like.shape, like.device_mesh, like.placements))
                state_dict[prefix + name] = sharded_like(part.to(like.device, copy=True).contiguous(), like)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """Show the numbers of local and of all experts."""
        return f"num_experts={self.num_experts} of {self.num_global_experts}"


class FlatExperts(FusedExperts):
    """Computes (act(x w1) * (x v1)) w2 of DBRX, whose experts lie behind each other in each parameter [E I, M]."""

    def __init__(self, original: Any, parameters: Mapping[str, nn.Parameter], *, adds_down_bias: bool = True) -> None:
        super().__init__(original, parameters, adds_down_bias=adds_down_bias)
        one, self.num_global_experts = parameters[FLAT[0]], int(original.num_experts)
        self.num_experts = len(local_part(one)) * self.num_global_experts // len(one)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        activation: Any = self.__dict__["_behaviour"].activation_fn
        gate, up, down = (self._weights(name) for name in FLAT)
        if runs_expert_by_expert(rows, self.num_experts):
            return expert_by_expert(rows, counts, lambda part, e: activation(part @ gate[e]) * (part @ up[e]), down)
        return grouped_mm(activation(grouped_mm(rows, gate, counts)) * grouped_mm(rows, up, counts), down, counts)

    def is_grouped(self, rows: Tensor) -> bool:
        return all(way_of(rows, self._weights(name)) == "grouped" for name in FLAT)

    def _weights(self, name: str) -> Tensor:
        weights = self._local(name)
        weights = weights.view(self.num_experts, -1, weights.shape[-1])
        return weights if name == "w2" else weights.transpose(1, 2)


class CallsFlat(nn.Module):
    """In the place of the class of DBRX's experts, whose child `mlp` is a FlatExperts: calls that."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return sums of experts' outputs [batch, length, M]."""
        mlp: Any = self.mlp
        out: Tensor = mlp(hidden_states, top_k_index, top_k_weights)
        return out


def is_of(hook: Any, *modules: str) -> bool:
    """Return whether a hook was written in one of some modules, by the beginnings of their names."""
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).startswith(modules)


def _halves(parameters: Mapping[str, Tensor], original: Any) -> list[dict[str, Tensor]]:
    """Cut the hidden dimension of all parameters in two."""
    halves: list[dict[str, Tensor]] = [{}, {}]
    for name, whole in parameters.items():
        place: Any = hidden_placement(name, original)
        parts = [whole, whole] if place.is_replicate() else place._split_tensor(whole, 2, with_padding=False)[0]
        for half, part in zip(halves, parts, strict=True):
            half[name] = part.contiguous()
    return halves


def check(module: nn.Module, name: str, num_shards: int = 1) -> None:
    """Compare FusedExperts with the module it would replace, on narrow random parameters of as many experts.

    With more than one shard the sum of two shards of the hidden dimension is compared. It is a ModelError with `name`
    if they differ, or the module has parts that FusedExperts does not know.
    """
    original, is_flat = described(module), lies_flat(module)
    parameters = {key: p for key, p in original.named_parameters() if p is not None}
    others = sorted(set(parameters) - (set(FLAT) if is_flat else _NAMES)) + [key for key, _ in original.named_buffers()]
    if others or getattr(original, "has_post_expert_norm", False):
        raise ModelError(
            f"{name} has {', '.join(others) or 'a norm behind its experts'}, which laconic.moe does not know"
        )

    # 1. Build the same module with M = 8 and I = 16.
    generator = torch.Generator().manual_seed(0)
    num_experts, width = int(original.num_experts), 32 if original.has_gate else 16
    shapes: dict[str, tuple[int, ...]] = {"gate_up_proj": (width, 8), "up_proj": (width, 8), "down_proj": (8, 16)}
    if original.is_transposed:
        shapes = {key: shape[::-1] for key, shape in shapes.items()}
    shapes |= {"gate_up_proj_bias": (width,), "up_proj_bias": (width,), "down_proj_bias": (8,)}
    shapes = {key: (num_experts, *shape) for key, shape in shapes.items()}
    shapes |= dict.fromkeys(FLAT, (num_experts * 16, 8))
    narrow = {
        key: torch.randn(shapes[key], generator=generator, dtype=torch.float32, device="cpu") * 0.3
        for key in parameters
    }

    # 2. Route a token to every expert; a token may choose one expert twice. Or give each expert three rows.
    rows_only, num_choices = takes_rows(original), num_experts + getattr(original, "num_identities", 0)
    x = torch.randn(
        3 * num_experts if rows_only else num_choices + 3, 8, generator=generator, dtype=torch.float32, device="cpu"
    )
    indices = torch.stack(
        [
            torch.arange(len(x), device="cpu") % num_choices,
            torch.randint(num_choices, (len(x),), generator=generator, device="cpu"),
        ],
        1,
    )
    weights = torch.rand(len(x), 2, generator=generator, dtype=torch.float32, device="cpu") + 0.5
    if rows_only:
        original = copy.copy(original)
        original.hidden_size = 8  # which it reads
        indices, weights = (
            (torch.arange(len(x), device="cpu") // 3)[:, None],
            torch.ones(len(x), 1, dtype=torch.float32, device="cpu"),
        )
    make = FlatExperts if is_flat else FusedExperts
    twins = [
        make(original, {key: nn.Parameter(p) for key, p in part.items()}, adds_down_bias=number == 0)
        for number, part in enumerate(_halves(narrow, original) if num_shards > 1 else [narrow])
    ]
    bare: Any = copy.copy(module if is_flat else original)  # hooks are not tried
    if is_flat:
        bare._modules, bare.hidden_size, bare.ffn_hidden_size = {**bare._modules, "mlp": copy.copy(original)}, 8, 16
    for part in (bare, bare.mlp) if is_flat else (bare,):
        part.__dict__.update({hooks: OrderedDict() for hooks in _HOOKS_OF_CALLS})
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            if is_flat:
                tried = {f"mlp.{key}": p for key, p in narrow.items()}
                expected = functional_call(bare, tried, (x[None], indices, weights))[0]
            else:
                expected = functional_call(bare, narrow, (x,) if rows_only else (x, indices, weights))
        except Exception as error:  # foreign code may raise anything
            raise ModelError(f"{name} cannot be tried as fused experts: {type(error).__name__}: {error}") from error
        experts, order = indices.flatten().sort(stable=True)
        counts = torch.bincount(experts, minlength=num_choices)[:num_experts]
        tokens, num_rows = order // indices.shape[1], int(counts.sum())
        rows = torch.stack([twin(x[tokens[:num_rows]], counts) for twin in twins]).sum(0)
        rows = torch.cat([rows, x[tokens[num_rows:]]])  # of identities
        got = torch.zeros_like(x).index_add_(0, tokens, rows * weights.flatten()[order, None])
    if expected.shape != got.shape or not torch.allclose(got, expected, rtol=1e-4, atol=1e-5):
        differ = (
            f"shape {list(expected.shape)} where {list(got.shape)} was expected"
            if expected.shape != got.shape
            else f"values up to {float((got - expected).abs().max()):.3g} away, of {float(expected.abs().max()):.3g}"
        )
        raise ModelError(
            f"{name} is a {type(module).__name__}, whose output is not that of products with {', '.join(parameters)}"
            f" ({differ}); put a laconic.moe.MoELayer in the block's place by hand"
        )
