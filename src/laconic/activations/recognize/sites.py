"""Finds the places in a model where backward needs a tensor.

A module is recognized by what it computes, not by its class name: a candidate that has the right parts is run on a few
random numbers and compared with the formula it seems to follow. So Llama's, Gemma's and OLMo's norms are distinguished
by their values, a model class nobody has heard of is recognized if it computes the same thing, and one that looks
familiar but does something else is left alone.

A formula stands only for modules without parts (norm, linear, activation), and only if they compute it in training and
in evaluation alike. Composed modules (feed-forward block, attention, experts, router) run their own code, so that
anything they do beyond the formula, such as dropout, is done.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from laconic.activations.backward.functions import ACTIVATIONS
from laconic.activations.backward.norms import NormSpec, norm_formula
from laconic.activations.host.patched import overrides_functions
from laconic.activations.keep.preserve import preserved
from laconic.activations.recognize.code_scan import TorchCalls, calls_of
from laconic.activations.recognize.leaf_layers import LeafKind, LeafSpec, leaf_of
from laconic.activations.recognize.mixture import ExpertsSpec, RouterSpec, experts_of, router_of
from laconic.activations.recognize.trial import (
    alike,
    are_close,
    has_plain_attributes,
    kind_of,
    outcome,
    own_forward,
    settled,
    usual_numbers,
)


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer; `transposed` if the weight is [in_features, out_features] (GPT-2's Conv1D)."""

    transposed: bool


@dataclass(frozen=True)
class MlpSpec:
    """A feed-forward block: down(act(gate(x)) * up(x)), or down(act(gate(x))) if `up` is None.

    That is the formula in evaluation; in training there may be dropout, noise and the like anywhere in it.

    Attributes:
        gate, up, down, act: names of the children.
        activation: key of `ACTIVATIONS`.
        fused: `gate` returns gate and up side by side.
    """

    gate: str
    up: str | None
    down: str
    act: str
    activation: str
    fused: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """Attention through Hugging Face's `AttentionInterface`.

    Attributes:
        heads: features of query, key and value heads per token; None where the configuration does not tell.
    """

    heads: tuple[int, int, int] | None


@dataclass(frozen=True)
class InnerAttentionSpec:
    """A module that is nothing but attention; `names` are those of query, key and value in its forward."""

    names: tuple[str, str, str]


@dataclass(frozen=True)
class ActivationSpec:
    """An activation module outside of a feed-forward block; `activation` is a key of `ACTIVATIONS`."""

    activation: str


@dataclass(frozen=True)
class DropoutSpec:
    """Torch's dropout; its mask is kept in bits, whatever the format."""


@dataclass(frozen=True)
class FunctionsSpec:
    """A module whose own code calls `names` of torch.nn.functional (see functional.py)."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class MixerSpec:
    """A module that mixes tokens by code of its own and runs again in backward (see mixer.py)."""


_M = TypeVar("_M", bound=nn.Module)
_T = TypeVar("_T")

Spec = (
    NormSpec
    | LinearSpec
    | MlpSpec
    | AttentionSpec
    | InnerAttentionSpec
    | RouterSpec
    | ExpertsSpec
    | ActivationSpec
    | DropoutSpec
    | FunctionsSpec
    | MixerSpec
    | LeafSpec
)


@dataclass(frozen=True)
class Site:
    """A place where backward needs a tensor.

    Attributes:
        name: the module's qualified name.
        kind: of site.
        layer: index of the decoder layer, None outside of the stack.
        features: shape per token of the tensor that the site saves if it has to save its own; for an mlp gate and up
            together, for attention query, key and value.
        spec: what exactly the module computes.
        head: whether it is a norm or linear behind a stack of layers, such as the final norm and the output projection
            of a language model.
    """

    name: str
    kind: Literal["norm", "linear", "mlp", "attention", "router", "experts", "functions", "mixer"] | LeafKind
    layer: int | None
    features: tuple[int, ...]
    spec: Spec
    head: bool = False


_VERDICTS: ContextVar[dict[Hashable, Any] | None] = ContextVar("verdicts", default=None)
"""Of the search under way: a model's layers repeat, and trials take nearly all of the time."""


