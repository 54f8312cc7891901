"""Workers' settings of transformers end with the file that uses them in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@pytest.fixture(scope="module", autouse=True)
def _attention_is_given_back() -> Iterator[None]:
    """A worker of latent attention replaces "sdpa" for its whole process, which here runs other tests afterwards."""
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    yield
    ALL_ATTENTION_FUNCTIONS.register("sdpa", before)
