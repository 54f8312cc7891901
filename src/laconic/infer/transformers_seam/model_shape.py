"""Sizes of a model for the planner of inference, counted in the model itself.

It is built without memory and runs once without numbers, with notes in the place of attention and experts: what
attention is given says how wide heads and caches are, and the parameters of each layer fall to attention, experts, or
what runs beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.cost.infer import MODELS, InferenceShape
from laconic.errors import PlanError
from laconic.infer.transformers_seam.loading import find_experts, num_positions, quiet_transformers, read_config
from laconic.infer.transformers_seam.versions import check_transformers
from laconic.moe.huggingface.blocks import Block, unknown_experts

_NOTES = "laconic_notes"


def planned_shape(model: str | Path, item_nbytes: int | None = None) -> InferenceShape:
    """Return the sizes of a model that the engine serves.

    Layers that differ have the mean number of parameters, and of heads and experts the largest number. What runs
    beside attention and experts in a layer that has experts counts as shared experts.

    Args:
        model: a name of `laconic.cost.infer.MODELS`, a directory with a config.json, or that file. Of weights only
            the first dtype is read, and that where the configuration names none.
        item_nbytes: bytes of a value; None: those of the dtype, and 2 where neither configuration nor weights say one.

    Raises:
        PlanError: it is none of these; the model has no experts that an expert worker could hold, or does not run
            without numbers.
        ModelError: the directory holds no model that can be served.
        ConfigError: transformers is missing.
    """
    if isinstance(model, str) and (known := MODELS.get(model)) is not None:  # a path is a directory's
        return known if item_nbytes is None else replace(known, item_nbytes=item_nbytes)
    path = Path(model)
    if not path.is_dir() and path.name != "config.json":
        raise PlanError(
            f"model is {str(model)!r}, but it must be a directory with a config.json, that file, or one of "
            f"{', '.join(MODELS)}"
        )
    check_transformers()
    from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

    model_dir = path if path.is_dir() else path.parent
    config = read_config(model_dir)
    if config.dtype is None:
        item_nbytes = item_nbytes or 2  # it would be built in float32, which hardly a model of experts is served in
    with quiet_transformers():
        built, blocks = find_experts(config)
    if not blocks:
        why = "; ".join(unknown_experts(built)[:1]) or "it is dense"
        raise PlanError(
            f"{str(model_dir)!r} is a {config.model_type} model without experts that an expert worker could hold"
            f" ({why}); it is served whole, and there is nothing to plan"
        )
    names = {id(module): name for name, module in built.named_modules()}
    experts = {name: built.get_submodule(name) for name in blocks}
    calls, top_ks = _run(built, blocks, config.model_type)
    text = config.get_text_config()
    # As the paged cache has it: many families give attention a mask alone.
    windowed = group_layers_by_attn_type(text).get("sliding_attention", [])
    return _Counted(built, blocks, experts, calls, names).shape(
        name=model_dir.resolve().name,
        family=config.model_type,
        top_k=max(top_ks),
        item_nbytes=item_nbytes or built.dtype.itemsize,
        positions=num_positions(config),
        sliding_window=text.sliding_window if windowed else None,
        num_full_layers=len(calls) - len(windowed),
    )


class _Call:
    """What a layer's attention was given."""

    def __init__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.module = module
        self.heads, self.key_dim, self.value_dim = query.shape[1], query.shape[3], value.shape[3]
        self.cached = key.shape[1] * (key.shape[3] + value.shape[3])


class _Notes(nn.Module):
    """In the place of experts: notes how many of them a token has."""

    def __init__(self, top_ks: list[int]) -> None:
        super().__init__()
        self._top_ks = top_ks

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        self._top_ks.append(experts.shape[-1])
        return torch.zeros_like(hidden)