def _once(tries: Callable[[_M], _T]) -> Callable[[_M], _T]:
    """Try one of the modules that are alike in all that a trial reads."""

    @wraps(tries)
    def verdict(module: _M) -> _T:
        verdicts = _VERDICTS.get()
        kind = None if verdicts is None else kind_of(module)
        if verdicts is None or kind is None:
            return tries(module)
        if (tries, kind) not in verdicts:
            verdicts[tries, kind] = tries(module)
        found: _T = verdicts[tries, kind]
        return found

    return verdict


def find_sites(model: nn.Module) -> list[Site]:
    """All sites of a model in the order of its modules, each shared module once."""
    # Trials share what is no tensor with the modules, such as a recorder of largest values.
    with usual_numbers(), preserved(model, tensors="left"):
        known = _VERDICTS.set({})
        try:
            sites = list(_sites(model))
        finally:
            _VERDICTS.reset(known)
    if all(site.layer is None for site in sites):
        return sites
    may_be_head = ("norm", "linear")
    return [replace(site, head=site.layer is None and site.kind in may_be_head) for site in sites]


def _sites(model: nn.Module) -> Iterator[Site]:
    inside: set[nn.Module] = set()  # activations of feed-forward blocks and experts, which belong to these
    parts: set[nn.Module] = set()  # of modules that run again as a whole
    beside_linears = {child for module in model.modules() if _has_linear(module) for child in module.children()}
    for name, module in model.named_modules():
        layer = _layer_of(name)
        # Not in those of torch.jit, whose code is no Python, nor in lazy ones, which become others in their first
        # forward, and whose parameters override functions, too.
        if isinstance(module, torch.jit.ScriptModule) or any(
            p is not None and overrides_functions(p) for p in module._parameters.values()
        ):
            continue
        if module in parts:
            continue
        if (torchs := _torchs_own(module)) is not None:
            parts.update(module.modules())
            kind, width = torchs
            yield Site(name, kind, layer, (width,), MixerSpec())
        elif (linear := _linear(module)) is not None:
            width = _weight_of(module).shape[0 if linear.transposed else 1]
            yield Site(name, "linear", layer, (width,), linear)
        elif (norm := _norm(module)) is not None:
            weight = module._parameters.get("weight")
            yield Site(name, "norm", layer, () if weight is None else tuple(weight.shape), norm)
        elif (mlp := _mlp(module)) is not None:
            down = _child(module, mlp.down)
            width = _weight_of(down).shape[0 if _is_conv1d(down) else 1]
            inside.add(module.get_submodule(mlp.act))
            yield Site(name, "mlp", layer, (width * (1 if mlp.up is None and not mlp.fused else 2),), mlp)
        elif (attention := _attention(module)) is not None:
            yield Site(name, "attention", layer, () if attention.heads is None else (sum(attention.heads),), attention)
        elif (inner := _inner_attention(module)) is not None:
            yield Site(name, "attention", layer, (), inner)
        elif (router := router_of(module)) is not None:
            yield Site(name, "router", layer, (_weight_of(module).shape[1],), router)
        elif (experts := experts_of(module)) is not None:
            inside.update(module.modules())
            yield Site(name, "experts", layer, (experts.hidden_size,), experts)
        elif is_dropout(module):
            yield Site(name, "dropout", layer, (), DropoutSpec())
        elif module in inside:
            continue
        elif module in beside_linears and (activation := _activation(module)) is not None:
            yield Site(name, "activation", layer, (), ActivationSpec(activation))
        elif (leaf := leaf_of(module)) is not None:
            yield Site(name, leaf.kind, layer, leaf.features, leaf)
        elif layer is not None and _is_mixer(module):
            yield Site(name, "mixer", layer, (), MixerSpec())
        elif names := _functions_of(module):
            yield Site(
                name, "attention" if TorchCalls.ATTENTION in names else "functions", layer, (), FunctionsSpec(names)
            )


def is_dropout(module: nn.Module) -> bool:
    """Whether a module is torch's dropout and works out of place."""
    return type(module) is nn.Dropout and own_forward(module) is None and not module.inplace


def _has_linear(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Linear) or _is_conv1d(child) for child in module.children())


