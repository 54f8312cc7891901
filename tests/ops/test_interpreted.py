"""Without a GPU the Triton kernels pass their tests in Triton's interpreter."""

import pytest
import torch

from tests.ops.interpreter import INTERPRETED, MOST_SECONDS, run_interpreted

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the kernels run where their tests are"),
    pytest.mark.timeout(MOST_SECONDS + 60),
]


@pytest.mark.ci
def test_interpreted_kernels_pass_their_tests() -> None:
    run_interpreted("not slow")


@pytest.mark.slow
def test_interpreted_kernels_pass_the_slow_ones_too() -> None:
    run_interpreted("slow")
