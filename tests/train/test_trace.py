"""What steps without numbers tell of a model is what a real step keeps, of families of all kinds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.activations import ActivationPlan, SavedTensorTracker
from laconic.cli.main import main
from laconic.cost import Batch, Choice, Job, Layout, Settings, Unit, load_plan, predict
from laconic.cost.memory.saved_tensors import EXACT, PRECISIONS
from laconic.cost.memory.traced import TracedModel
from laconic.cost.planner.policy import by_bits, choose
from laconic.errors import ConfigError, ModelError, PlanError
from laconic.train.memory import fake_runs
from laconic.train.memory.directory import build_meta, config_as, made_up_batches, usual_loss
from laconic.train.memory.step_peak import peak_nbytes
from laconic.train.memory.trace import trace_config, trace_model, traced_job

pytest.importorskip("transformers")
import transformers

from benchmarks import family_models
from benchmarks.family_models import Family, families, inputs_of, model_of
from tests.activations.models import make_model
from tests.cost.shapes import Sizes, traced_llama
from tests.distributed.test_moe_huggingface import llama4
from tests.distributed.test_moe_layouts import own_layout

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of while a family is built

BATCH = Batch(2, 32)
SIZES: dict[str, Any] = {"hidden_size": 64, "vocab_size": 97, "num_attention_heads": 4, "num_hidden_layers": 5}
MIXTURE = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 48}
MIXTURE |= {"num_experts": 4, "num_experts_per_tok": 2}


def directory(tmp_path: Path, name: str, **fields: Any) -> str:
    transformers.AutoConfig.for_model(name, **fields).save_pretrained(tmp_path)
    return str(tmp_path)


def mixture(tmp_path: Path, **fields: Any) -> str:
    return directory(tmp_path, "qwen3_moe", **{**MIXTURE, **fields})


def real_model(path: str) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(path)
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).train()
    return model


def saved_nbytes(model: nn.Module, inputs: Any, precision: str = "fp32") -> int:
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with autocast, SavedTensorTracker(model) as tracker:
        usual_loss(model(**inputs))
    return tracker.nbytes


def at_four_bits(job: Job) -> dict[str, Choice]:
    """What `compress_activations(model, 4)` chooses."""
    eight = ("attention", "head")
    return {u.name: Choice("int8" if u.kind in eight else "nf4") for stage in job.stages() for u in stage.units()}


def compare(family: Family, precision: str) -> dict[str, float]:
    """Predicted over measured bytes, exact and at four bits; and parameters."""
    model, like = model_of(family), model_of(family)
    inputs = inputs_of(family, model)
    if precision == "bf16-pure":
        model = model.to(torch.bfloat16)
        inputs = {k: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in inputs.items()}

    def fake_inputs(_: nn.Module) -> dict[str, Any]:
        return {name: torch.empty_like(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}

    config = model.config.to_dict()  # type: ignore[operator, union-attr]
    traced = trace_model(like, fake_inputs, BATCH, PRECISIONS[precision], config)
    job = Job(traced, BATCH, settings=Settings(precision=precision))  # type: ignore[arg-type]
    found = {"exact": predict(job).saved_total_nbytes / saved_nbytes(model, inputs, precision)}
    laconic.compress_activations(model, 4, example_inputs=inputs)
    found["4 bits"] = predict(job, at_four_bits(job)).saved_total_nbytes / saved_nbytes(model, inputs, precision)
    found["parameters"] = traced.num_parameters / sum(p.numel() for p in model.parameters())
    return found


@pytest.fixture
def five_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have more layers than run in a trace."""
    more = {k: 5 for k, v in family_models._SIZES.items() if v == family_models.LAYERS and "layer" in k}
    monkeypatch.setattr(family_models, "_SIZES", family_models._SIZES | more)