def _functions_of(module: nn.Module) -> tuple[str, ...]:
    """Functions of torch that a module's own code calls; products count beside an activation child (gated blocks)."""
    calls = calls_of(module)
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        called = TorchCalls.FUNCTIONS.get(module.activation)  # an attribute, which their code does not tell
        calls |= frozenset() if called is None else {called}
    names = calls & TorchCalls.PACKED
    if not _has_linear(module):
        names -= TorchCalls.ACTIVATIONS  # of pictures, between convolutions
    if TorchCalls.PRODUCT in calls and any(_activation(child) is not None for child in module.children()):
        names |= {TorchCalls.PRODUCT}
    return tuple(sorted(names))


def _torchs_own(module: nn.Module) -> tuple[Literal["attention", "mixer"], int] | None:
    """Kind and width of torch's attention and recurrent layers, whose kernels keep more than a linear layer's input."""
    if own_forward(module) is not None:
        return None
    if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
        return "attention", module.embed_dim
    if isinstance(module, nn.RNNBase) and type(module).forward in [x.forward for x in (nn.LSTM, nn.GRU, nn.RNN)]:
        return "mixer", module.input_size
    return None


def _is_mixer(module: nn.Module) -> bool:
    """Whether a module mixes tokens by code of its own, so that only its input is worth keeping.

    Eager attention (a softmax between linear layers) and state-space or delta-rule mixers (linear layers around a
    recurrence with parameters of its own). This proposes; the forward proves by running twice (see mixer.py).
    """
    num_linears = sum(isinstance(child, nn.Linear) or _is_conv1d(child) for child in module.children())
    if num_linears < 2 or own_forward(module) is not None:
        return False
    calls = calls_of(module)
    if TorchCalls.ATTENTION in calls:
        return False
    has_own = any(p is not None for p in module._parameters.values())
    has_own = has_own or any(type(child) is nn.Conv1d for child in module.children())
    return has_own or "softmax" in calls or any(type(child) is nn.Softmax for child in module.children())


_FAR = 1e4
"""Times what is usual: some modules clip what is large, such as the `gelu_10` of transformers."""


def _draw(*shape: int, generator: torch.Generator, scale: float = 1.0, far: int | None = None) -> Tensor:
    """Random numbers of about this scale, in one row far larger ones."""
    x = torch.randn(shape, generator=generator) * scale
    if far is not None:
        x[far] *= _FAR
    return x.requires_grad_()


def _layer_of(name: str) -> int | None:
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(match[1]) if match else None


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _linear(module: nn.Module) -> LinearSpec | None:
    if type(module) is nn.Linear:
        return LinearSpec(transposed=False) if own_forward(module) is None else None
    # Subclasses may do more than multiply (quantized weights, parametrizations): values decide.
    if isinstance(module, nn.Linear):
        return LinearSpec(transposed=False) if _is_linear(module) else None
    return LinearSpec(transposed=True) if _is_conv1d(module) and _multiplies(module) else None


@_once
def _is_linear(module: nn.Linear) -> bool:
    """Whether a subclass of nn.Linear computes what that does, with and without a bias as it has one."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if module._parameters.keys() != {"weight", "bias"} or len(module._buffers) > 0 or len(module._modules) > 0:
        return False
    if weight is None or weight.dim() != 2 or not weight.is_floating_point() or not has_plain_attributes(module):
        return False
    if weight.shape != (module.out_features, module.in_features):
        return False
    generator = torch.Generator().manual_seed(0)
    tensors = {"weight": _draw(3, 4, generator=generator)}
    if bias is not None:
        tensors["bias"] = _draw(3, generator=generator)
    x = _draw(2, 5, 4, generator=generator, far=1)
    got = settled(module, tensors, x, attributes={"in_features": 4, "out_features": 3})
    expected = torch.nn.functional.linear(x, tensors["weight"], tensors.get("bias"))
    return alike(got, expected, x, *tensors.values())


def _multiplies(module: nn.Module) -> bool:
    """Whether a module of the name and the parts of GPT-2's Conv1D computes what that does."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"weight": _draw(4, 3, generator=generator), "bias": _draw(3, generator=generator)}
    x = _draw(2, 4, generator=generator, far=1)
    if module._parameters.keys() != tensors.keys() or not has_plain_attributes(module):
        return False
    got = settled(module, tensors, x, attributes={"nf": 3})
    return alike(got, torch.addmm(tensors["bias"], x, tensors["weight"]), x, *tensors.values())