def _run(model: Any, blocks: dict[str, Block], family: str) -> tuple[list[_Call], list[int]]:
    """Run a model on the meta device, whose experts it loses; return its calls of attention, and experts of a token."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls: list[_Call] = []
    top_ks: list[int] = []

    def note(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(_Call(module, query, key, value))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    for name in blocks:
        owner, _, child = name.rpartition(".")
        setattr(model.get_submodule(owner), child, _Notes(top_ks))
    ALL_ATTENTION_FUNCTIONS[_NOTES] = note
    try:
        model.set_attn_implementation(_NOTES)
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device="meta"), use_cache=False)
    except Exception as error:  # foreign code may raise anything
        why = (str(error).splitlines() or [""])[0]
        raise PlanError(
            f"a {family} model does not run without numbers, so its sizes cannot be counted ({type(error).__name__}:"
            f" {why}); give an InferenceShape to laconic.cost.infer.choose"
        ) from error
    finally:
        del ALL_ATTENTION_FUNCTIONS[_NOTES]
    if not calls or not top_ks:
        raise PlanError(
            f"a {family} model calls {'no experts' if calls else 'no attention'}, so nothing can be counted"
        )
    return calls, top_ks


class _Counted:
    def __init__(
        self, model: Any, blocks: dict[str, Block], experts: dict[str, Any], calls: list[_Call], names: dict[int, str]
    ) -> None:
        self.model, self.blocks, self.experts, self.calls, self.names = model, blocks, experts, calls, names

    def shape(self, **known: Any) -> InferenceShape:
        calls, vocabulary = self.calls, self.model.get_input_embeddings().weight
        hidden, layers = vocabulary.shape[1], len(calls)
        attention: list[list[int]] = []
        shared: list[list[int]] = []
        dense: list[list[int]] = []
        routers = [block.router for block in self.blocks.values() if block.router is not None]
        for call in calls:
            own = self.names[id(call.module)]
            layer = _layer_of(own)
            has_experts = any(name.startswith(f"{layer}.") for name in self.blocks)
            attention.append(list(_matrices(call.module)))
            beside = [
                matrix
                for name, module in self.model.get_submodule(layer).named_modules(prefix=layer)
                if not any(f"{name}.".startswith(f"{counted}.") for counted in (own, *routers))
                for matrix in _matrices(module, recurse=False)
            ]
            (shared if has_experts else dense).append(beside)
        each = [self._expert(module, hidden) for module in self.experts.values()]
        shape = InferenceShape(
            **known,
            hidden_size=hidden,
            num_layers=layers,
            num_dense_layers=len(dense),
            num_heads=max(call.heads for call in calls),
            key_dim=max(call.key_dim for call in calls),
            value_dim=max(call.value_dim for call in calls),
            attention_parameters=_mean([sum(of) for of in attention]),
            attention_products=max(1, _mean([len(of) for of in attention])),
            cache_values=max(call.cached for call in calls),
            num_experts=max(block.num_experts for block in self.blocks.values()),
            expert_hidden=max(1, max(width for width, _ in each)),
            expert_biases=max(left for _, left in each),
            shared_hidden=_mean([sum(of) for of in shared]) // (3 * hidden),
            shared_products=max(map(len, shared), default=0) or 3,
            dense_hidden=_mean([sum(of) for of in dense]) // (3 * hidden),
            vocab_size=vocabulary.shape[0],
            tied=self.model.get_output_embeddings().weight is vocabulary,
        )
        # What is left, so that the sum is that of the model.
        total = sum(p.numel() for p in self.model.parameters())
        return replace(shape, small_parameters=total - shape.attention_worker_parameters)

    @staticmethod
    def _expert(module: Any, hidden: int) -> tuple[int, int]:
        """Width of an expert with three products, and its parameters beside them."""
        parameters = list(module.parameters())
        matrices = sum(p.numel() // len(p) for p in parameters if p.dim() == 3)
        width = matrices // (3 * hidden)
        return width, sum(p.numel() // len(p) for p in parameters) - 3 * hidden * width


def _layer_of(name: str) -> str:
    """The layer of a module, which has a number: model.layers.3 of model.layers.3.self_attn."""
    parts = name.split(".")
    last = max((place for place, part in enumerate(parts) if part.isdigit()), default=len(parts) - 2)
    return ".".join(parts[: last + 1])


def _matrices(module: nn.Module, recurse: bool = True) -> Iterator[int]:
    """Values of each matrix of a product; a vector in two dimensions, such as a gate, is none."""
    yield from (p.numel() for p in module.parameters(recurse) if p.dim() == 2 and min(p.shape) > 1)


def _mean(numbers: list[int]) -> int:
    return sum(numbers) // len(numbers) if numbers else 0