# Decoders, mixtures, encoders, encoder-decoders, state spaces, images.
WIDE = """
    llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 olmo olmo2 granite starcoder2 stablelm gpt_neox gpt2
    opt bloom cohere glm nemotron helium smollm3 falcon mixtral qwen2_moe olmoe gpt_oss granitemoe deepseek_v2 phimoe
    ernie4_5_moe hunyuan_v1_moe bert roberta electra distilbert xlm-roberta modernbert t5 mamba
    mamba2 resnet convnext deit dinov2 swin beit
"""


@pytest.mark.parametrize(
    ("name", "precision"),
    [pytest.param(name, "fp32", marks=pytest.mark.ci) for name in ("qwen3_moe", "vit")]
    + [pytest.param(name, "fp32", marks=pytest.mark.slow) for name in WIDE.split()]
    + [pytest.param(name, "bf16", marks=pytest.mark.slow) for name in ("llama", "qwen3_moe", "gpt_oss", "bert", "vit")]
    + [pytest.param("deepseek_v3", "bf16-pure", marks=pytest.mark.slow)],
)
@pytest.mark.usefixtures("five_layers")
def test_predicted_bytes_are_those_that_a_step_keeps(name: str, precision: str) -> None:
    (family,) = [family for family in families() if family.name == name]
    found = compare(family, precision)
    assert found["parameters"] == 1
    assert found == pytest.approx(dict.fromkeys(found, 1), abs=0.03), found


@pytest.mark.parametrize(
    ("name", "precision"),
    [("llama", "fp32")]
    + [pytest.param(name, "bf16", marks=pytest.mark.slow) for name in ("qwen3", "gpt2", "qwen3_moe", "bert", "vit")],
)
def test_a_model_of_one_layer_is_predicted_too(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {k: 1 for k, v in family_models._SIZES.items() if v == family_models.LAYERS and "layer" in k}
    monkeypatch.setattr(family_models, "_SIZES", family_models._SIZES | one)
    (family,) = [family for family in families() if family.name == name]
    found = compare(family, precision)
    assert found["parameters"] == 1
    assert found == pytest.approx(dict.fromkeys(found, 1), abs=0.03), found


@pytest.mark.slow
def test_losses_of_routers_count(tmp_path: Path) -> None:
    totals = {}
    for wanted in (False, True):
        path = mixture(tmp_path, output_router_logits=wanted, num_hidden_layers=2)
        traced = trace_config(path, BATCH, PRECISIONS["fp32"])
        model = real_model(path)
        inputs = made_up_batches(model, BATCH.sequence_length)(BATCH.sequences)
        totals[wanted] = predict(Job(traced, BATCH, settings=Settings(precision="fp32"))).saved_total_nbytes
        assert totals[wanted] == saved_nbytes(model, inputs)
    assert totals[True] > totals[False]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 4])
def test_the_peak_of_a_step_is_predicted(tmp_path: Path, bits: int) -> None:
    path = mixture(tmp_path, hidden_size=128, head_dim=32)
    batch = Batch(4, 128)
    job = Job(
        trace_config(path, batch, PRECISIONS["fp32"]),
        batch,
        Layout(micro_batches=2),
        Settings(precision="fp32"),
    )
    model = real_model(path)
    if bits < 16:
        laconic.compress_activations(model, bits)
    inputs = made_up_batches(model, batch.sequence_length)(batch.sequences)
    model(**inputs).loss.backward()
    measured = peak_nbytes(lambda: model(**inputs).loss.backward(), torch.device("cpu"))
    kinds = predict(job, {} if bits == 16 else at_four_bits(job)).ranks[0].kinds
    assert kinds["activations"] + kinds["logits"] + kinds["workspace"] == pytest.approx(measured, rel=0.05)