# Norms


def _weight_of(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


@_once
def _norm(module: nn.Module) -> NormSpec | None:
    """The normalization a leaf module computes over its last dimension, found by running it on random numbers."""
    weight = module._parameters.get("weight")  # not the attribute: a parametrized one is computed anew, and may change
    if weight is not None and weight.dim() != 1:
        return None
    if any(True for _ in module.children()) or not has_plain_attributes(module):
        return None
    if not set(module._parameters) <= {"weight", "bias"} or len(module._buffers) > 0:
        return None
    if weight is None and (own := getattr(module, "normalized_shape", None)) is not None and len(own) != 1:
        return None  # over more than the last dimension
    features = weight.numel() if weight is not None else own[0] if own is not None else 8
    if features == 1 or any(p is not None and p.shape != (features,) for p in module._parameters.values()):
        return None  # what has one element is spread over a dimension of any length
    return next((spec for eps in _epsilons(module) if (spec := _norm_with(module, features, eps)) is not None), None)


_EPS_NAMES = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_eps")
_EPS_USUAL = (1e-5, 1e-6, 1e-8, 1e-12)


def _epsilons(module: nn.Module) -> tuple[float, ...]:
    """Epsilons that a norm may have: the one that an attribute names, else those in use."""
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        return ()  # its epsilon then depends on the dtype of the input
    named = next((getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)), None)
    if named is not None:
        return (named,) if isinstance(named, float) else ()
    return () if type(module).__module__.startswith("torch.") else _EPS_USUAL  # torch's own norms name theirs


