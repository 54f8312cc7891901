"""Residual networks with attentive feature integration, on Hugging Face's ResNet.

What the paper (arXiv 2105.04354, abstract) says: AFI-ResNet-152 has 9.2 % fewer parameters and about 10 % fewer
operations than ResNet-152. How it gets there is not public; this is a reconstruction that meets both numbers: a stage's
blocks share one `AFI`, and blocks are taken out of stages 2 and 3. The paper's accuracy is not claimed.

Blocks keep the names that they have in Hugging Face's ResNet. A checkpoint of a ResNet of the same depths loads, with
new weights for attention only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ResNetModel,
)
from transformers import initialization as init
from transformers.models.resnet.modeling_resnet import ResNetConvLayer

from laconic.errors import ModelError
from laconic.vision.drop_path import DropPath, check_rate
from laconic.vision.integration import AFI, Integrated, LinearFromZero

_READ = (
    *("embedding_size", "hidden_sizes", "layer_type", "hidden_act", "reduction", "drop_rate", "drop_path_rate"),
    *("downsample_in_first_stage", "downsample_in_bottleneck"),
    *("id2label", "label2id", "problem_type", "output_hidden_states", "return_dict"),
)
"""Fields of the configuration that the classifier reads, beside the arguments of `afi_resnet50`."""
_HOSTS = ("attn_implementation", "experts_implementation", "num_labels", "per_layer_config", "torch_dtype")
"""What Hugging Face's configurations take under names that they do not keep."""


