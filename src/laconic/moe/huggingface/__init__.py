"""Mixture-of-experts models of Hugging Face transformers on laconic's layers."""

from __future__ import annotations

from laconic.moe.huggingface.apply import Parallelized, parallelize
from laconic.moe.huggingface.blocks import Block, find_blocks
from laconic.moe.huggingface.checkpoint import load_sharded, save_sharded
from laconic.moe.huggingface.experts import FusedExperts
from laconic.moe.huggingface.gate import GivenRouting
from laconic.moe.huggingface.layer import ExpertsLayer
from laconic.moe.huggingface.pretrained import Loaded, from_pretrained, load_pretrained
from laconic.moe.huggingface.saving import gathered_state_dict

__all__ = [
    "parallelize",
    "Parallelized",
    "ExpertsLayer",
    "Block",
    "find_blocks",
    "GivenRouting",
    "FusedExperts",
    "gathered_state_dict",
    "save_sharded",
    "load_sharded",
    "from_pretrained",
    "load_pretrained",
    "Loaded",
]
