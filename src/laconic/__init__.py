"""laconic: larger language models on fewer GPUs and slower networks, by saying it in fewer bytes.

The public names are loaded when they are first used, so that `laconic --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic.activations import compress_activations, decompress_activations, linear_cross_entropy
    from laconic.advice import advise
    from laconic.auditing import audit
    from laconic.collectives.integrations.quantized_gathers import quantize_gathers
    from laconic.collectives.integrations.zip import zip_collectives
    from laconic.formats import BlockFormat, BlockTensor, Expect, decode, encode, load_zipped
    from laconic.gradients import LocalSteps, compress_gradients, quantize_reduction
    from laconic.optim import AdamW8bit
    from laconic.replicas import verify_replicas

__version__ = "0.1.0"

__all__ = [
    "compress_activations",
    "decompress_activations",
    "linear_cross_entropy",
    "compress_gradients",
    "quantize_reduction",
    "LocalSteps",
    "quantize_gathers",
    "zip_collectives",
    "verify_replicas",
    "advise",
    "audit",
    "AdamW8bit",
    "BlockFormat",
    "BlockTensor",
    "encode",
    "decode",
    "Expect",
    "load_zipped",
    "__version__",
]

_HOME = {
    "compress_activations": "laconic.activations",
    "decompress_activations": "laconic.activations",
    "linear_cross_entropy": "laconic.activations",
    "compress_gradients": "laconic.gradients",
    "quantize_reduction": "laconic.gradients",
    "LocalSteps": "laconic.gradients",
    "quantize_gathers": "laconic.collectives.integrations.quantized_gathers",
    "zip_collectives": "laconic.collectives.integrations.zip",
    "verify_replicas": "laconic.replicas",
    "advise": "laconic.advice",
    "audit": "laconic.auditing",
    "AdamW8bit": "laconic.optim",
    "BlockFormat": "laconic.formats",
    "BlockTensor": "laconic.formats",
    "encode": "laconic.formats",
    "decode": "laconic.formats",
    "Expect": "laconic.formats",
    "load_zipped": "laconic.formats",
}


_PACKAGES = (
    "activations",
    "advice",
    "auditing",
    "collectives",
    "cost",
    "formats",
    "gradients",
    "infer",
    "integrations",
    "moe",
    "ops",
    "optim",
    "schedule",
    "vision",
)
"""Found by `import laconic` alone, as pages write them: laconic.moe.parallelize."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"laconic.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'laconic' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted((*__all__, *_PACKAGES))