def _norm_with(module: nn.Module, features: int, eps: float) -> NormSpec | None:
    """The normalization with this epsilon that a module computes over its last dimension of `features`."""
    # Few numbers of small size make epsilon and the offset of the weight show in the result. With several dimensions,
    # none before the last of its length: a norm over the second one (GroupNorm, channels first) may look alike in two.
    generator = torch.Generator().manual_seed(0)
    others = 3 if features != 3 else 5
    shapes = ((2, features), (2, others, features), (2, others, 2, features))
    xs = [_draw(*shape, generator=generator, scale=eps**0.5) for shape in shapes]
    xs.append(_draw(*shapes[0], generator=generator, scale=_FAR))
    parameters = {
        name: _draw(features, generator=generator)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    found = [settled(module, parameters, x) for x in xs]
    candidates = [NormSpec("rms", eps), NormSpec("rms", eps, unit_offset=True), NormSpec("layer", eps)]
    weight, bias = parameters.get("weight"), parameters.get("bias")
    for spec in candidates:
        if (spec.unit_offset and weight is None) or (bias is not None and spec.kind != "layer"):
            continue
        expected = (norm_formula(x, weight, bias, spec, x.dtype) for x in xs)
        if all(alike(got, y, x, weight, bias) for x, got, y in zip(xs, found, expected, strict=True)):
            return spec
    return None


# Feed-forward blocks

# Children of the feed-forward blocks in use: gate, up, down. Names only propose; the values decide.
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo"))
_FUSED = (("gate_up_proj", "down_proj"), ("dense_h_to_4h", "dense_4h_to_h"))
_PLAIN = (
    ("c_fc", "c_proj"),
    ("fc1", "fc2"),
    ("fc_in", "fc_out"),
    ("up_proj", "down_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("wi", "wo"),
)
_ACT = ("act_fn", "act", "activation_fn", "activation_function")


def _child(module: nn.Module, name: str) -> nn.Module:
    child = module.get_submodule(name)
    # An adapter (LoRA) wraps the layer it adapts and keeps it under this name.
    base = getattr(child, "base_layer", None)
    return base if isinstance(base, nn.Module) else child


def _mlp(module: nn.Module) -> MlpSpec | None:
    children = dict(module.named_children())
    act = next((name for name in _ACT if name in children), None)
    activation = None if act is None else _activation(children[act])
    if act is None or activation is None:
        return None
    proposals = [MlpSpec(g, u, d, act, activation) for g, u, d in _GATED]
    proposals += [MlpSpec(g, None, d, act, activation, fused=True) for g, d in _FUSED]
    proposals += [MlpSpec(g, None, d, act, activation) for g, d in _PLAIN]
    for spec in proposals:
        names = {spec.gate, spec.down} | ({spec.up} if spec.up is not None else set())
        if names <= set(children) and _computes(module, spec):
            return spec
    return None


def _computes(module: nn.Module, spec: MlpSpec) -> bool:
    """Whether the block computes what `spec` says, tried on small stand-ins for its linear layers."""
    layers = [name for name in (spec.gate, spec.up, spec.down) if name is not None]
    if any(_linear(_child(module, name)) is None for name in layers):
        return False
    narrow, wide = 8, 16
    out = {spec.gate: wide * (2 if spec.fused else 1), spec.up: wide, spec.down: narrow}
    generator = torch.Generator().manual_seed(0)
    stand_ins: dict[str, nn.Linear] = {}
    for name in layers:
        # Made without torch's own initialization: looking at a model must not draw from the random state.
        layer = nn.Linear(wide if name == spec.down else narrow, out[name], device="meta")
        stand_ins[name] = layer.to_empty(device="cpu")
        for parameter in stand_ins[name].parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
    x = torch.randn(3, narrow, generator=generator)
    h = stand_ins[spec.gate](x)

    def inside(act: Callable[[Tensor], Tensor]) -> Tensor:
        if spec.fused:
            gate, up = h.chunk(2, -1)
            return act(gate) * up
        return act(h) if spec.up is None else act(h) * stand_ins[spec.up](x)

    # With another activation, too: the block may have one and call a function instead.
    for act, replaced in ((ACTIVATIONS[spec.activation].forward, {}), (torch.tanh, {spec.act: nn.Tanh()})):
        got = outcome(module, {}, x, training=False, children={**stand_ins, **replaced})
        if not isinstance(got, Tensor) or not are_close(got, stand_ins[spec.down](inside(act)).detach()):
            return False
    return True


@_once
def _activation(module: nn.Module) -> str | None:
    """The name in `ACTIVATIONS` of what an elementwise module without parts computes."""
    if (
        any(True for _ in module.parameters())
        or any(True for _ in module.children())
        or not has_plain_attributes(module)
    ):
        return None
    x = torch.linspace(-8, 8, 1001)
    x = torch.cat((x, x * _FAR)).requires_grad_()
    got = settled(module, {}, x)  # one that works in place, and would overwrite what is to be kept, is not
    return next((name for name, function in ACTIVATIONS.items() if alike(got, function.forward(x), x)), None)


# Attention


def _attention(module: nn.Module) -> AttentionSpec | None:
    """Recognize a module whose forward asks Hugging Face's interface for the code that computes attention."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None or "get_interface" not in code.co_names:
        return None
    named = (forward.__globals__.get(name) for name in code.co_names)
    if not any(type(value).__name__ == "AttentionInterface" for value in named):
        return None
    return AttentionSpec(_heads(module, getattr(module, "config", None)))


def _inner_attention(module: nn.Module) -> InnerAttentionSpec | None:
    """Recognize a module without parts whose forward takes query, key and value first and calls torch's attention."""
    if any(x is not None for x in (*module._parameters.values(), *module._modules.values())):
        return None
    if own_forward(module) is not None or not calls_of(module) & TorchCalls.ATTENTIONS:
        return None
    names = list(inspect.signature(type(module).forward).parameters)[1:4]
    if [name[:1].lower() for name in names] != ["q", "k", "v"]:
        return None
    return InnerAttentionSpec((names[0], names[1], names[2]))


def _heads(module: nn.Module, config: object) -> tuple[int, int, int] | None:
    num_heads = getattr(config, "num_attention_heads", None)
    if not isinstance(num_heads, int):
        return None
    latent = getattr(module, "qk_head_dim", None), getattr(module, "v_head_dim", None)
    if isinstance(latent[0], int) and isinstance(latent[1], int):  # DeepSeek: keys are spread to all heads
        return num_heads * latent[0], num_heads * latent[0], num_heads * latent[1]
    num_key_value_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(module, "head_dim", None) or getattr(config, "hidden_size", 0) // num_heads
    return num_heads * head_dim, num_key_value_heads * head_dim, num_key_value_heads * head_dim
