"""AFI-Nets under timm's names. torchvision's CPU build needs operator schemas that only its CUDA build declares."""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from laconic.errors import ConfigError, ModelError

if importlib.util.find_spec("timm") is None:
    pytest.skip("timm is not installed", allow_module_level=True)

_SCHEMAS = tuple(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms"))
_NAMES = ["afi_resnet50", "afi_resnet101", "afi_resnet152", "afi_densenet121"]


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            library.define(schema)
    importlib.import_module("laconic.vision.timm_models")
    yield
    library._destroy()


@pytest.mark.parametrize("name", ["afi_resnet50", "afi_densenet121"])
def test_timm_builds_the_model_by_name(name: str) -> None:
    import timm

    assert timm.is_model(name)
    model = timm.create_model(name, num_classes=5, in_chans=1)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 5)
    assert model.num_classes == 5
    assert timm.data.resolve_data_config(model=model)["input_size"][1:] == (224, 224)


def test_pretrained_weights_are_refused() -> None:
    import timm

    for options in ({"pretrained": True}, {"pretrained_cfg_overlay": {"url": "x"}}):
        with pytest.raises(ConfigError, match="no trained weights"):
            timm.create_model("afi_resnet50", **options)


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize(
    "option", ["no_such_argument", "dropratee", "num_clases", "model_cfg", "pruned", "pretrained_strict", "img_size"]
)
def test_every_registered_model_refuses_what_nobody_reads(name: str, option: str) -> None:
    import timm

    assert sorted(timm.list_models("afi_*")) == sorted(_NAMES)
    with pytest.raises(TypeError, match=option), torch.device("meta"):
        timm.create_model(name, **{option: 1})


@pytest.mark.parametrize("name", ["afi_resnet50", "afi_densenet121"])
@pytest.mark.parametrize("indices", [None, (1, 3), (-1,), 2])
def test_features_only_gives_the_levels(name: str, indices: Any) -> None:
    import timm

    options = {} if indices is None else {"out_indices": indices}
    model = timm.create_model(name, features_only=True, **options).eval()
    whole = timm.create_model(name).eval()
    whole.load_state_dict(model.model.state_dict(), strict=False)
    x = torch.randn(1, 3, 64, 64)
    found = model(x)
    expected = whole.forward_intermediates(x, 5 if indices is None else indices, intermediates_only=True)
    assert len(found) == len(expected) == len(model.feature_info.channels())
    for features, other, channels, pixels in zip(
        found, expected, model.feature_info.channels(), model.feature_info.reduction(), strict=True
    ):
        assert features.shape == (1, channels, 64 // pixels, 64 // pixels)
        assert torch.equal(features, other)


def test_networks_of_other_depths_have_their_own_levels() -> None:
    import timm

    sizes = {"depths": [2, 2], "hidden_sizes": [8, 16], "embedding_size": 8}
    model = timm.create_model("afi_resnet50", features_only=True, **sizes)
    assert model.feature_info.reduction() == [2, 4, 8]
    assert [f.shape[1] for f in model(torch.randn(1, 3, 32, 32))] == [8, 8, 16]


def test_options_of_features_need_features() -> None:
    import timm

    with pytest.raises(ConfigError, match="out_indices is set"):
        timm.create_model("afi_resnet50", out_indices=(1, 2))


def test_rates_and_strides_are_honoured_or_refused() -> None:
    import timm

    model = timm.create_model("afi_resnet50", drop_rate=0.2, drop_path_rate=0.1, depths=(2, 2, 2, 2))
    assert model.drop_rate == 0.2
    assert model.model.config.drop_path_rate == 0.1
    with pytest.raises(TypeError, match="drop_path_rate"), torch.device("meta"):
        timm.create_model("afi_densenet121", drop_path_rate=0.1)
    with pytest.raises(ModelError, match="output_stride is 16"), torch.device("meta"):
        timm.create_model("afi_resnet50", output_stride=16)