@pytest.mark.ci
def test_expert_parallelism_cuts_experts_and_nothing_else(tmp_path: Path) -> None:
    path = mixture(tmp_path)
    traced = {n: trace_config(path, BATCH, PRECISIONS["fp32"], expert_parallel=n) for n in (1, 2, 4)}
    whole, shared, sharded = (
        predict(Job(traced[layout.expert_parallel], BATCH, layout, Settings(precision="fp32"))).ranks[0]
        for layout in (
            Layout(data_parallel=4),
            Layout(data_parallel=4, expert_parallel=4),
            Layout(data_parallel=4, expert_parallel=2, sharded=True),
        )
    )
    experts = 5 * 4 * (64 * 2 * 48 + 48 * 64)
    assert traced[1].num_parameters == traced[2].num_parameters == traced[4].num_parameters > experts
    for kind in ("parameters_nbytes", "gradients_nbytes", "optimizer_nbytes"):
        share = 2 if kind.startswith("optimizer") else 1
        assert getattr(whole, kind) - getattr(shared, kind) == 4 * share * experts * 3 // 4
        assert getattr(sharded, kind) < getattr(shared, kind)
    # Rows are taken to be balanced, and the layers of parallelize keep no more than the model's own.
    assert 0.9 < shared.activations_nbytes["norm"] / whole.activations_nbytes["norm"] <= 1
    with pytest.raises(PlanError, match=r"expert_parallel is 3, but it must divide data_parallel \(4\)"):
        Layout(data_parallel=4, expert_parallel=3)
    with pytest.raises(PlanError, match=r"expert_parallel is 8, but it must divide the 4 experts of model.layers.0"):
        Job(traced[1], BATCH, Layout(data_parallel=8, expert_parallel=8), Settings(precision="fp32"))
    with pytest.raises(PlanError, match=r"expert_parallel is 2, but the bytes of qwen3_moe were read for 1"):
        Job(traced[1], BATCH, Layout(data_parallel=4, expert_parallel=2), Settings(precision="fp32"))
    with pytest.raises(ModelError, match="expert_parallel is 2, but LlamaForCausalLM has no mixture-of-experts block"):
        traced_job(make_model("llama"), BATCH, Layout(data_parallel=2, expert_parallel=2))


@pytest.mark.ci
def test_experts_that_take_rows_are_cut_too() -> None:
    job = traced_job(llama4().float(), BATCH, Layout(data_parallel=2, expert_parallel=2), Settings(precision="fp32"))
    assert [count for count, _, _ in job.model.layer(0).experts] == [4, 4]
    assert predict(job).ranks[0].parameters_nbytes < 4 * job.model.num_parameters


@pytest.mark.ci
def test_a_mixture_is_planned_by_its_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("scipy")
    path, file = mixture(tmp_path / "model"), str(tmp_path / "plan.json")
    command = ["plan", path, "--sequence-length", "32", "--batch", "2", "--precision", "fp32", "--out", file]
    assert main([*command, "--memory", "4300KB", "--reserve", "0"]) == 0
    said = capsys.readouterr().out
    assert "qwen3_moe (Qwen3MoeForCausalLM): 5 layers, hidden 64, 4 experts" in said
    assert "2 samples per micro-batch: input_ids 2x32, labels 2x32" in said
    plan = load_plan(file)
    assert plan.to_dict() == load_plan(file).to_dict()
    assert {choice for choice in plan.choices.values()} - {EXACT}
    model = real_model(path)
    config = model.config.to_dict()  # type: ignore[operator, union-attr]
    plan.check(config, data_parallel=1, sequence_length=32)
    with pytest.raises(PlanError, match=r"for a model with num_experts_per_tok = 2, but this model has 1"):
        plan.check({**config, "num_experts_per_tok": 1})
    # The run that follows the plan keeps what was predicted.
    inputs = made_up_batches(model, 32)(2)
    laconic.compress_activations(model, plan=ActivationPlan.from_json(json.dumps(plan.activation_plan())))
    assert saved_nbytes(model, inputs) == pytest.approx(plan.prediction.saved_total_nbytes, rel=0.03)


