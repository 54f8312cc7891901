"""AFI-Nets behind timm's interface: images to logits, features of every stage, a classifier that can be replaced.

What timm's users call on any of its models is here, without timm; `timm_models` registers the models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from laconic.errors import ModelError
from laconic.vision.densenet import AFIDenseNet
from laconic.vision.resnet import AFIResNetForImageClassification


class TimmModel(nn.Module):
    """An AFI-Net as timm has its models.

    Args:
        model: the network that this one runs.
        in_chans: channels of the images.
        num_classes: width of the logits; 0 leaves the classifier out.
        global_pool: "avg", or "" for features that are not pooled, without a classifier.
        output_stride: pixels of the image per pixel of the last features, if you want it checked: it is the network's.
        channels: of the features of the stem and of each stage.
        modules: their names.
        first: pixels of the image per pixel of the stem's features.
        second: the same, of the first stage's; each later stage halves height and width.

    Attributes:
        num_features, head_hidden_size: channels of the last features.
        feature_info: for each level, `num_chs`, `reduction` and `module`.

    Raises:
        ModelError: global_pool is another one, or needs num_classes = 0; output_stride is not the network's.
    """

    def __init__(
        self,
        model: nn.Module,
        in_chans: int,
        num_classes: int,
        global_pool: str,
        output_stride: int | None,
        channels: Sequence[int],
        modules: Sequence[str],
        first: int,
        second: int,
    ) -> None:
        super().__init__()
        self.model = model
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.global_pool = global_pool
        self.num_features = self.head_hidden_size = channels[-1]
        reductions = [first, *(second << i for i in range(len(channels) - 1))]
        self.feature_info: list[dict[str, Any]] = [
            {"num_chs": n, "reduction": pixels, "module": name}
            for n, pixels, name in zip(channels, reductions, modules, strict=True)
        ]
        if output_stride not in (None, reductions[-1]):
            raise ModelError(
                f"output_stride is {output_stride}, but it must be {reductions[-1]} or left out: no stage is "
                "dilated; features_only gives the features of earlier stages, too"
            )
        self._check_pool(num_classes, global_pool)

    def levels(self, x: Tensor) -> Iterator[Tensor]:
        """Features [B, C, H, W] of the stem, and of each stage that is there."""
        raise NotImplementedError

    def cut(self, index: int, norm: bool) -> None:
        """Take out the stages behind level `index`; with `norm` a norm behind the last one as well."""
        raise NotImplementedError

    @property
    def head(self) -> tuple[nn.Module, str]:
        """The module that holds the classifier, and its name there."""
        raise NotImplementedError

    @property
    def drop_rate(self) -> float:
        """Probability of dropout before the classifier."""
        raise NotImplementedError

    def forward_features(self, x: Tensor) -> Tensor:
        """[B, in_chans, H, W] -> the last stage's features [B, num_features, h, w]."""
        *_, x = self.levels(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The last stage's features -> logits [B, num_classes]; with `pre_logits` what the classifier reads."""
        if self.global_pool == "":
            return x
        x = F.dropout(x.mean((2, 3)), self.drop_rate, self.training)
        return x if pre_logits else cast(Tensor, self.get_classifier()(x))

    def forward(self, x: Tensor) -> Tensor:
        """[B, in_chans, H, W] -> logits [B, num_classes]."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Features of several levels, each [B, C, H, W].

        Args:
            x: images [B, in_chans, H, W].
            indices: of levels, 0 the stem; an int means that many last ones, None all.
            norm: as timm's networks of convolutions, these have no norm to apply to features between.
            stop_early: leave out the stages behind the last level that is asked for.
            output_fmt: "NCHW".
            intermediates_only: without the last stage's features.

        Returns:
            The last features computed and the levels', or only these.

        Raises:
            ModelError: a level does not exist, or another format is asked for.
        """
        if output_fmt != "NCHW":
            raise ModelError(f"output_fmt is {output_fmt!r}, but it must be 'NCHW'")
        taken = self._taken(indices)
        found = []
        for level, features in enumerate(self.levels(x)):
            x = features
            if level in taken:
                found.append(x)
            if stop_early and level == max(taken):
                break
        return found if intermediates_only else (x, found)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Take out what the features of `indices` do not need; returns the levels.

        Raises:
            ModelError: a level does not exist.
        """
        taken = self._taken(indices)
        self.cut(max(taken), prune_norm)
        if prune_head:
            self.reset_classifier(0, "")
        return taken

    def get_classifier(self) -> nn.Module:
        """The linear layer from features to logits; `nn.Identity` without classes."""
        home, name = self.head
        return home.get_submodule(name)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Put a new classifier in place of the present one.

        Args:
            num_classes: width of the logits; 0 leaves the classifier out.
            global_pool: see the class; None leaves it as it is.

        Raises:
            ModelError: global_pool is another one, or needs num_classes = 0.
        """
        pool = self.global_pool if global_pool is None else global_pool
        self._check_pool(num_classes, pool)
        home, name = self.head
        reference = next(self.parameters())
        made = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        home.register_module(name, made.to(reference.device, reference.dtype).train(self.training))
        self.num_classes, self.global_pool = num_classes, pool

    def _taken(self, indices: int | Sequence[int] | None) -> list[int]:
        count = len(self.feature_info)
        if indices is None or isinstance(indices, int):
            last = count if indices is None else indices
            asked: Sequence[int] = range(-last, 0) if 1 <= last <= count else ()
        else:
            asked = indices
        if not asked or not all(-count <= index < count for index in asked):
            raise ModelError(
                f"indices is {indices!r}, but there are {count} levels: give numbers from {-count} to {count - 1}, or "
                "how many of the last ones"
            )
        return [index % count for index in asked]

    def _check_pool(self, num_classes: int, global_pool: str) -> None:
        if global_pool not in ("avg", ""):
            raise ModelError(f"global_pool is {global_pool!r}, but it must be 'avg', or '' for unpooled features")
        if global_pool == "" and num_classes:
            raise ModelError(f"global_pool is '' and num_classes {num_classes}, but a classifier reads pooled features")


class TimmResNet(TimmModel):
    """An AFI-ResNet as timm has its ResNets; `model` is Hugging Face's.

    Args:
        make: `afi_resnet50`, `afi_resnet101` or `afi_resnet152`.
        num_classes, in_chans, global_pool, output_stride: as of `TimmModel`.
        options: of `make`: drop_rate, drop_path_rate, small_inputs, depths and others.
    """

    def __init__(
        self,
        make: Callable[..., AFIResNetForImageClassification],
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        output_stride: int | None = None,
        **options: Any,
    ) -> None:
        model = make(num_classes, in_channels=in_chans, **options)
        config: Any = model.config
        stages = len(config.depths)
        first = 1 if config.small_inputs else 2
        super().__init__(
            model,
            in_chans,
            num_classes,
            global_pool,
            output_stride,
            channels=(config.embedding_size, *config.hidden_sizes),
            modules=("model.resnet.embedder.embedder", *(f"model.resnet.encoder.stages.{i}" for i in range(stages))),
            first=first,
            second=first * (1 if config.small_inputs else 2) * (2 if config.downsample_in_first_stage else 1),
        )

    def levels(self, x: Tensor) -> Iterator[Tensor]:
        """See `TimmModel.levels`."""
        model: Any = self.model
        x = model.resnet.embedder.embedder(x)
        yield x
        x = model.resnet.embedder.pooler(x)
        for stage in model.resnet.encoder.stages:
            x = stage(x)
            yield x

    def cut(self, index: int, norm: bool) -> None:
        """See `TimmModel.cut`."""
        model: Any = self.model
        del model.resnet.encoder.stages[index:]

    @property
    def head(self) -> tuple[nn.Module, str]:
        """See `TimmModel.head`."""
        return cast(nn.Module, self.model.classifier), "1"

    @property
    def drop_rate(self) -> float:
        """See `TimmModel.drop_rate`."""
        model: Any = self.model
        return float(model.config.drop_rate)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """See `TimmModel.reset_classifier`."""
        super().reset_classifier(num_classes, global_pool)
        model: Any = self.model
        model.num_labels = num_classes
        model.config.num_labels = num_classes


class TimmDenseNet(TimmModel):
    """An AFI-DenseNet as timm has its DenseNets.

    Args:
        make: `afi_densenet121`.
        num_classes, in_chans, global_pool, output_stride: as of `TimmModel`.
        options: of `make`: drop_rate and small_inputs.
    """

    def __init__(
        self,
        make: Callable[..., AFIDenseNet],
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        output_stride: int | None = None,
        **options: Any,
    ) -> None:
        model: Any = make(num_classes, in_channels=in_chans, **options)
        pools = isinstance(model.stem[-1], nn.MaxPool2d)
        blocks = [(name, part) for name, part in model.blocks.named_children() if hasattr(part, "out_channels")]
        last = model.norm.num_features
        super().__init__(
            model,
            in_chans,
            num_classes,
            global_pool,
            output_stride,
            channels=(model.stem[0].out_channels, *(part.out_channels for _, part in blocks[:-1]), last),
            modules=("model.stem.2", *(f"model.blocks.{name}" for name, _ in blocks[:-1]), "model.norm"),
            first=2 if pools else 1,
            second=4 if pools else 1,
        )

    def levels(self, x: Tensor) -> Iterator[Tensor]:
        """See `TimmModel.levels`."""
        model: Any = self.model
        x = model.stem[:3](x)
        yield x
        x = model.stem[3:](x)
        last = 2 * (len(self.feature_info) - 2)
        for i, part in enumerate(model.blocks):  # blocks, and transitions between them
            x = part(x)
            if i % 2 == 0:
                yield F.relu(model.norm(x)) if i == last else x

    def cut(self, index: int, norm: bool) -> None:
        """See `TimmModel.cut`."""
        model: Any = self.model
        del model.blocks[max(2 * index - 1, 0) :]
        if index < len(self.feature_info) - 1:
            model.norm = nn.Identity()

    @property
    def head(self) -> tuple[nn.Module, str]:
        """See `TimmModel.head`."""
        return self.model, "classifier"

    @property
    def drop_rate(self) -> float:
        """See `TimmModel.drop_rate`."""
        return float(getattr(self.model.drop, "p", 0.0))