class AFIResNetConfig(ResNetConfig):
    """Hugging Face's ResNetConfig (basic and bottleneck blocks, depths, widths) with what attention adds.

    A file may hold further fields, which are kept; the constructor refuses a name that is no field.

    Attributes:
        reduction: channels per hidden unit of a stage's `AFI`.
        small_inputs: a stem for images of about 32 x 32: a 3 x 3 convolution of stride 1 without pooling.
        drop_rate: probability of dropout before the classifier, in [0, 1).
        drop_path_rate: stochastic depth (arXiv 1603.09382): probability with which the last block's branch is left out
            of a sample, in [0, 1); those before it have less, down to 0 at the first.

    Raises:
        TypeError: an argument is no field.
    """

    model_type = "afi_resnet"

    reduction: int = 32
    small_inputs: bool = False
    drop_rate: float = 0.0
    drop_path_rate: float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs:
            _refuse_unknown("AFIResNetConfig", kwargs, (*_fields(), *_HOSTS))
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a configuration from a file's fields; those that this version does not know are kept."""
        known = {name: value for name, value in config_dict.items() if name in _fields() or name in _HOSTS}
        made = super().from_dict(known, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        for name in config_dict.keys() - known.keys():
            if not name.startswith("_") and not hasattr(config, name):
                setattr(config, name, config_dict[name])
        return made


@cache
def _fields() -> tuple[str, ...]:
    reference = AFIResNetConfig()
    names = {name for name in dir(reference) if not name.startswith("_")} | {"name_or_path"}
    return tuple(sorted(name for name in names if not callable(getattr(reference, name, None))))


def _refuse_unknown(function: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise Python's own TypeError for the first name that is not known: a configuration would keep it unread."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


class AFIStage(nn.Module):
    """A stage of residual blocks that share an `AFI`: x_i = relu(x_(i-1) + A_i).

    x_0 is the stage's input, projected by the first block's shortcut. The first block computes what it computes in a
    ResNet.

    Args:
        layers: Hugging Face's ResNet blocks (`shortcut`, `layer`, `activation`), at least two.
        channels: of their results.
        reduction: of the `AFI`.
        drop_path_rates: for each block, the probability with which a sample goes by A_i; empty means 0.
    """

    def __init__(
        self, layers: nn.Sequential, channels: int, reduction: int = 32, drop_path_rates: Sequence[float] = ()
    ) -> None:
        super().__init__()
        self.layers = layers
        self.afi = AFI(channels, reduction)
        self.drop_paths = nn.ModuleList(map(DropPath, drop_path_rates)) if any(drop_path_rates) else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, C_in, H, W] -> [B, C, H / stride, W / stride]."""
        levels: Integrated | None = None
        block: Any
        for i, block in enumerate(self.layers):
            levels = self.afi(block.layer(x), levels)
            added = levels.average if self.drop_paths is None else self.drop_paths[i](levels.average)
            x = block.activation(block.shortcut(x) + added)
        return x


class _AFIWeights:
    """Initial weights of the models below; Hugging Face asks each submodel for those of its own modules."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, LinearFromZero):
            init.zeros_(module.weight)


class AFIResNetModel(_AFIWeights, ResNetModel):
    """Hugging Face's ResNet without classifier, with an `AFIStage` in place of every stage of two or more blocks.

    A stage of one block has nothing to attend to and stays a ResNet's.

    Raises:
        ModelError: depths and widths are not of one length, or a depth is below 1; drop_path_rate is not in [0, 1), or
            is given with a stage of one block.
    """

    config_class = AFIResNetConfig

    def __init__(self, config: AFIResNetConfig) -> None:
        depths, widths = list(config.depths or ()), list(config.hidden_sizes or ())
        if len(depths) != len(widths) or min(depths, default=0) < 1:
            raise ModelError(
                f"depths is {depths}, but it must be {len(widths)} numbers of at least 1, one for each stage; "
                f"give hidden_sizes as well for another number of stages"
            )
        check_rate("drop_path_rate", config.drop_path_rate)
        if config.drop_path_rate and 1 in depths:
            raise ModelError(
                f"drop_path_rate is {config.drop_path_rate} and depths is {depths}, but a stage of one block is a "
                "ResNet's, which leaves no branch out; give it two blocks, or leave drop_path_rate out"
            )
        super().__init__(config)
        if config.small_inputs:
            stem: Any = self.embedder
            stem.embedder = ResNetConvLayer(
                config.num_channels, config.embedding_size, kernel_size=3, activation=config.hidden_act
            )
            stem.pooler = nn.Identity()
        stages: Any = self.encoder.stages
        last = max(sum(depths) - 1, 1)
        rates = [config.drop_path_rate * i / last for i in range(sum(depths))]
        for i, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            own, rates = rates[:depth], rates[depth:]
            if depth > 1:
                stages[i] = AFIStage(stages[i].layers, width, config.reduction, own)
        self.post_init()  # initializes what is new


class AFIResNetForImageClassification(_AFIWeights, ResNetForImageClassification):
    """`AFIResNetModel` and a linear classifier: Hugging Face's ResNetForImageClassification, with its arguments.

    Args:
        config: depths, widths, classes (`num_labels`), stem, drop rates.

    Raises:
        ModelError: depths and widths are not of one length, or a depth is below 1; a drop rate is not in [0, 1).
    """

    config_class = AFIResNetConfig

    def __init__(self, config: AFIResNetConfig) -> None:
        super(ResNetForImageClassification, self).__init__(config)  # its own would build a ResNet first
        self.num_labels = config.num_labels
        self.resnet = AFIResNetModel(config)
        *_, width = config.hidden_sizes or ()
        head = nn.Linear(width, config.num_labels) if config.num_labels else nn.Identity()
        check_rate("drop_rate", config.drop_rate)
        # Names, so that the weights keep theirs whether or not there is dropout.
        drop = {"drop": nn.Dropout(config.drop_rate)} if config.drop_rate else {}
        self.classifier = nn.Sequential(OrderedDict[str, nn.Module]({"0": nn.Flatten(), **drop, "1": head}))
        self.post_init()


AutoConfig.register(AFIResNetConfig.model_type, AFIResNetConfig, exist_ok=True)
AutoModel.register(AFIResNetConfig, AFIResNetModel, exist_ok=True)
AutoModelForImageClassification.register(AFIResNetConfig, AFIResNetForImageClassification, exist_ok=True)


def afi_resnet50(
    num_classes: int = 1000,
    *,
    depths: Sequence[int] = (3, 3, 5, 3),
    in_channels: int = 3,
    small_inputs: bool = False,
    **config: Any,
) -> AFIResNetForImageClassification:
    """AFI-ResNet-50: ResNet-50 less one block in stages 2 and 3 each, with attention over the levels of each stage.

    A reconstruction: the paper's depths are not public. These cost about 10 % fewer operations than ResNet-50, by the
    rule that fits ResNet-152.

    Args:
        num_classes: width of the classifier.
        depths: blocks per stage.
        in_channels: of the images.
        small_inputs: a stem for images of about 32 x 32 (see `AFIResNetConfig`).
        config: further fields of `AFIResNetConfig`: embedding_size, hidden_sizes, layer_type, hidden_act, reduction,
            drop_rate, drop_path_rate, downsample_in_first_stage, downsample_in_bottleneck, id2label, label2id,
            problem_type, output_hidden_states, return_dict.

    Returns:
        A Hugging Face model: `model(pixel_values, labels)` has `logits` and `loss`.

    Raises:
        ModelError: depths are not one for each stage, or one is below 1; a drop rate is not in [0, 1).
        TypeError: an argument is none of these.
    """
    return _build("afi_resnet50", num_classes, depths, in_channels, small_inputs, config)


def afi_resnet101(
    num_classes: int = 1000,
    *,
    depths: Sequence[int] = (3, 3, 20, 3),
    in_channels: int = 3,
    small_inputs: bool = False,
    **config: Any,
) -> AFIResNetForImageClassification:
    """AFI-ResNet-101: ResNet-101 less one block in stage 2 and three in stage 3, with attention.

    A reconstruction: the paper's depths are not public. Arguments, result and errors are those of `afi_resnet50`.
    """
    return _build("afi_resnet101", num_classes, depths, in_channels, small_inputs, config)


def afi_resnet152(
    num_classes: int = 1000,
    *,
    depths: Sequence[int] = (3, 7, 31, 3),
    in_channels: int = 3,
    small_inputs: bool = False,
    **config: Any,
) -> AFIResNetForImageClassification:
    """AFI-ResNet-152: 54,674,984 parameters, 9.2 % fewer than ResNet-152, and about 10 % fewer operations.

    Those are the paper's two numbers; one block less in stage 2, five less in stage 3 and this library's attention are
    one way to meet them (see `AFI`), and several are thinkable. Arguments, result and errors are those of
    `afi_resnet50`.
    """
    return _build("afi_resnet152", num_classes, depths, in_channels, small_inputs, config)


def _build(
    function: str, num_classes: int, depths: Sequence[int], in_channels: int, small_inputs: bool, config: dict[str, Any]
) -> AFIResNetForImageClassification:
    _refuse_unknown(function, config, ("num_classes", "depths", "in_channels", "small_inputs", *_READ))
    fields: dict[str, Any] = {"num_labels": num_classes, "depths": list(depths), "num_channels": in_channels}
    return AFIResNetForImageClassification(AFIResNetConfig(**fields, small_inputs=small_inputs, **config))