@pytest.mark.ci
def test_a_plan_is_of_what_was_traced(tmp_path: Path) -> None:
    traced = trace_config(directory(tmp_path, "bert", **SIZES, intermediate_size=128), BATCH, PRECISIONS["fp32"])
    fp32 = Settings(precision="fp32")
    assert TracedModel.from_dict(json.loads(json.dumps(traced.to_dict()))).describe() == traced.describe()
    for setting in ([], None, 3):
        with pytest.raises(PlanError, match=r"the plan's model\.setting is .*, but it must be an object"):
            TracedModel.from_dict({**traced.to_dict(), "setting": setting})
    with pytest.raises(PlanError, match=r"sequence_length is 64, but the bytes of bert were read for 32"):
        Job(traced, Batch(2, 64), settings=fp32)
    with pytest.raises(
        PlanError, match=r"precision is \['bf16', 4\], but the bytes of bert were read for \['fp32', 4\]"
    ):
        Job(traced, BATCH)
    with pytest.raises(PlanError, match=r"stages are 2, but the layers of BertForMaskedLM are no single list"):
        Job(traced, BATCH, Layout(stages=2, micro_batches=4), fp32)


@pytest.mark.ci
def test_blocks_that_share_what_they_save_get_one_choice(tmp_path: Path) -> None:
    sizes = {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [2, 2], "layer_type": "basic"}
    batch, fp32 = Batch(16, 1), Settings(precision="fp32")
    traced = trace_config(directory(tmp_path, "resnet", **sizes), batch, PRECISIONS["fp32"], image_size=64)
    assert traced.shares
    job = Job(traced, batch, settings=fp32)
    exact, least = (by_bits(job, [bits] * 4).prediction.peak_nbytes for bits in (16, 4))
    chosen = choose(job, (exact + least) // 2)
    assert len(set(chosen.choices.values())) == 1
    assert least <= chosen.prediction.peak_nbytes <= (exact + least) // 2
    with pytest.raises(PlanError, match=f"the least that these choices can do with is {least:,} bytes"):
        choose(job, least - 1)


class Asks(nn.Module):
    """A layer whose forward depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum().item() > 0 else x  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Tied(nn.Module):
    """An embedding that is the output projection, too, and a block that adds tensors of the weight's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(16, 8), nn.Identity(), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = self.block(x + (x + x))
        return self.head(checkpoint(lambda x: (x + x) + x, x, use_reentrant=False))  # type: ignore[no-any-return]


def test_only_gradients_of_a_tied_weight_are_added_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    note = fake_runs._Recorder._note

    def noted(self: Any, storage: torch.UntypedStorage, nbytes: int) -> None:
        sizes.append((nbytes, storage.nbytes()))
        note(self, storage, nbytes)

    monkeypatch.setattr(fake_runs._Recorder, "_note", noted)
    for in_place in (False, True):
        runs = fake_runs.FakeRuns(Tied(), None)
        with runs.inside():
            runs.inputs = {"ids": torch.zeros(16, dtype=torch.long)}
        sizes.clear()
        runs.step(torch.sum, autocast=False, backward=True, adds_in_place=in_place)
        assert sum(nbytes < size for nbytes, size in sizes) == in_place


def test_experts_in_a_loop_are_refused_by_what_they_do() -> None:
    with pytest.raises(PlanError, match="the forward of DbrxForCausalLM depends on values"):
        traced_job(own_layout("dbrx").float(), Batch(2, 16), settings=Settings(device="cpu"))


def test_experts_that_so_many_processes_cannot_share_are_refused() -> None:
    layout = Layout(data_parallel=3, expert_parallel=3)
    with pytest.raises(ConfigError, match="ep is 3, but it must divide the 4 experts behind each other"):
        traced_job(own_layout("dbrx").float(), Batch(2, 16), layout, Settings(device="cpu"))


def test_what_cannot_be_traced_is_refused() -> None:
    def inputs(_: nn.Module) -> dict[str, Any]:
        return {"x": torch.empty(2, 8)}

    with pytest.raises(PlanError, match=r"the forward of Stack depends on values"):
        trace_model(Stack(Asks), inputs, BATCH, PRECISIONS["fp32"], {})
    with pytest.raises(PlanError, match=r"Linear has no layers in a list"):
        trace_model(nn.Linear(8, 8), inputs, BATCH, PRECISIONS["fp32"], {})


def test_a_chunked_loss_beside_a_models_own_cross_entropy_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    config.save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--sequence-length", "16", "--loss", "chunked"]) == 2
    assert "without self.loss_function, which cannot be followed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("precision", "loss"),
    [
        pytest.param("bf16", "exact", marks=pytest.mark.ci),
        *(pytest.param(p, x, marks=pytest.mark.slow) for p, x in (("fp32", "chunked"), ("bf16-pure", "exact"))),
    ],
)
def test_a_llama_keeps_what_closed_formulas_say(precision: Any, loss: Any) -> None:
    settings = Settings(precision=precision, loss=loss)
    traced = traced_job(make_model("llama", tie_word_embeddings=True), BATCH, settings=settings).model
    known = traced_llama(Sizes(64, 160, 2, 4, 2, 97, True, 16), BATCH, PRECISIONS[precision], loss)
    (found,), (expected,) = traced.layers, known.layers

    def facts(units: tuple[Unit, ...], codes: tuple[str, ...]) -> list[Any]:
        packed = [[u.nbytes(Choice(code)) for code in codes] for u in units]
        same = [replace(u, packed=(), num_elements=None, beside_nbytes=0) for u in units]
        return [same, packed]

    assert facts(found.units, ("int8", "int6", "int5", "nf4")) == facts(expected.units, ("int8", "int6", "int5", "nf4"))
    assert facts(traced.last_units, ("int8",)) == facts(known.last_units, ("int8",))
    for name in ("tensors", "experts", "flops", "shared_nbytes", "arguments_nbytes"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("names", "kinds", "first_tensors", "last_tensors", "tied_tensor", "first_nbytes", "last_nbytes"):
        assert getattr(traced, name) == getattr(known, name), name
    assert (traced.layer_input, traced.is_stack, traced.shares) == (known.layer_input, True, False)


def test_a_size_that_the_model_has_no_use_for_is_refused() -> None:
    sizes = {**SIZES, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    images = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=32))
    text = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
    with pytest.raises(PlanError, match="sequence_length is 64, but ViTForImageClassification takes images; leave it"):
        made_up_batches(images, 64)
    with pytest.raises(PlanError, match="image_size is 32, but BertForSequenceClassification takes tokens; leave it"):
        made_up_batches(text, 64, 32)
    assert made_up_batches(text, usual_length=16)(2)["input_ids"].shape == (2, 16)


