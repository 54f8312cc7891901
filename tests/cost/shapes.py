"""Sizes of published models."""

from __future__ import annotations

from laconic.cost import ModelShape

_SIZES = {  # hidden, intermediate, layers, heads, key/value heads, head dimension, vocabulary, tied
    "llama2-7b": (4096, 11008, 32, 32, 32, 128, 32000, False),
    "llama2-13b": (5120, 13824, 40, 40, 40, 128, 32000, False),
    "llama3-8b": (4096, 14336, 32, 32, 8, 128, 128256, False),
    "llama3.2-1b": (2048, 8192, 16, 32, 8, 64, 128256, True),
    "codellama-34b": (8192, 22016, 48, 64, 8, 128, 32000, False),
    "olmo-1b": (2048, 8192, 16, 16, 16, 128, 50304, True),
}


def shape_of(name: str, num_layers: int | None = None) -> ModelShape:
    """A published model, with another number of layers if asked for."""
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, tied = _SIZES[name]
    return ModelShape(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=num_layers or layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        tied=tied,
    )
