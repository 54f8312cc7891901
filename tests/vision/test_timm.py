"""AFI-Nets under timm's names. torchvision's CPU build needs operator schemas that only its CUDA build declares."""

import importlib
import importlib.util
from collections.abc import Iterator

import pytest
import torch

from laconic.errors import ConfigError

if importlib.util.find_spec("timm") is None:
    pytest.skip("timm is not installed", allow_module_level=True)

_SCHEMAS = tuple(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms"))


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


def test_pretrained_weights_are_refused() -> None:
    import timm

    with pytest.raises(ConfigError, match="no trained weights"):
        timm.create_model("afi_resnet50", pretrained=True)