def test_a_family_is_another_ones_only_where_its_fields_are(tmp_path: Path) -> None:
    fields = json.loads(make_model("llama").config.to_json_string())  # type: ignore[operator, union-attr]

    def read(**more: Any) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(more))
        return config_as(str(tmp_path), "llama")

    assert read(**{**fields, "model_type": "my_llama", "rope_factor": None}).hidden_size == 64
    assert read(model_type="my_images", text_config=fields, vision_config={"depth": 2}).hidden_size == 64
    with pytest.raises(ConfigError, match=r"my_depth_scale = 0.5, which models of llama do not have"):
        read(**{**fields, "model_type": "my_llama", "my_depth_scale": 0.5})
    with pytest.raises(ConfigError, match=r"the configuration is one of 'olmoe', which is known"):
        read(**{**fields, "model_type": "olmoe"})
    with pytest.raises(ConfigError, match=r"family is 'lama', but transformers has no such model_type; did you mean"):
        config_as(str(tmp_path), "lama")


def test_a_file_beside_the_config_of_another_model_is_the_one_that_is_read(tmp_path: Path) -> None:
    sizes = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"num_hidden_layers": 5}))
    (tmp_path / "small.json").write_text(json.dumps(sizes | {"num_hidden_layers": 2}))
    for name, num_layers in (("", 5), ("config.json", 5), ("small.json", 2)):
        assert build_meta(str(tmp_path / name)).config.num_hidden_layers == num_layers
