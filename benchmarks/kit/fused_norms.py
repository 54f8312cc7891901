"""torch's fused RMS norm, which only its CUDA builds have, on the CPU: one operation that computes what theirs does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch._decomp.decompositions import _fused_rms_norm, _fused_rms_norm_backward

from laconic.activations.backward import norms


@contextmanager
def fused_norms() -> Iterator[None]:
    """While the block runs, norms of plain tensors on the CPU take the kernels that they would take on CUDA."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", _fused_rms_norm, "CPU")
    library.impl("_fused_rms_norm_backward", _fused_rms_norm_backward, "CPU")
    with patch.dict(norms.KERNELS, cpu=norms.KERNELS["cuda"]), patch.dict(norms._VERDICTS, clear=True):
        try:
            yield
        finally:
            library._destroy()
