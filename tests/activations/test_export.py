"""Exporters get a module's own code: programs with the bits of the unmodified model."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import laconic
from laconic.activations import SavedTensorTracker
from laconic.errors import ModelError
from tests.activations.models import make_ids, make_model
from tests.grid import covering, grid

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_graph_each")]


@pytest.fixture
def one_graph_each() -> Any:
    yield
    torch._dynamo.reset()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


class Fused(nn.Module):
    """Attention whose query, key and value are views with gaps of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out_of, self.body = nn.Linear(64, 192), nn.Linear(64, 64), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.into(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        y: Tensor = self.body(self.out_of(F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2)))
        return y


class Logits(nn.Module):
    """The part of a Hugging Face model's output that is a tensor."""

    def __init__(self, model: nn.Module, name: str, **named: Any) -> None:
        super().__init__()
        self.model, self.name, self.named = model, name, named

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(**{self.name: x}, **self.named)[0]
        return y


def _llama() -> nn.Module:
    return Logits(make_model("llama"), "input_ids", use_cache=False)


def _mixtral() -> nn.Module:
    return Logits(make_model("mixtral"), "input_ids", use_cache=False)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0)
    return Logits(T5ForConditionalGeneration(config), "input_ids", decoder_input_ids=make_ids(2, 8), use_cache=False)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    return Logits(ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **sizes)), "pixel_values")


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return Logits(ResNetForImageClassification(config), "pixel_values")


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (Mlp, lambda: torch.randn(4, 64)),
    "fused": (Fused, lambda: torch.randn(2, 8, 64)),
    "llama": (_llama, lambda: make_ids(2, 8)),
    "mixtral": (_mixtral, lambda: make_ids(2, 8)),
    "t5": (_t5, lambda: make_ids(2, 8)),
    "vit": (_vit, lambda: torch.randn(2, 3, 16, 16)),
    "resnet": (_resnet, lambda: torch.randn(2, 3, 16, 16)),
}


def _onnx(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    torch.onnx.export(model, (x,), dynamo=True)
    return model


EXPORTERS: dict[str, Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]] = {
    "export": lambda model, x: torch.export.export(model, (x,), strict=False).module(),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
    "trace": lambda model, x: torch.jit.trace(model, (x,), check_trace=False),
    "symbolic trace": lambda model, x: torch.fx.symbolic_trace(model),
    "make_fx": lambda model, x: make_fx(model)(x),
    "onnx": _onnx,
}
MODES = ("sites", "hooks", "combined")
STATES = ("eval", "train", "no gradients")


def compressed(name: str, mode: str, state: str) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    make, make_input = MODELS[name]
    model, x = make(), make_input()
    model.train(state != "eval")
    twin = copy.deepcopy(model)
    inner, key = (twin.model, twin.name) if isinstance(twin, Logits) else (twin, "x")
    named = {key: x, **(twin.named if isinstance(twin, Logits) else {})}
    laconic.compress_activations(inner, mode=mode, example_inputs=named)  # type: ignore[arg-type]
    return model, twin, x


def check(name: str, exporter: str, mode: str, state: str) -> bool:
    """Whether the exporter takes the model without us; then the program has the unmodified model's bits."""
    if exporter == "onnx" and importlib.util.find_spec("onnxscript") is None:
        return False
    model, twin, x = compressed(name, mode, state)
    with torch.set_grad_enabled(state != "no gradients"):
        try:
            EXPORTERS[exporter](copy.deepcopy(model), x)
        except Exception:
            return False
        torch._dynamo.reset()
        program = EXPORTERS[exporter](twin, x)
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        assert torch.equal(program(x), expected), (name, exporter, mode, state)
    return True


@pytest.mark.parametrize(("exporter", "mode", "state"), grid(list(EXPORTERS), MODES, STATES, strength=1))
def test_a_plain_model_is_exported_as_it_is(exporter: str, mode: str, state: str) -> None:
    if not check("mlp", exporter, mode, state):
        pytest.skip("fails without laconic")


def test_every_kind_of_site_is_exported_as_it_is() -> None:
    assert check("fused", "export", "sites", "train")
    assert check("vit", "trace", "combined", "train")
    assert check("vit", "make_fx", "hooks", "train")


OTHERS = sorted(set(MODELS) - {"mlp"})


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_model_is_exported_in_every_way(name: str) -> None:
    """Any two of model, exporter, mode and state meet."""
    axes = (OTHERS, list(EXPORTERS), MODES, STATES)
    rows = [row for row in sorted(covering([len(axis) for axis in axes], 2)) if OTHERS[row[0]] == name]
    assert any([check(*(axis[index] for axis, index in zip(axes, row, strict=True))) for row in rows])


def test_views_with_gaps_are_traced() -> None:
    for exporter in ("trace", "make_fx"):
        assert check("fused", exporter, "sites", "train")


def test_a_compressed_model_trains_on_after_it_was_exported() -> None:
    model, twin, x = compressed("mlp", "sites", "train")
    for exporter in ("export", "strict export", "trace"):
        EXPORTERS[exporter](twin, x)
    with SavedTensorTracker(model) as exact:
        model(x)
    with SavedTensorTracker(twin) as tracker:
        twin(x).sum().backward()
    assert tracker.nbytes < exact.nbytes


@pytest.mark.parametrize("exporter", ["export", "strict export", "trace"])
def test_a_model_is_exported_after_it_was_decompressed(exporter: str) -> None:
    model, twin, x = compressed("mlp", "combined", "train")
    laconic.decompress_activations(twin)
    assert torch.equal(EXPORTERS[exporter](twin, x)(x), model(x))


@pytest.mark.parametrize("mode", MODES)
def test_scripting_is_refused_by_name(mode: str) -> None:
    _, twin, _ = compressed("mlp", mode, "eval")
    with pytest.raises(ModelError, match=r"torch\.jit\.script"):
        torch.jit.script(twin)
