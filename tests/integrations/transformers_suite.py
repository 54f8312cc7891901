"""transformers' own common tests over small models of this file, unmodified and with compressed activations.

Needs transformers' folder of tests, which its source distribution has: `pip download --no-deps --no-binary :all:
transformers==VERSION`, unpack it, and name its folder `tests` in `FOLDER_VARIABLE`. What the distribution leaves out
(tests of generation and of exporting) is left out here too.
"""

from __future__ import annotations

import functools
import importlib
import io
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

import laconic
from laconic.errors import ModelError

FOLDER_VARIABLE = "LACONIC_TRANSFORMERS_TESTS"

_DECODER = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _DECODER | {"num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("LlamaConfig", _GROUPED, ("LlamaModel", "LlamaForCausalLM", "LlamaForSequenceClassification")),
    "qwen3": ("Qwen3Config", _GROUPED | {"head_dim": 8}, ("Qwen3Model", "Qwen3ForCausalLM")),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 64, "pad_token_id": 0}
        | {"bos_token_id": 1, "eos_token_id": 2},
        ("GPT2Model", "GPT2LMHeadModel", "GPT2ForSequenceClassification", "GPT2ForTokenClassification"),
    ),
    "bert": (
        "BertConfig",
        _DECODER | {"type_vocab_size": 4},
        ("BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForQuestionAnswering"),
    ),
    "t5": (
        "T5Config",
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
        | {"eos_token_id": 1, "decoder_start_token_id": 0},
        ("T5Model", "T5ForConditionalGeneration"),
    ),
    "mixtral": (
        "MixtralConfig",
        _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
        ("MixtralModel", "MixtralForCausalLM"),
    ),
}


class Tester:
    """What `ModelTesterMixin` asks of a model."""

    batch_size, seq_length, is_training = 3, 7, True

    def __init__(self, test: unittest.TestCase, name: str) -> None:
        self.parent = test
        config_name, self.options, _ = MODELS[name]
        self.config_class = getattr(transformers, config_name)
        config = self.get_config()
        self.hidden_size = config.hidden_size
        self.num_hidden_layers = config.num_hidden_layers
        self.num_attention_heads = config.num_attention_heads
        self.vocab_size = config.vocab_size
        self.encoder_seq_length = self.decoder_seq_length = self.key_length = self.seq_length

    def get_config(self) -> Any:
        return self.config_class(**self.options)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        config = self.get_config()
        shape = (self.batch_size, self.seq_length)
        ids = torch.randint(3, self.vocab_size, shape)
        inputs = {"input_ids": ids, "attention_mask": torch.ones(shape, dtype=torch.int64)}
        if config.is_encoder_decoder:
            inputs |= {"decoder_input_ids": ids.flip(0), "decoder_attention_mask": torch.ones(shape, dtype=torch.int64)}
        return config, inputs

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


def load_mixin(folder: Path) -> Any:
    """`ModelTesterMixin` of transformers' folder of tests."""
    package = "transformers_own_tests"
    if package not in sys.modules:
        root = types.ModuleType(package)
        root.__path__ = [str(folder)]
        sys.modules[package] = root
        for name, mixin in (
            ("exporters.test_export", "ExportTesterMixin"),
            ("generation.test_utils", "GenerationTesterMixin"),
        ):
            inner = types.ModuleType(f"{package}.{name.partition('.')[0]}")
            inner.__path__ = []
            stand_in = types.ModuleType(f"{package}.{name}")
            setattr(stand_in, mixin, type(mixin, (), {}))
            sys.modules |= {inner.__name__: inner, stand_in.__name__: stand_in}
    with mock.patch.object(pytest.mark, "_config", None):  # its markers are registered in a conftest.py of its own
        return importlib.import_module(f"{package}.test_modeling_common").ModelTesterMixin


def make_case(folder: Path, name: str) -> type[unittest.TestCase]:
    """The test case of a model in `MODELS`."""
    _, _, class_names = MODELS[name]

    def set_up(self: Any) -> None:
        self.model_tester = Tester(self, name)

    namespace = {
        "all_model_classes": tuple(getattr(transformers, class_name) for class_name in class_names),
        "is_encoder_decoder": name == "t5",
        "test_all_params_have_gradient": name != "mixtral",
        "setUp": set_up,
    }
    return type(f"Test{name.title()}", (load_mixin(folder), unittest.TestCase), namespace)


@contextmanager
def compressed(**options: Any) -> Iterator[None]:
    """Compress the activations of every Hugging Face model that is made inside."""
    depth = 0

    def compressing(make: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(make)
        def made(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            nonlocal depth
            depth += 1
            try:
                make(self, *args, **kwargs)
            finally:
                depth -= 1
            if depth == 0:
                with_sites(self)

        return made

    def with_sites(model: nn.Module) -> None:
        try:
            laconic.compress_activations(model, **options)
        except ModelError as error:
            if "no site recognized" not in str(error):
                raise

    kinds = [PreTrainedModel]
    for kind in kinds:
        kinds += [other for other in kind.__subclasses__() if other not in kinds]
    with _patched(kinds, compressing):
        yield


@contextmanager
def _patched(kinds: list[Any], wrap: Callable[[Any], Any]) -> Iterator[None]:
    own = [(kind, kind.__init__) for kind in kinds if "__init__" in vars(kind)]
    for kind, make in own:
        kind.__init__ = wrap(make)
    try:
        yield
    finally:
        for kind, make in own:
            kind.__init__ = make


def outcomes(case: type[unittest.TestCase], names: list[str] | None = None) -> dict[str, str]:
    """What became of each test: "" if it passed, else "skipped" or the traceback."""
    found: dict[str, str] = {}
    for name in names if names is not None else unittest.TestLoader().getTestCaseNames(case):
        result = unittest.TestResult()
        with mock.patch("sys.stdout", io.StringIO()):
            case(name).run(result)
        problems = [trace for _, trace in (*result.failures, *result.errors)]
        found[name] = problems[0] if problems else "skipped" if result.skipped else ""
    return found
