"""The ways to keep less for backward, each as what it does to a model and as the lines a user adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from laconic.activations import Offload, Site, compress_activations
from laconic.activations.keep.choice import Choice
from laconic.errors import ModelError
from laconic.formats import BlockFormat

EXACT = "exact"

Apply = Callable[[nn.Module, Mapping[str, Any] | None], tuple[str, ...]]
"""Changes a model, given a batch as keyword arguments if it has such; returns the lines that do the same."""


@dataclass(frozen=True)
class Method:
    """One way to keep less.

    Attributes:
        name: in tables.
        apply: changes a model in place, or raises ModelError where it cannot be done.
        only_below: tried only if this other method saves less than half of the exact bytes, or cannot be done.
    """

    name: str
    apply: Apply
    only_below: str | None = None


def _exact(model: nn.Module, inputs: Mapping[str, Any] | None) -> tuple[str, ...]:
    return ()


def _compress(model: nn.Module, inputs: Mapping[str, Any] | None, **settings: Any) -> tuple[str, ...]:
    compress_activations(model, example_inputs=inputs, **settings)
    given = "".join(f", {name}={value!r}" for name, value in settings.items())
    return ("import laconic", f"laconic.compress_activations(model{given})")


def _checkpoint(model: nn.Module, inputs: Mapping[str, Any] | None) -> tuple[str, ...]:
    # The second name is that of transformers before 5.
    names = [n for n in ("activation_checkpointing_enable", "gradient_checkpointing_enable") if hasattr(model, n)]
    if names and getattr(model, "supports_gradient_checkpointing", False):
        getattr(model, names[0])({"use_reentrant": False})
        return (f'model.{names[0]}({{"use_reentrant": False}})',)
    stacks = _stacks(model)
    if not stacks:
        raise ModelError("no stack of two or more blocks (nn.ModuleList or nn.Sequential) to compute again")
    for name in stacks:
        for block in model.get_submodule(name).children():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return (
        "from functools import partial",
        "from torch.utils.checkpoint import checkpoint",
        f"for name in {stacks!r}:",
        "    for block in model.get_submodule(name).children():",
        "        block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
    )


def _checkpoint_packed(model: nn.Module, inputs: Mapping[str, Any] | None) -> tuple[str, ...]:
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ModelError("only models of transformers have checkpointed layers whose input can be packed")
    return _checkpoint(model, inputs) + _compress(model, inputs, bits=4)


def _offload(model: nn.Module, inputs: Mapping[str, Any] | None) -> tuple[str, ...]:
    if all(parameter.device.type != "cuda" for parameter in model.parameters()):
        raise ModelError("offload moves tensors from a CUDA device to the host; these are in host memory already")
    compress_activations(model, example_inputs=inputs, policy=offload_all)
    return (
        "import laconic",
        "from laconic.advice.methods import offload_all",
        "laconic.compress_activations(model, policy=offload_all)",
    )


def offload_all(site: Site) -> Choice:
    """A policy: 8 bits, in host memory but for attention and other mixers, which run again on the device."""
    packed = BlockFormat("int8")
    return packed if site.kind in ("attention", "mixer") else Offload(packed)


def _stacks(model: nn.Module) -> tuple[str, ...]:
    """Names of the outermost lists of two or more blocks with parameters."""
    found: list[str] = []
    for name, module in model.named_modules():
        if any(not outer or name.startswith(f"{outer}.") for outer in found) or not isinstance(
            module, nn.ModuleList | nn.Sequential
        ):
            continue
        blocks = [child for child in module.children() if next(child.parameters(), None) is not None]
        if len(blocks) >= 2 and not any(isinstance(block, nn.ModuleList) for block in blocks):
            found.append(name)
    return tuple(found)


METHODS = (
    Method(EXACT, _exact),
    Method("4 bits", partial(_compress, bits=4)),
    Method("4 bits, combined", partial(_compress, bits=4, mode="combined"), only_below="4 bits"),
    Method("8 bits", partial(_compress, bits=8)),
    Method("4 bits, chunked loss", partial(_compress, bits=4, loss="chunked")),
    Method("chunked loss", partial(_compress, bits=16, loss="chunked")),
    Method("checkpointing", _checkpoint),
    Method("checkpointing, packed inputs", _checkpoint_packed),
    Method("offload, 8 bits", _offload),
)
"""In the order of the table; the exact model is the first."""


def compiled(budget: float) -> Method:
    """The model compiled by torch, with torch's activation memory budget (1 keeps what it would, 0 recomputes all)."""

    def backend(graph: Any, inputs: Any) -> Any:
        # A backend of its own: Dynamo gives copies of a model that share one the code compiled for the first of them.
        import torch._inductor.config
        from torch._inductor.compile_fx import compile_fx

        # Dropout draws eager torch's numbers, so that gradients can be compared.
        settings = torch._inductor.config.patch(fallback_random=True)
        with settings, torch._functorch.config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    def apply(model: nn.Module, inputs: Mapping[str, Any] | None) -> tuple[str, ...]:
        model.compile(backend=backend)
        set_budget = f"torch._functorch.config.activation_memory_budget = {budget:g}"
        return (*(() if budget == 1.0 else ("import torch._functorch.config", set_budget)), "model.compile()")

    return Method("compiled" if budget == 1.0 else f"compiled, memory budget {budget:g}", apply)
