"""A worker of an engine that fails at a poisoned token, and at every one while the file of FLAG exists."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from laconic.infer import attention_worker, worker

POISON = 96
"""A token that is in no good prompt, nor in the load's check of this model by the seed that it has."""
FLAG = "LACONIC_TEST_FAILS"
"""Environment variable with the path of the file."""

_load = attention_worker.load_attention_model


def _loaded(*args: Any) -> Any:
    model = _load(*args)
    model.register_forward_pre_hook(_before, with_kwargs=True)
    return model


def _before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if os.path.exists(os.environ[FLAG]) and "cu_seq_lens_q" in kwargs:
        raise RuntimeError("out of memory")
    if (kwargs["input_ids"] == POISON).any():
        raise RuntimeError("poison")


if __name__ == "__main__":
    attention_worker.load_attention_model = _loaded
    worker.main()
