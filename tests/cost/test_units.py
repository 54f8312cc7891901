"""Predicted bytes are those that autograd keeps, unit by unit, for every family and precision."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from torch import nn

import laconic
from laconic.activations import SavedTensorTracker, find_sites
from laconic.activations.keep.kept import pack
from laconic.cost import Batch, Choice, Job, Layout, ModelShape, Settings, predict
from laconic.cost.memory.families import FAMILIES
from laconic.cost.memory.saved_tensors import CODE_BITS, EXACT, PRECISIONS, Unit, head_unit, layer_units
from laconic.errors import PlanError
from laconic.formats import BlockFormat
from laconic.train.memory.check import choices_of
from tests.activations.models import make_ids, make_model
from tests.grid import few, grid

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "bf16-pure": torch.bfloat16}
BATCH = Batch(2, 96)


_TWO = ["sliding_attention", "full_attention"]
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16}
_VARIANTS: list[tuple[str, dict[str, object]]] = [
    *((family, {}) for family in FAMILIES if family not in ("mixtral", "gemma3_text")),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("gemma3_text", _GEMMA),
    # What configurations can say besides.
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "num_key_value_heads": 1}),
    ("granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.3, "logits_scaling": 4.0, "mlp_bias": True}),
    ("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 32}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    ("gemma3_text", {**_GEMMA, "sliding_window": 32, "layer_types": _TWO, "final_logit_softcapping": 30.0}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0}),
    ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 32}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 32, "attention_bias": True}),
    ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 40}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("mistral", {"sliding_window": 32}),
    ("olmo2", {"attention_bias": True}),
]
"""Families, and models of them whose configurations change what is kept."""

VARIANTS = [pytest.param(family, over, id=f"{family}-{'-'.join(over) or 'plain'}") for family, over in _VARIANTS]


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
    owner |= {f"{site}.{act}": owner[site] for site in list(owner) for act in ("act_fn", "activation_fn", "act")}
    counted: Counter[str] = Counter()
    for name, nbytes in tracker.by_module.items():
        counted[owner.get(name, name)] += nbytes
    return counted


@pytest.mark.parametrize(
    ("family", "overrides", "precision"), grid(few(VARIANTS, 10, pytest.mark.ci), list(PRECISIONS), strength=1)
)
def test_bytes_are_exact_to_the_byte(family: str, overrides: dict[str, object], precision: str) -> None:
    model = make_model(family, **overrides).train().to(TORCH_DTYPES[precision])
    shape = ModelShape.from_config(model.config.to_dict())  # type: ignore[operator, union-attr]
    job = Job(shape, BATCH, settings=Settings(precision=precision))  # type: ignore[arg-type]
    units = units_of(shape, precision)
    first = f"{shape.layer_name(0)}.{shape.traits.names.attention}"
    for bits in (16, 4):
        if bits < 16:
            laconic.compress_activations(model, bits=bits, attention="exact")
        choices = {u.name: Choice.from_bits(max(bits, u.minimum_bits)) for u in units if u.kind != "attention"}
        counted = measured(model, precision, units)
        prediction = predict(job, choices)
        # The first attention module of each kind is booked with the tables it shares with others.
        rotary = prediction.saved_nbytes["(attention of stage 0)"]
        if shape.traits.layer_rotary and len(set(map(shape.window_of, range(2)))) == 2:
            counted[first] -= rotary // 2
            counted[first.replace(".0.", ".1.")] -= rotary // 2
        else:
            counted[first] -= rotary
        for unit in units:
            assert counted.pop(unit.name, 0) == prediction.saved_nbytes.get(unit.name, 0), (bits, unit.name)
        (embedding,) = {"model.embed_tokens", "gpt_neox.embed_in"} & set(counted)
        left = {embedding: 8 * BATCH.tokens, "": sum(counted.values()) - 8 * BATCH.tokens}
        assert {name: n for name, n in counted.items() if n} == left
        fixed = {name: n for name, n in prediction.saved_nbytes.items() if name.startswith("(")}
        assert sum(fixed.values()) == rotary + sum(left.values())


@pytest.mark.parametrize(
    ("family", "precision", "bits"),
    grid(["llama", "gemma2", "granite", "gpt_neox", "stablelm"], list(PRECISIONS), [16, 4], strength=1),
)
def test_a_chunked_loss_is_predicted_to_the_byte(family: str, precision: str, bits: int) -> None:
    model = make_model(family).to(TORCH_DTYPES[precision])
    shape = ModelShape.from_config(model.config.to_dict())  # type: ignore[operator, union-attr]
    laconic.compress_activations(model, bits=bits, attention="exact", loss="chunked")
    job = Job(shape, BATCH, settings=Settings(precision=precision, loss="chunked"))  # type: ignore[arg-type]
    assert sum(measured(model, precision, []).values()) == predict(job, choices_of(job, bits)).saved_total_nbytes


@pytest.mark.parametrize(
    ("family", "overrides", "code", "precision"),
    grid(
        few(VARIANTS, 10, pytest.mark.ci),
        [pytest.param(*p) for p in (("int8", "fp32"), ("nf4", "bf16"), ("int8", "bf16-pure"))],
        strength=1,
    ),
)
def test_packed_attention_is_predicted_to_the_byte(
    family: str, overrides: dict[str, object], code: str, precision: str
) -> None:
    model = make_model(family, **overrides).train().to(TORCH_DTYPES[precision])
    shape = ModelShape.from_config(model.config.to_dict())  # type: ignore[operator, union-attr]
    laconic.compress_activations(model, bits=4, attention=code)
    job = Job(shape, BATCH, settings=Settings(precision=precision))  # type: ignore[arg-type]
    predicted = predict(job, choices_of(job, 4, attention=code)).saved_total_nbytes
    assert sum(measured(model, precision, []).values()) == predicted


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_parameters_and_sites_are_those_of_the_model(family: str, overrides: dict[str, object]) -> None:
    for tied in (False, True):
        model = make_model(family, tie_word_embeddings=tied, **overrides)
        shape = ModelShape.from_config(model.config.to_dict())  # type: ignore[operator, union-attr]
        assert shape.num_parameters == sum(p.numel() for p in model.parameters())
        memory = predict(Job(shape, BATCH)).ranks[0]
        assert memory.parameters_nbytes == 4 * shape.num_parameters
        assert memory.optimizer_nbytes == 8 * shape.num_parameters
    ours = {site for unit in units_of(shape, "fp32") for site in unit.sites}
    # Dropout, which is none of the planner's, keeps a bit per value.
    assert {site.name for site in find_sites(model) if site.kind != "dropout"} <= ours
    assert ours <= set(dict(model.named_modules()))


@pytest.mark.parametrize("code", CODE_BITS)
@pytest.mark.parametrize("length", [1, 7, 16, 57, 64, 65, 96, 127, 300])
def test_packed_bytes_are_those_that_are_kept(code: str, length: int) -> None:
    format = BlockFormat(code, 64)
    kept = pack(torch.randn(9, length), format, "linear")
    assert kept.bits == CODE_BITS[code]
    assert Choice(code).packed_nbytes(9, length) == sum(tensor.nbytes for tensor in kept.tensors)


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
        ({"model_type": None}, r"model_type is missing in the model's configuration"),
        ({"hidden_act": "relu2"}, r"hidden_act is 'relu2' in the model's configuration, but it must be one of silu"),
        ({"attention_dropout": 0.1}, r"attention_dropout is 0.1 .* what dropout keeps is not predicted"),
        ({"quantization_config": {"bits": 4}}, r"weights must be unquantized"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention", "mamba"]},
            r"names mamba",
        ),
        ({"text_config": {"model_type": "llama"}}, r"to plan that alone, give --family llama"),
        (
            {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 1},
            r"experts_per_token is 2, but the model has 1 experts",
        ),
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


FOREIGN: list[tuple[str, dict[str, object], str]] = [
    ("mixtral", {}, r"one of 'mixtral', which the planner knows; leave --family out"),
    ("gpt_neox", {}, r"one of 'gpt_neox', which the planner knows"),
    ("gemma3_text", {}, r"one of 'gemma3_text', which the planner knows"),
    ("cohere", {}, r"no rms_norm_eps, .*layer_norm_eps = 1e-05.*, which layers of llama do not have"),
    ("olmoe", {}, r"num_experts = 64"),
    ("deepseek_v3", {}, r"kv_lora_rank = 512|q_lora_rank = 1536"),
    ("nemotron", {}, r"no rms_norm_eps"),
    ("mamba", {}, r"state_size = 16"),
]


@pytest.mark.parametrize(("name", "overrides", "message"), FOREIGN, ids=[name for name, *_ in FOREIGN])
def test_a_family_that_a_model_is_not_is_refused_by_name(name: str, overrides: dict[str, object], message: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **overrides).to_dict()
    with pytest.raises(PlanError, match=message):
        ModelShape.from_config(config, "llama")


def test_a_model_built_like_a_family_is_planned_as_one() -> None:
    config = make_model("llama").config.to_dict()  # type: ignore[operator, union-attr]
    expected = ModelShape.from_config(config)
    assert ModelShape.from_config({**config, "model_type": "my_llama", "rope_factor": None}, "llama") == expected
    with pytest.raises(PlanError, match=r"my_depth_scale = 0.5, which layers of llama do not have"):
        ModelShape.from_config({**config, "model_type": "my_llama", "my_depth_scale": 0.5}, "llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_mean_what_transformers_takes_them_for(family: str) -> None:
    from transformers import CONFIG_MAPPING

    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 32}
    config = CONFIG_MAPPING[family](**sizes, vocab_size=50).to_dict()
    given = {"model_type": family, **sizes, "vocab_size": 50}
    assert ModelShape.from_config(given) == ModelShape.from_config(config)


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
