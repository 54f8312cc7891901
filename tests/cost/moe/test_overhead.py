from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from laconic.cost.moe.overhead import Overhead, Sample, fit_overhead

sizes = st.tuples(st.integers(1, 10**5), st.integers(1, 10**7))


@settings(max_examples=100)
@given(
    st.lists(sizes, min_size=4, max_size=8, unique=True),
    st.tuples(*[st.floats(0, 1)] * 3),
    st.lists(st.floats(-0.5, 0.5), min_size=8, max_size=8),
)
def test_the_fit_is_that_of_bounded_least_squares(
    sizes: list[tuple[int, int]], true: tuple[float, float, float], noise: list[float]
) -> None:
    scales = (1e-2, 1e-6, 1e-8)
    a, b, c = (value * scale for value, scale in zip(true, scales, strict=True))
    samples = [
        Sample(rows, nbytes, a + b * rows + c * nbytes + error * 1e-3, 1e-2 + a + b * rows + c * nbytes)
        for (rows, nbytes), error in zip(sizes, noise, strict=False)
    ]
    weight = np.array([1 / s.total_seconds for s in samples])
    matrix = np.array([[1.0, s.num_rows, s.nbytes] for s in samples]) * weight[:, None]
    wanted = np.array([s.seconds for s in samples]) * weight
    scaled = matrix / np.abs(matrix).max(axis=0)
    residual = np.sqrt(2 * lsq_linear(scaled, wanted, ([-np.inf, 0, 0], np.inf), tol=1e-14).cost)
    found = fit_overhead(samples, rounds=1)
    assert min(found.seconds_per_row, found.seconds_per_byte) >= 0
    errors = matrix @ [found.alpha_seconds, found.seconds_per_row, found.seconds_per_byte] - wanted
    # No fit within the bounds is better than the best; SciPy's ends some 1e-7 away from it.
    assert np.linalg.norm(errors) <= residual * (1 + 1e-5) + 1e-7
    assert found.error == pytest.approx(np.abs(errors).max(), abs=1e-9)


def test_what_has_a_line_is_found_again() -> None:
    true = Overhead(2e-3, 3e-6, 4e-9)
    points = [(10, 1000), (100, 1000), (100, 50000), (7, 30000)]
    samples = [Sample(*point, true.seconds(*point), 1.0) for point in points]
    found = fit_overhead(samples)
    assert found.seconds(50, 500) == pytest.approx(true.seconds(50, 500), rel=1e-6)
    assert found.error < 1e-9


def test_noise_does_not_make_it_short() -> None:
    points = [(100 * n, 1000 * n) for n in range(1, 9)]
    noise = (0.4, 0.7, 1.0, 1.3, 1.6)  # the mean is 1
    samples = [Sample(*point, 1e-2 * x - 5e-3, 1e-2 * x) for point in points for x in noise]
    assert fit_overhead(samples).seconds(400, 4000) == pytest.approx(5e-3, abs=2e-4)
    assert fit_overhead(samples, rounds=1).seconds(400, 4000) < 4e-3


def test_a_route_may_take_less_than_its_links_and_nothing_to_fit_is_refused() -> None:
    less = [Sample(1, 1, -1e-3, 1e-2), Sample(2, 5, -1e-3, 1e-2)]
    assert fit_overhead(less).seconds(5, 5) == pytest.approx(-1e-3)
    with pytest.raises(ValueError, match="samples are empty"):
        fit_overhead([])
