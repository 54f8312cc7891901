"""A tiny model folder with a tokenizer, and instructions, as fine-tuning takes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LINES = [
    {"messages": [{"role": "user", "content": f"{a} plus {b}?"}, {"role": "assistant", "content": str(a + b)}]}
    for a in (1, 20, 3000)
    for b in range(4)
]
"""Twelve conversations of several lengths."""


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Bytes as characters, the roles of `template` and the end of a message; no token for padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({character: index for index, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    fast.chat_template = template
    fast.save_pretrained(folder)


def write_model(folder: Path, tied: bool = True, seed: int = 0, template: str | None = TEMPLATE) -> Path:
    """A Llama of two layers with random weights, and `write_tokenizer`'s tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=260,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, template)
    return folder


def write_lines(path: Path, lines: Iterable[Any] = LINES) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
