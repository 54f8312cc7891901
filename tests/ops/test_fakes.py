"""Every op's fake implementation says what the real one returns: shape, dtype, strides and device, whatever is given.

The table has an entry for every op that torch knows, so that a new op cannot come without one; examples are the least.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from laconic.ops.codebooks import AFFINE, BITS
from laconic.ops.declarations import OPS
from laconic.ops.declarations.bits import MASK_DTYPES
from laconic.ops.gated_activations import CURVES
from laconic.ops.lossless import CODES, HEADER_NBYTES, LAYOUTS, max_nbytes
from laconic.options import BLOCK_SIZES
from tests.grid import few
from tests.ops.adamw_cases import OPTIONS, as_lists, new_case, quantized
from tests.ops.cases import DTYPES
from tests.ops.test_rows import entries

Draw = Callable[[st.SearchStrategy[Any]], Any]

SCALES = st.sampled_from(DTYPES)
ACTIVATIONS = st.sampled_from(sorted(CURVES))


def tensor(draw: Draw, dtypes: tuple[torch.dtype, ...] = DTYPES, max_dims: int = 3) -> Tensor:
    """A tensor of any shape, contiguous or not, without elements too."""
    shape = draw(st.lists(st.integers(0, 9), max_size=max_dims - 1))
    if draw(st.booleans()):
        shape.append(draw(st.integers(0, 300)))
    dtype = draw(st.sampled_from(dtypes))
    layout = draw(st.sampled_from(["contiguous", "permuted", "strided", "expanded"]))
    if layout == "permuted":
        shape = shape[::-1]
    if layout == "strided" and shape:
        shape[-1] *= 2
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        x = (torch.rand(shape) * 8).to(dtype)
    if layout == "permuted":
        x = x.permute(tuple(range(x.dim()))[::-1])
    elif layout == "strided" and shape:
        x = x[..., ::2]
    elif layout == "expanded" and shape and len(shape) < max_dims:
        x = x.expand(3, *shape)
    return x


def quantize(draw: Draw) -> tuple[Any, ...]:
    code, block_size = draw(st.sampled_from(sorted(BITS))), draw(st.sampled_from(BLOCK_SIZES))
    x = tensor(draw)
    return x, code, block_size, draw(SCALES), draw(st.sampled_from([None, 3])), center_of(draw, x)


def center_of(draw: Draw, x: Tensor) -> Tensor | None:
    return torch.rand(x.shape[-1] if x.dim() else 1) if draw(st.booleans()) else None


def multiply_quantize(draw: Draw) -> tuple[Any, ...]:
    b, *format, _, _ = quantize(draw)
    a = torch.rand(b.shape[::-1]).to(b.dtype).permute(tuple(range(b.dim()))[::-1])
    return a, b, *format


def dequantize(draw: Draw) -> tuple[Any, ...]:
    x, code, block_size, scale_dtype, seed, center = quantize(draw)
    codes, scales = torch.ops.laconic.quantize_blockwise(x, code, block_size, scale_dtype, seed)
    if draw(st.booleans()):  # the op takes any strides
        codes, scales = (torch.stack((part, part), -1)[..., 0] for part in (codes, scales))
    return codes, scales, code, block_size, x.shape[-1] if x.dim() else 1, draw(SCALES), center


def dequantize_after(draw: Draw) -> tuple[Any, ...]:
    *arguments, center = dequantize(draw)
    return *arguments, tensor(draw), center


def gated_codes(draw: Draw) -> tuple[Tensor, tuple[Any, ...], str, int]:
    """Gate and up, packed alike: one of them, the codes of both, their code and its block size."""
    x, code, block_size, scale_dtype, _, _ = quantize(draw)
    code = "nf4" if code in AFFINE else code
    x = x if x.dim() else x.reshape(1)
    codes, scales = torch.ops.laconic.quantize_blockwise(x, code, block_size, scale_dtype, None)
    if draw(st.booleans()):  # the op takes any strides
        codes, scales = (torch.stack((part, part), -1)[..., 0] for part in (codes, scales))
    return x, (codes, scales, codes.clone(), scales.clone()), code, block_size


def gated_product(draw: Draw) -> tuple[Any, ...]:
    x, codes, code, block_size = gated_codes(draw)
    return *codes, code, block_size, x.shape[-1], draw(SCALES), draw(ACTIVATIONS)


def gated_backward(draw: Draw) -> tuple[Any, ...]:
    x, codes, code, block_size = gated_codes(draw)
    return x, *codes, code, block_size, draw(ACTIVATIONS)


def linear(draw: Draw) -> tuple[Any, ...]:
    x, (codes, scales, *_), code, block_size = gated_codes(draw)
    rows = math.prod(codes.shape[:-1])
    return x, *(part.reshape(rows, part.shape[-1]) for part in (codes, scales)), code, block_size


def store(n: int, bits: int) -> list[Tensor | None]:
    num_blocks = -(-n // 128)
    parts: list[Tensor | None] = [torch.zeros(n, dtype=torch.uint8), torch.ones(num_blocks)]
    return parts + ([None, None] if bits == 8 else [torch.zeros(-(-n // 2), dtype=torch.uint8), torch.ones(num_blocks)])


def shards(draw: Draw) -> tuple[Any, ...]:
    num_shards, parts = draw(st.integers(1, 3)), store(draw(st.integers(0, 300)), draw(st.sampled_from([8, 12])))
    return *(None if part is None else torch.stack([part] * num_shards) for part in parts), 0.5


def accumulate(draw: Draw) -> tuple[Any, ...]:
    gradient = tensor(draw)
    return *store(gradient.numel(), draw(st.sampled_from([8, 12]))), gradient, 0.5


def adamw_case(draw: Draw, bits: int | None, dtype: torch.dtype, gradient_dtype: torch.dtype) -> Any:
    shape = draw(st.integers(0, 4)), draw(st.integers(0, 300))
    case = new_case(shape, dtype, torch.randn(shape).to(gradient_dtype))
    return case if bits is None else quantized(case, bits)


def adamw(draw: Draw) -> tuple[Any, ...]:
    case = adamw_case(draw, draw(st.sampled_from([None, 8, 12])), draw(SCALES), draw(SCALES))
    case.gradient_factor = draw(st.sampled_from([None, torch.tensor(0.5)]))
    return *case.arguments(), *OPTIONS.values()


def adamw_multi(draw: Draw) -> tuple[Any, ...]:
    kind = draw(st.sampled_from([None, 8, 12])), draw(SCALES), draw(SCALES)
    cases = [adamw_case(draw, *kind) for _ in range(draw(st.integers(1, 3)))]
    return *as_lists(cases), *OPTIONS.values()


def encode(draw: Draw) -> tuple[Any, ...]:
    x = tensor(draw, tuple(LAYOUTS))
    least = HEADER_NBYTES + 8 * (x.dim() + x.is_complex())
    capacity = draw(st.none() | st.integers(least, max_nbytes(x.numel(), x.dtype)))
    return x, draw(st.sampled_from(sorted(CODES))), capacity


def decode(draw: Draw) -> tuple[Any, ...]:
    x = tensor(draw, tuple(LAYOUTS)).contiguous()
    return torch.empty_like(x), torch.ops.laconic.lossless_encode(x, "tiered", None)


def decode_add(draw: Draw) -> tuple[Any, ...]:
    x = tensor(draw, (torch.float32, torch.bfloat16, torch.float16)).contiguous()
    return torch.zeros(x.shape), torch.ops.laconic.lossless_encode(x, "tiered", None)


def rows(draw: Draw) -> tuple[Any, ...]:
    num_rows, num_sums = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    index, offsets, weights = entries(num_rows, num_sums, draw(st.integers(0, 30)), 0)
    values = torch.randn(num_rows, draw(st.integers(0, 70))).to(draw(SCALES))
    return values, index, offsets, draw(st.sampled_from([None, weights]))


def unpack(draw: Draw) -> tuple[Any, ...]:
    x = tensor(draw, MASK_DTYPES)
    return torch.ops.laconic.pack_bits(x), x.numel(), draw(st.sampled_from(MASK_DTYPES)), 0.0, 1.0


def select(draw: Draw) -> tuple[Any, ...]:
    x = tensor(draw, MASK_DTYPES)
    return x, torch.ops.laconic.pack_bits(x)


ARGUMENTS: dict[str, Callable[[Draw], tuple[Any, ...]]] = {
    "quantize_blockwise": quantize,
    "multiply_quantize_blockwise": multiply_quantize,
    "dequantize_blockwise": dequantize,
    "dequantize_blockwise_after": dequantize_after,
    "gated_product_blockwise": gated_product,
    "gated_product_blockwise_after": lambda draw: (*gated_product(draw), tensor(draw)),
    "gated_backward_blockwise": gated_backward,
    "linear_blockwise": linear,
    "sum_blockwise": shards,
    "sum_requantize_blockwise": shards,
    "accumulate_blockwise_": accumulate,
    "square_sum_blockwise": lambda draw: tuple(store(draw(st.integers(0, 300)), draw(st.sampled_from([8, 12])))),
    "adamw8bit_": adamw,
    "adamw8bit_multi_": adamw_multi,
    "lossless_encode": encode,
    "lossless_decode_": decode,
    "lossless_decode_add_": decode_add,
    "sum_rows": rows,
    "pack_bits": lambda draw: (tensor(draw, MASK_DTYPES),),
    "unpack_bits": unpack,
    "select_bits": select,
}
for _op in OPS.values():  # what has no drawing of its own takes its examples
    ARGUMENTS.setdefault(_op.name, lambda draw, op=_op: op.example(*draw(st.sampled_from(op.examples))))


def op_of(name: str) -> Any:
    return getattr(torch.ops.laconic, name).default


def looks(values: Any, device: str | None = None) -> list[Any]:
    """What a compiler knows about tensors, on another device if one is given."""
    return [
        (x.shape, x.dtype, x.stride(), x.storage_offset(), torch.device(device) if device else x.device)
        for x in tree_leaves(values)
        if isinstance(x, Tensor)
    ]


def test_every_op_is_in_the_table() -> None:
    known = {name.removeprefix("laconic::") for name in torch._C._dispatch_get_all_op_names() if "laconic::" in name}
    assert known == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_no_result_has_a_size_or_a_layout_that_depends_on_values(name: str) -> None:
    tags = set(op_of(name).tags)
    assert torch.Tag.pt2_compliant_tag in tags
    assert not tags & {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view}


@pytest.mark.parametrize("name", ARGUMENTS)
@settings(max_examples=6)
@given(data=st.data())
def test_the_fake_result_is_like_the_real_one(name: str, data: st.DataObject) -> None:
    check_fake(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
@settings(max_examples=150)
@given(data=st.data())
def test_the_fake_result_is_like_the_real_one_in_many_cases(name: str, data: st.DataObject) -> None:
    check_fake(name, data)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.15 reads it itself
@pytest.mark.parametrize("name", few(ARGUMENTS, 5, pytest.mark.ci))
@settings(max_examples=3)
@given(data=st.data())
def test_opcheck_passes(name: str, data: st.DataObject) -> None:
    """With inputs that need gradients, which results do not have, and compiled for any sizes."""
    arguments = ARGUMENTS[name](data.draw)
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    assume(all(x.numel() and "float8" not in str(x.dtype) for x in tensors))
    assume(name != "lossless_encode" or arguments[2] is not None)  # what lies behind such a message is undefined
    if not name.endswith("_"):
        for x in tensors:
            x.requires_grad_(x.is_floating_point())
    torch.library.opcheck(op_of(name), arguments)


def check_fake(name: str, data: st.DataObject) -> None:
    op, arguments = op_of(name), ARGUMENTS[name](data.draw)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, arguments)
        fake = op(*fakes)
        on_cuda = tree_map(lambda x: on_device(x, "cuda:0") if isinstance(x, Tensor) else x, fakes)
        fake_on_cuda = op(*on_cuda)
    on_meta = op(*tree_map(lambda x: on_device(x, "meta") if isinstance(x, Tensor) else x, arguments))
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    if all(x.numel() for x in tensors):  # torch fails to copy some that have no elements
        # It compares what an op leaves alone by products, which fp8 has not.
        has_fp8 = any("float8" in str(x.dtype) for x in tensors)
        checks = ("test_faketensor",) if has_fp8 else ("test_schema", "test_faketensor")
        torch.library.opcheck(op, arguments, test_utils=checks)
    before = looks(arguments)
    real = op(*arguments)
    assert looks(fake) == looks(real)
    assert looks(fake_on_cuda) == looks(real, "cuda:0")
    assert looks(on_meta) == looks(real, "meta")
    assert looks(fakes) == looks(arguments) == before  # what an op writes to keeps its layout


def on_device(x: Tensor, device: str) -> Tensor:
    """A tensor without values with the layout of `x` on another device."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    memory = torch.empty(size + x.storage_offset(), dtype=x.dtype, device=device)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def test_a_fake_that_says_something_else_is_found() -> None:
    codes, scales = torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, 1)
    assert looks((codes, scales)) != looks((codes.t(), scales))
    assert looks(codes) != looks(codes.char())
    assert looks(codes) != looks(codes, "cuda:0")
