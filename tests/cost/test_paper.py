"""The paper's memory tables on paper: exact where they are arithmetic, with a tolerance where they were measured."""

from __future__ import annotations

import pytest

from tests.cost.paper import COMPONENTS, PaperRun, components, real_components
from tests.cost.shapes import shape_of

GB = 1e9


def test_table_1_is_exact_by_component() -> None:
    expected = {
        "megatron": (1, 5, 1, 4, 1, 12, 4),
        "coat": (1, 5, 1, 1, 0.5, 6, 2),
        "agoq": (0, 5, 0.25, 0.5, 0, 2, 0),
    }
    for system, values in expected.items():
        assert components(system) == dict(zip(COMPONENTS, values, strict=True))  # type: ignore[arg-type]
    assert [sum(components(s).values()) for s in ("megatron", "coat", "agoq")] == [28, 16.5, 7.75]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "megatron", "modern", "agoq", "gain", "attention_share"),
    [
        ("llama2-7b", 21.8, 17.1, 6.1, 2.8, 0.66),
        ("llama2-13b", 21.8, 17.1, 6.1, 2.8, 0.66),
        ("llama3-8b", 23.5, 18.0, 5.0, 3.6, 0.50),
        ("llama3.2-1b", 25.5, 19.5, 5.25, 3.7, 0.48),
        ("codellama-34b", 20.0, 15.3, 4.3, 3.5, 0.52),
        ("olmo-1b", 27.0, 21.0, 6.75, 3.1, 0.59),
    ],
)
def test_real_models_are_within_the_rounding_of_the_table(
    name: str, megatron: float, modern: float, agoq: float, gain: float, attention_share: float
) -> None:
    shape = shape_of(name)
    totals = {system: sum(real_components(shape, system).values()) for system in ("megatron", "modern", "agoq")}  # type: ignore[arg-type]
    assert totals["megatron"] == pytest.approx(megatron, abs=0.051)
    assert totals["modern"] == pytest.approx(modern, abs=0.051)
    assert totals["agoq"] == pytest.approx(agoq, abs=0.051)
    assert totals["modern"] / totals["agoq"] == pytest.approx(gain, abs=0.05)
    assert real_components(shape, "agoq")["attention"] / totals["agoq"] == pytest.approx(attention_share, abs=0.006)


def test_table_8_total_and_activations_follow_from_28_and_7_75_units() -> None:
    """LLaMA2-13B, TP8, 12K: 46.1 -> 22.3 GB; optimizer 8.4, gradients 2.4, activations 13.0 (GPU column).

    The published activation increment is that of a feed-forward layer of 4 x hidden (28 -> 7.75 U), not of the model's
    own 2.7 x (21.8 -> 6.1 U, which gives 9.9 GB and is near the NPU column's 10.8).
    The remainder after all three, 22.3 GB, is 11 % above ours: what is in it besides weights, states, gradients,
    activations and logits is not published.
    """
    run = PaperRun(shape_of("llama2-13b"), tokens=12288, tensor_parallel=8)
    lasting = run.weights_nbytes() + run.logits_nbytes()
    before = lasting + run.optimizer_nbytes(32) + run.gradients_nbytes(32) + run.activations_nbytes(28)
    after = lasting + run.optimizer_nbytes(8) + run.gradients_nbytes(8) + run.activations_nbytes(7.75)
    assert before / GB == pytest.approx(46.1, rel=0.03)
    assert after / GB == pytest.approx(22.3, rel=0.12)
    assert (run.activations_nbytes(28) - run.activations_nbytes(7.75)) / GB == pytest.approx(13.0, rel=0.03)
    real = [sum(real_components(run.shape, system).values()) for system in ("megatron", "agoq")]  # type: ignore[arg-type]
    assert run.activations_nbytes(real[0] - real[1]) / GB == pytest.approx(10.8, rel=0.10)


def test_table_8_optimizer_and_gradients_follow_on_the_npu_and_bracket_the_gpu() -> None:
    """fp32 states to 8 bits: 9.7 GB against 9.9 (NPU) and 8.4 (GPU). fp32 gradients to 8 bits: 4.9 against 4.8 (NPU).

    The GPU column's 2.4 GB lies between what bf16 (1.6) and fp32 (4.9) main gradients would give, so no element size of
    the baseline explains it; with 12.2 GB for both instead of 14.6 its baseline holds 2.3 bytes per parameter less.
    """
    run = PaperRun(shape_of("llama2-13b"), tokens=12288, tensor_parallel=8)
    optimizer = (run.optimizer_nbytes(32) - run.optimizer_nbytes(8)) / GB
    assert optimizer == pytest.approx(9.9, rel=0.03)
    assert optimizer == pytest.approx(8.4, rel=0.16)
    from_fp32, from_bf16 = ((run.gradients_nbytes(bits) - run.gradients_nbytes(8)) / GB for bits in (32, 16))  # type: ignore[arg-type]
    assert from_fp32 == pytest.approx(4.8, rel=0.03)
    assert from_bf16 < 2.4 < from_fp32


def test_table_14_follows_from_the_models_own_width() -> None:
    """LLaMA3-8B with 36 layers, 32K: 48.6 -> 16.6 GB; with 16 layers, 64K: 46.7 -> 19.3 GB. TP8 is assumed.

    At 32K the account without logits is within 4 %. At 64K it needs the logits three times (bf16, fp32 and the fp32
    gradient, 10 bytes each) and is then within 10 %, without them 45 % low: the two rows do not share one assumption
    about logits, and the paper does not say which parallel layout each has.
    """
    shape = shape_of("llama3-8b", num_layers=36)
    units = {system: sum(real_components(shape, system).values()) for system in ("megatron", "agoq")}  # type: ignore[arg-type]
    for layers, tokens, logit_nbytes, published, tolerance in (
        (36, 32768, 0, (48.606, 16.594), 0.04),
        (16, 65536, 10, (46.681, 19.267), 0.10),
    ):
        run = PaperRun(shape_of("llama3-8b", num_layers=layers), tokens, tensor_parallel=8)
        logits = run.logits_nbytes() / 4 * logit_nbytes
        before = run.weights_nbytes() + run.optimizer_nbytes(32) + run.gradients_nbytes(32) + logits
        after = run.weights_nbytes() + run.optimizer_nbytes(8) + run.gradients_nbytes(8) + logits
        before += run.activations_nbytes(units["megatron"])
        after += run.activations_nbytes(units["agoq"])
        assert before / GB == pytest.approx(published[0], rel=tolerance)
        assert after / GB == pytest.approx(published[1], rel=tolerance)
