"""Multi-head latent attention on a paged cache."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn


def fit_latent_attention(model: Any) -> None:
    """Let the paged cache, which `Requests` makes, hold the rows of multi-head latent attention.

    The cache has one width for keys and values, and takes it, and their number of heads, from the configuration, whose
    `head_dim` counts the rotary part alone. Where attention functions fill the cache, they have keys and values, of
    which the keys are wider. From transformers 5.24 on the model's layers do, with the latents that both are made of,
    as one head. The model's modules have been built by then.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    text = model.config.get_text_config()
    if getattr(text, "kv_lora_rank", None) is None:
        return
    by_layers = "cache" not in inspect.signature(sdpa_attention_forward).parameters
    if by_layers and any(hasattr(module, "expand_kv") for module in model.modules()):
        text.head_dim, text.num_key_value_heads = max(text.kv_lora_rank, text.qk_rope_head_dim), 1
    else:
        text.head_dim = text.qk_nope_head_dim + text.qk_rope_head_dim


def widen_rows(cache: Any) -> None:
    """Let a paged cache take rows that are narrower than it is: zeros fill them, and are cut off what it returns."""
    update = cache.update

    def widened(key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        width = cache.layer_to_allocator[layer_idx].head_dim
        rows = (key_states, value_states)
        found = update(*(nn.functional.pad(each, (0, width - each.shape[-1])) for each in rows), layer_idx, kwargs)
        return tuple(whole[..., : each.shape[-1]].contiguous() for whole, each in zip(found, rows, strict=True))

    cache.update = widened
