"""Linear layer and cross entropy in one: the plain loss and its gradients, tile by tile."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import laconic
from laconic import BlockFormat, linear_cross_entropy
from laconic.activations.whole_model import loss as loss_module
from laconic.errors import DataError, ModelError
from tests.activations.models import relative_error
from tests.grid import grid

IGNORED = -100
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.02},
    {"logit_softcap": 4.0},
    {"logit_scale": 0.25},
    {"label_smoothing": 0.2, "z_loss": 0.01, "logit_softcap": 5.0, "logit_scale": 1.7, "ignore_index": 3},
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 8 tokens, and where backward makes the gradients 100 logits at once: a few tokens make many tiles."""
    monkeypatch.setattr(loss_module, "TILES", {"cpu": (8, 100)})
    monkeypatch.setattr(loss_module, "ROWS", {"cpu": 32})
    monkeypatch.setattr(loss_module, "BLOCK", 100)


def plain_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """What is computed, with all logits there at once."""
    logits = F.linear(hidden, weight, bias)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) * logit_scale
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    flat, targets = logits.flatten(0, -2), labels.flatten()
    losses = F.cross_entropy(
        flat, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    counts = targets != ignore_index
    losses = losses + torch.where(counts, z_loss * flat.logsumexp(1).square(), 0.0)
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


def problem(
    tokens: tuple[int, ...] = (3, 11),
    vocabulary: int = 53,
    size: int = 16,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and labels, a quarter of them ignored."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    labels = torch.randint(vocabulary, tokens, generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.25] = IGNORED
    return normal(*tokens, size), normal(vocabulary, size), normal(vocabulary), labels


def gradients(value: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of a value weighted by its position, so that every entry counts differently."""
    weights = torch.arange(1, value.numel() + 1, dtype=value.dtype).view(value.shape)
    return torch.autograd.grad(value, inputs, weights)


@pytest.mark.parametrize(
    ("chunk_tokens", "reduction", "options"), grid([None, 1, 5, 1000], ["mean", "sum", "none"], list(OPTIONS))
)
def test_value_and_gradients_are_those_of_the_plain_loss(
    options: dict[str, Any], reduction: Any, chunk_tokens: int | None
) -> None:
    hidden, weight, bias, labels = problem()
    labels = torch.where(labels == IGNORED, options.get("ignore_index", IGNORED), labels)
    expected = plain_loss(hidden, weight, labels, bias=bias, reduction=reduction, **options)
    got = linear_cross_entropy(
        hidden, weight, labels, bias=bias, reduction=reduction, chunk_tokens=chunk_tokens, **options
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    inputs = (hidden, weight, bias)
    for mine, theirs in zip(gradients(got, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 40),
    vocabulary=st.integers(1, 220),
    size=st.integers(1, 20),
    chunk=st.none() | st.integers(1, 50),
    exponent=st.integers(-3, 6),
)
def test_no_shape_and_no_magnitude_makes_a_difference(
    tokens: int, vocabulary: int, size: int, chunk: int | None, exponent: int
) -> None:
    hidden, weight, bias, labels = problem((tokens,), vocabulary, size)
    hidden = (hidden.detach() * 2.0**exponent).requires_grad_()
    expected = plain_loss(hidden, weight, labels, bias=bias, reduction="none")
    got = linear_cross_entropy(hidden, weight, labels, bias=bias, reduction="none", chunk_tokens=chunk)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    inputs = (hidden, weight, bias)
    for mine, theirs in zip(gradients(got, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def bound(hidden: Tensor, weight: Tensor, lse: Tensor) -> Tensor:
    """The bound of docs/activations.md on the difference of two token losses, [tokens]."""
    size, vocabulary, u = hidden.shape[-1], weight.shape[0], 2.0**-24
    products = (hidden.detach().abs().double() @ weight.detach().abs().double().t()).amax(1)
    of_logits = 2 * size * u * products
    if hidden.dtype == torch.bfloat16:
        of_logits = of_logits + 2 * 2.0**-9 * (products + of_logits)
    return 2 * of_logits + 2 * (vocabulary + 16) * u + 16 * u * (lse.double().abs() + 2 * products)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.05, 1.0, 8.0])
def test_value_is_within_the_derived_rounding_of_the_plain_one(dtype: torch.dtype, scale: float) -> None:
    hidden, weight, _, labels = problem((64,), 300, 48, dtype)
    hidden = (hidden.detach() * scale).requires_grad_()
    got = linear_cross_entropy(hidden, weight, labels, reduction="none")
    expected = plain_loss(hidden, weight, labels, reduction="none")
    lse = (hidden @ weight.t()).float().logsumexp(1)
    assert got.dtype == torch.float32
    assert ((got.double() - expected.double()).abs() <= bound(hidden, weight, lse)).all()
    for mine, theirs in zip(
        gradients(got.sum(), (hidden, weight)), gradients(expected.sum(), (hidden, weight)), strict=True
    ):
        assert mine.dtype == dtype
        assert relative_error(mine, theirs) < (2e-6 if dtype == torch.float32 else 4e-3)


def test_gradient_of_the_weight_is_added_up_in_fp32() -> None:
    # 600 chunks of one token each: in bf16 the sum would stop growing at 256 times a summand.
    hidden, weight = torch.ones(600, 8, dtype=torch.bfloat16), torch.zeros(5, 8, dtype=torch.bfloat16).requires_grad_()
    linear_cross_entropy(hidden, weight, torch.zeros(600, dtype=torch.long), reduction="sum", chunk_tokens=1).backward()
    assert weight.grad is not None
    expected = torch.full((5, 8), 600 * 0.2)
    expected[0] = -600 * 0.8
    assert relative_error(weight.grad, expected) < 4e-3


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation returns, and how many matrix products there are."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.numel = 0
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return result


@pytest.mark.parametrize(("reduction", "tile"), [("sum", 8 * 120), ("none", 100)])
def test_no_tensor_is_larger_than_a_tile_or_the_inputs(reduction: Any, tile: int) -> None:
    hidden, weight, bias, labels = problem((64,), 120, 4, torch.float32)
    with Largest(120) as largest:
        value = linear_cross_entropy(
            hidden, weight, labels, bias=bias, label_smoothing=0.1, logit_softcap=3.0, reduction=reduction
        )
        value.sum().backward()
    assert largest.numel <= max(120 * 4, tile)  # the weight's gradient; all logits would be 7,680


@pytest.mark.parametrize(
    ("dtype", "chunk_tokens", "of_weight", "in_forward"),
    [
        (torch.bfloat16, None, torch.bfloat16, False),  # four tiles, whose sum would be kept in fp32
        (torch.bfloat16, 64, torch.bfloat16, True),
        (torch.bfloat16, None, None, True),
        (torch.float32, None, torch.float32, True),
        (torch.bfloat16, None, torch.float32, True),  # under autocast
    ],
)
def test_forward_keeps_nothing_larger_than_the_gradient_of_the_weight(
    dtype: torch.dtype, chunk_tokens: int | None, of_weight: torch.dtype | None, in_forward: bool
) -> None:
    hidden, weight, _, labels = problem((64,), 120, 48, dtype)
    weight = weight.detach().to(of_weight or dtype).requires_grad_(of_weight is not None)
    seen: list[int] = []

    class Wide(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dtype == torch.float32:
                seen.append(result.untyped_storage().nbytes())
            return result

    with Wide(), torch.autocast("cpu", dtype, enabled=weight.dtype != dtype):
        value = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens)
    assert (value.grad_fn.made is not None) == in_forward  # type: ignore[union-attr]
    assert max(seen) <= (weight.nbytes if weight.requires_grad else hidden.numel() * 4)
    with Largest(120) as counter:
        value.backward()
    assert (counter.products == 0) == in_forward


def test_a_sum_no_larger_than_a_tile_is_made_in_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "TILES", {"cpu": (8, 480)})
    hidden, weight, _, labels = problem((64,), 120, 4, torch.bfloat16)
    value = linear_cross_entropy(hidden, weight, labels)
    assert value.grad_fn.made is not None  # type: ignore[union-attr]
    expected = torch.autograd.grad(plain_loss(hidden, weight, labels), (hidden, weight))
    for mine, theirs in zip(torch.autograd.grad(value, (hidden, weight)), expected, strict=True):
        assert relative_error(mine, theirs) < 1e-2


def test_frozen_inputs_cost_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "TILES", {"cpu": (64, 1 << 20)})
    hidden, weight, _, labels = problem((64,), 120, 4, torch.float32)
    with torch.no_grad(), Largest(120) as counter:
        linear_cross_entropy(hidden, weight, labels)
    products = {"no gradient": counter.products}
    for name, inputs in {
        "none": (hidden, weight),
        "weight": (hidden, weight.detach()),
        "hidden": (hidden.detach(), weight),
        "both": (hidden.detach(), weight.detach()),
    }.items():
        with Largest(120) as counter:
            value = linear_cross_entropy(*inputs, labels)
            if value.requires_grad:
                value.backward()
        products[name] = counter.products
    # The logits, and one product for each gradient.
    assert products == {"no gradient": 1, "none": 3, "weight": 2, "hidden": 2, "both": 1}


def test_only_hidden_states_and_two_numbers_per_token_are_kept() -> None:
    hidden, weight, _, labels = problem((64,), 120, 32, torch.bfloat16)
    for format, nbytes in ((None, 64 * 32 * 2 + 64 * 4), (BlockFormat("int8"), BlockFormat("int8").nbytes((64, 32)))):
        kept: dict[int, int] = {}

        def pack(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            losses, _ = loss_module.tiled_loss(
                hidden * 1, weight * 1, None, labels, loss_module.LossSpec(), 1, None, format
            )
        assert losses.requires_grad
        ours = sum(kept.values()) - weight.nbytes - labels.nbytes
        assert ours == nbytes


def test_packed_hidden_states_give_gradients_of_the_format_and_probabilities_that_add_up() -> None:
    hidden, weight, bias, labels = problem((128,), 90, 64, torch.float32)
    expected = gradients(linear_cross_entropy(hidden, weight, labels, bias=bias), (hidden, weight, bias))
    for format, limit in ((BlockFormat("int8"), 0.02), (BlockFormat("nf4"), 0.3)):
        value = linear_cross_entropy(hidden, weight, labels, bias=bias, format=format)
        torch.testing.assert_close(value, linear_cross_entropy(hidden, weight, labels, bias=bias))
        got = gradients(value, (hidden, weight, bias))
        for mine, theirs in zip(got, expected, strict=True):
            assert 0 < relative_error(mine, theirs) < limit
        # Summed over the vocabulary, probabilities minus one-hot labels are zero for every token, so for the bias too.
        assert got[2].sum().abs() < 1e-6


def test_if_no_token_counts_the_mean_is_nan_and_gradients_are_zero_as_in_torch() -> None:
    hidden, weight, bias, labels = problem()
    labels = torch.full_like(labels, IGNORED)
    for function in (linear_cross_entropy, plain_loss):
        value = function(hidden, weight, labels, bias=bias)
        assert math.isnan(value.item())
        assert all(grad.eq(0).all() for grad in torch.autograd.grad(value, (hidden, weight, bias)))
    assert linear_cross_entropy(hidden, weight, labels, reduction="sum").item() == 0.0


def test_num_items_divides_instead_of_the_count() -> None:
    hidden, weight, _, labels = problem()
    total = linear_cross_entropy(hidden, weight, labels, reduction="sum")
    for num_items in (17, 17.0, torch.tensor(17)):
        assert torch.equal(linear_cross_entropy(hidden, weight, labels, num_items=num_items), total / 17)


@pytest.mark.parametrize("format", [None, BlockFormat("int8")])
def test_a_divisor_may_change_after_forward(format: BlockFormat | None) -> None:
    hidden, weight, _, labels = problem((40,), dtype=torch.float32)
    num_items = torch.tensor(17)
    of_number, of_tensor = (
        linear_cross_entropy(hidden, weight, labels, num_items=number, format=format) for number in (17, num_items)
    )
    num_items.add_(100)
    found = (gradients(loss, (hidden, weight)) for loss in (of_tensor, of_number))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_entries_that_a_bias_rules_out_count_nothing(reduction: Any) -> None:
    hidden, weight, _, labels = problem()
    bias = torch.zeros(53, dtype=torch.float64)
    bias[:26] = -torch.inf  # several tiles of them
    labels = torch.where(labels == IGNORED, labels, labels.clamp(min=26))
    expected = plain_loss(hidden, weight, labels, bias=bias, reduction=reduction)
    got = linear_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(gradients(got, (hidden, weight)), gradients(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_autocast_decides_the_dtype_of_the_products() -> None:
    hidden, weight, _, labels = problem((64,), 120, 32, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_cross_entropy(hidden, weight, labels)
        expected = F.cross_entropy(F.linear(hidden, weight).float(), labels)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(gradients(got, (hidden, weight)), gradients(expected, (hidden, weight)), strict=True):
        assert mine.dtype == torch.float32
        assert relative_error(mine, theirs) < 4e-3


def test_gradients_accumulate_and_scale() -> None:
    hidden, weight, _, labels = problem()
    (expected,) = gradients(plain_loss(hidden, weight, labels), (weight,))
    for _ in range(3):
        (linear_cross_entropy(hidden, weight, labels) * 8).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, 24 * expected, rtol=1e-11, atol=1e-12)


def test_a_second_backward_is_right_whatever_became_of_the_gradients_of_the_first() -> None:
    hidden, weight, bias, labels = problem()
    inputs = (hidden, weight, bias)
    expected = torch.autograd.grad(plain_loss(hidden, weight, labels, bias=bias), inputs)
    value = linear_cross_entropy(hidden * 1, weight, labels, bias=bias)
    (first,) = torch.autograd.grad(value, hidden, retain_graph=True)  # alone, as pipelines do that split backward
    for grad in torch.autograd.grad(value, inputs, 3 * torch.ones_like(value), retain_graph=True):
        grad.zero_()
    for mine, theirs in zip((first, *torch.autograd.grad(value, inputs)), (expected[0], *expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_under_activation_checkpointing_are_right(use_reentrant: bool) -> None:
    hidden, weight, bias, labels = problem()
    inputs = (hidden, weight, bias)
    expected = torch.autograd.grad(plain_loss(hidden, weight, labels, bias=bias), inputs)

    def loss(h: Tensor) -> Tensor:
        return linear_cross_entropy(h * 1, weight, labels, bias=bias)

    torch.utils.checkpoint.checkpoint(loss, hidden, use_reentrant=use_reentrant).backward()
    for leaf, theirs in zip(inputs, expected, strict=True):
        torch.testing.assert_close(leaf.grad, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rows", [32, 1 << 20])  # bytes of a column: tiles of 16 tokens, and one of all
def test_gradients_in_bf16_are_as_near_to_fp64_as_those_of_torch(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(loss_module, "ROWS", {"cpu": rows})
    hidden, weight, _, labels = problem((256,), 300, 48, torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = torch.autograd.grad(plain_loss(*wide, labels), wide)
    torchs = torch.autograd.grad(plain_loss(hidden, weight, labels), (hidden, weight))
    ours = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))
    for mine, theirs, exact in zip(ours, torchs, expected, strict=True):
        assert relative_error(mine, exact) < 1.05 * relative_error(theirs, exact)


def test_a_scaled_loss_in_fp16_keeps_gradients_that_would_underflow() -> None:
    hidden, weight, _, labels = problem((64,), 120, 8, torch.float16)
    with torch.no_grad():
        weight *= 2.0**-6
    value = linear_cross_entropy(hidden, weight, labels, num_items=2.0**22)
    (got,) = torch.autograd.grad(value, weight, torch.tensor(2.0**20))
    (expected,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, num_items=4.0), weight)
    assert expected.norm() > 0.1
    assert relative_error(got, expected) < 1e-2


@pytest.mark.parametrize("format", [None, BlockFormat("int8")])
@pytest.mark.parametrize("options", OPTIONS)
def test_second_derivatives_are_those_of_the_plain_loss(options: dict[str, Any], format: BlockFormat | None) -> None:
    hidden, weight, bias, labels = problem()
    labels = labels.where(labels != IGNORED, options.get("ignore_index", IGNORED))
    if format is not None:
        hidden = hidden.detach().float().requires_grad_()
        weight, bias = weight.detach().float().requires_grad_(), bias.detach().float().requires_grad_()
    found = []
    for way in (1, 2):
        h = hidden * 1.5  # no leaf, whose values are gone in backward
        if way == 1:
            value = linear_cross_entropy(h, weight, labels, bias=bias, format=format, **options)
        else:
            value = plain_loss(h, weight, labels, bias=bias, **options)
        grads = torch.autograd.grad(value, (hidden, weight, bias), create_graph=True)
        penalty = torch.stack([grad.square().sum() for grad in grads]).sum()
        found.append([value, *grads, *torch.autograd.grad(penalty, (hidden, weight, bias))])
    for got, expected in zip(*found, strict=True):
        assert relative_error(got, expected) < (1e-6 if format is None else 0.05)


def test_labels_of_any_integer_type_and_no_gradient_at_all() -> None:
    hidden, weight, _, labels = problem()
    value = linear_cross_entropy(hidden, weight, labels)
    with torch.no_grad():
        again = laconic.linear_cross_entropy(hidden, weight, labels.short(), format=BlockFormat("nf4"))
    torch.testing.assert_close(again, value, rtol=1e-13, atol=0.0)
    assert not again.requires_grad


class Head(nn.Module):
    """Computes its loss in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 90)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, self.linear.weight, labels, bias=self.linear.bias)


@pytest.mark.ci
def test_hooks_leave_it_exact() -> None:
    hidden, _, _, labels = problem((2048,), 90, 64, torch.float32)
    torch.manual_seed(0)
    head = Head()
    expected = torch.autograd.grad(head(hidden, labels), (hidden, *head.parameters()))
    laconic.compress_activations(head, mode="hooks", example_inputs={"hidden": hidden, "labels": labels})
    got = torch.autograd.grad(head(hidden, labels), (hidden, *head.parameters()))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"labels": torch.full((3, 11), 53)}, DataError, r"a label is 53, but it must be in \[0, 53\), the vocabulary"),
        ({"labels": torch.full((3, 11), -1)}, DataError, r"a label is -1, but it must be in \[0, 53\).* or -100"),
        ({"labels": torch.zeros(33).long()}, DataError, r"labels have shape \(33,\), but hidden .* needs \(3, 11\)"),
        ({"labels": torch.zeros(3, 11)}, DataError, "labels are torch.float32, but they must be integers"),
        ({"weight": torch.zeros(53, 8).double()}, ModelError, r"hidden has shape .* and weight \(53, 8\), but they"),
        ({"weight": torch.zeros(53, 16)}, ModelError, "outside of autocast they must be alike"),
        ({"bias": torch.zeros(8)}, ModelError, r"bias has shape \(8,\), but it must be \[53\]"),
        ({"label_smoothing": 1.5}, ModelError, r"label_smoothing is 1.5, but it must be in \[0, 1\]"),
        ({"z_loss": -1.0}, ModelError, "z_loss is -1.0, but it must be at least 0"),
        ({"logit_softcap": 0.0}, ModelError, "logit_softcap is 0.0, but it must be above 0"),
        ({"chunk_tokens": 0}, ModelError, "chunk_tokens is 0, but it must be at least 1"),
        ({"reduction": "max"}, ModelError, "reduction is 'max', but it must be 'mean', 'sum' or 'none'"),
        (
            {"reduction": "sum", "num_items": 3},
            ModelError,
            "num_items divides the sum of a mean, but reduction is 'sum'",
        ),
        ({"num_items": torch.ones((), requires_grad=True)}, ModelError, r"num_items requires a gradient, .*detach\(\)"),
    ],
)
def test_bad_argument_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    hidden, weight, _, labels = problem()
    arguments: dict[str, Any] = {"weight": weight, "labels": labels} | change
    with pytest.raises(error, match=message):
        linear_cross_entropy(hidden, arguments.pop("weight"), arguments.pop("labels"), **arguments)
