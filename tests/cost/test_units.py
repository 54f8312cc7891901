"""Predicted bytes are those that autograd keeps, unit by unit, for every family and precision."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from torch import nn

import laconic
from laconic.activations import SavedTensorTracker, find_sites
from laconic.cost import Batch, Choice, Job, Layout, ModelShape, Settings, predict
from laconic.cost.model_shape import FAMILIES
from laconic.cost.units import CODE_BITS, EXACT, PRECISIONS, Unit, head_unit, layer_units
from laconic.errors import PlanError
from laconic.formats import BlockFormat
from laconic.train.memory import choices_of
from tests.activations.models import make_ids, make_model

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "bf16-pure": torch.bfloat16}
BATCH = Batch(2, 96)


def units_of(shape: ModelShape, precision: str, batch: Batch = BATCH) -> list[Unit]:
    exact = PRECISIONS[precision]
    inner = [unit for layer in range(shape.num_layers) for unit in layer_units(shape, layer, batch, exact)]
    return [*inner, head_unit(shape, batch, exact)]


def measured(model: nn.Module, precision: str, units: list[Unit], batch: Batch = BATCH) -> Counter[str]:
    """Bytes that one forward keeps, by unit; what belongs to none is booked under its module."""
    ids = make_ids(batch.sequences, batch.sequence_length)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), SavedTensorTracker(model) as tracker:
        model(input_ids=ids, labels=ids, use_cache=False)
    owner = {site: unit.name for unit in units for site in unit.sites}
    owner |= {f"{unit.name}.{act}": unit.name for unit in units for act in ("act_fn", "activation_fn")}
    counted: Counter[str] = Counter()
    for name, nbytes in tracker.by_module.items():
        counted[owner.get(name, name)] += nbytes
    return counted


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_exact_to_the_byte(family: str, precision: str) -> None:
    model = make_model(family).to(TORCH_DTYPES[precision])
    shape = ModelShape.from_config(model.config.to_dict())  # type: ignore[operator, union-attr]
    job = Job(shape, BATCH, settings=Settings(precision=precision))  # type: ignore[arg-type]
    units = units_of(shape, precision)
    for bits in (16, 4):
        if bits < 16:
            laconic.compress_activations(model, bits=bits, attention="exact")
        choices = {u.name: Choice.from_bits(max(bits, u.minimum_bits)) for u in units if u.kind != "attention"}
        counted = measured(model, precision, units)
        prediction = predict(job, choices)
        rotary = (
            2 * BATCH.sequence_length * shape.head_dim * (4 if precision != "bf16-pure" or family == "olmo2" else 2)
        )
        counted["model.layers.0.self_attn"] -= rotary  # the first attention module is booked with the shared tables
        for unit in units:
            assert counted.pop(unit.name, 0) == prediction.saved_nbytes.get(unit.name, 0), (bits, unit.name)
        left = {"model.embed_tokens": 8 * BATCH.tokens, "": sum(counted.values()) - 8 * BATCH.tokens}
        assert {name: n for name, n in counted.items() if n} == left
        fixed = {name: n for name, n in prediction.saved_nbytes.items() if name.startswith("(")}
        assert sum(fixed.values()) == rotary + sum(left.values())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("bits", [16, 4])
def test_a_chunked_loss_is_predicted_to_the_byte(family: str, precision: str, bits: int) -> None:
    model = make_model(family).to(TORCH_DTYPES[precision])
    shape = ModelShape.from_config(model.config.to_dict())  # type: ignore[operator, union-attr]
    laconic.compress_activations(model, bits=bits, attention="exact", loss="chunked")
    job = Job(shape, BATCH, settings=Settings(precision=precision, loss="chunked"))  # type: ignore[arg-type]
    assert sum(measured(model, precision, []).values()) == predict(job, choices_of(job, bits)).saved_total_nbytes


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("code", ["int8", "nf4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_attention_is_predicted_to_the_byte(family: str, code: str, precision: str) -> None:
    model = make_model(family).to(TORCH_DTYPES[precision])
    shape = ModelShape.from_config(model.config.to_dict())  # type: ignore[operator, union-attr]
    laconic.compress_activations(model, bits=4, attention=code)
    job = Job(shape, BATCH, settings=Settings(precision=precision))  # type: ignore[arg-type]
    predicted = predict(job, choices_of(job, 4, attention=code)).saved_total_nbytes
    assert sum(measured(model, precision, []).values()) == predicted


def test_a_sliding_window_costs_repeated_keys_and_a_mask() -> None:
    for precision in ("fp32", "bf16"):
        model = make_model("mistral", sliding_window=32)
        shape = ModelShape.from_config(model.config.to_dict())  # type: ignore[operator, union-attr]
        counted = measured(model, precision, units_of(shape, precision))
        prediction = predict(Job(shape, BATCH, settings=Settings(precision=precision)))  # type: ignore[arg-type]
        assert sum(counted.values()) == prediction.saved_total_nbytes


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_sites_are_those_of_the_model(family: str) -> None:
    for tied in (False, True):
        model = make_model(family, tie_word_embeddings=tied)
        shape = ModelShape.from_config(model.config.to_dict())  # type: ignore[operator, union-attr]
        assert shape.num_parameters == sum(p.numel() for p in model.parameters())
        memory = predict(Job(shape, BATCH)).ranks[0]
        assert memory.parameters_nbytes == 4 * shape.num_parameters
        assert memory.optimizer_nbytes == 8 * shape.num_parameters
    ours = {site for unit in units_of(shape, "fp32") for site in unit.sites}
    assert {site.name for site in find_sites(model)} <= ours
    assert ours <= set(dict(model.named_modules()))


@pytest.mark.parametrize("code", CODE_BITS)
@pytest.mark.parametrize("length", [1, 7, 64, 65, 300])
def test_packed_bytes_are_those_of_the_format(code: str, length: int) -> None:
    format = BlockFormat(code, 64)
    assert Choice(code).packed_nbytes(3, length) == format.nbytes((3, length))
    assert format.bits == CODE_BITS[code]


def test_choices_go_through_json() -> None:
    for choice in (EXACT, Choice("nf4"), Choice("int8", 32, "float32", offload=True), Choice(recompute=True)):
        assert Choice.from_json(choice.to_json()) == choice
    for entry in ("nf4", {"code": "fp3"}, {"bits": 4}, {"code": "nf4", "scale_dtype": "int8"}):
        with pytest.raises(PlanError):
            Choice.from_json(entry)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, r"model_type is 'mamba', but the planner knows llama, mistral"),
        ({"hidden_size": None}, r"hidden_size is None in the model's configuration"),
        ({"num_key_value_heads": 3}, r"num_kv_heads is 3, but it must divide num_heads \(4\)"),
        ({"num_hidden_layers": 0}, r"num_layers is 0, but it must be at least 1"),
    ],
)
def test_sizes_that_make_no_model_are_refused(change: dict[str, object], message: str) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 97,
    }
    assert ModelShape.from_config(config).num_kv_heads == 4
    with pytest.raises(PlanError, match=message):
        ModelShape.from_config({**config, **change})


def test_a_configuration_is_read_from_a_directory(tmp_path: object) -> None:
    from pathlib import Path

    directory = Path(str(tmp_path))
    with pytest.raises(PlanError, match=r"must be a directory with a config.json"):
        ModelShape.load(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(PlanError, match=r"is not JSON"):
        ModelShape.load(directory)
    (directory / "config.json").write_text("[]")
    with pytest.raises(PlanError, match=r"holds a list"):
        ModelShape.load(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_model("qwen3").config.save_pretrained(directory)  # type: ignore[operator, union-attr]
    assert ModelShape.load(directory).family == "qwen3"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(data_parallel=0), r"data_parallel is 0"),
        (lambda: Layout(stages=2, split=(1, 2, 3)), r"split is \[1, 2, 3\], but it must give each of 2 chunks"),
        (lambda: Settings(gradient_bits=4), r"gradient_bits is 4, but it must be one of 8, 12, 16, 32"),
        (lambda: Batch(0, 4), r"sequences is 0"),
    ],
)
def test_layouts_that_cannot_be_are_refused(make: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()  # type: ignore[operator]
