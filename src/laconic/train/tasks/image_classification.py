"""Classification of images: cross entropy and accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from laconic.train.config.schema import TrainConfig
from laconic.train.task import Task

if TYPE_CHECKING:
    from torch import Tensor, nn

    from laconic.train.data.image_batches import ImageBatch
    from laconic.train.distributed.parallel_state import ParallelState
    from laconic.train.distributed.world import World


class ImageClassification(Task):
    """A Hugging Face image classifier; batches are `ImageBatch`."""

    unit = "image"
    classifies = True
    fixed_settings: ClassVar = {name: value for name, value in Task.fixed_settings.items() if name != "images"}

    def __init__(self, config: TrainConfig, world: World, parallel_state: ParallelState) -> None:
        from laconic.train.data.image_batches import ImageBatches
        from laconic.train.data.images import load_images

        self._config = config
        self._micro_batch_size = config.batch_size // (parallel_state.num_replicas * config.micro_batches)
        self._corpus = load_images(config.data, config.images)
        self._batches = ImageBatches(self._corpus, config.images, config.seed)
        self.num_validation = 0 if self._corpus.validation is None else len(self._corpus.validation)
        self.fingerprint = self._corpus.fingerprint

    def identity(self) -> dict[str, Any]:
        return {"images": asdict(self._config.images)}

    def build_model(self) -> nn.Module:
        from laconic.train.image_model import build_classifier, check_batch_norm

        model = build_classifier(self._config.model, self._corpus, self._config.seed)
        check_batch_norm(model, self._micro_batch_size)
        return model

    def example_inputs(self, device: Any) -> dict[str, Any]:
        """Two images, and their labels, by which bytes are counted per image."""
        images = self.training_batch(range(2)).to(device)
        return {"labels": images.labels, "pixel_values": images.pixels}

    def training_batch(self, indices: range) -> ImageBatch:
        return self._batches.training(indices)

    def validation_batch(self, samples: Sequence[int]) -> ImageBatch:
        return self._batches.validation(samples)

    def loss(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        import torch.nn.functional as F

        return F.cross_entropy(model(pixel_values=batch.pixels).logits.float(), batch.labels)

    def evaluate(self, model: nn.Module, batch: ImageBatch) -> tuple[Tensor, Tensor]:
        import torch.nn.functional as F

        logits = model(pixel_values=batch.pixels).logits.float()
        return F.cross_entropy(logits, batch.labels), (logits.argmax(1) == batch.labels).sum()

    def write_files(self, run_dir: Path) -> None:
        from laconic.train.image_model import preprocessor_config
        from laconic.train.report.run_dir import PREPROCESSOR_FILE, write_json

        write_json(run_dir / PREPROCESSOR_FILE, preprocessor_config(self._corpus))


TASK = ImageClassification
