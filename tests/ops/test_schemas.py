"""What the ops accept, what they refuse, and what the compiler may assume about them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import laconic.ops
from laconic.errors import FormatError
from laconic.ops import dequantize_blockwise, multiply_quantize_blockwise, quantize_blockwise, reference
from laconic.ops.declarations import DIRECT, OPS
from tests.grid import slow_but
from tests.ops.cases import CODES, DTYPES, same_bits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": "nf5"}, f"code is 'nf5', but it must be one of {', '.join(CODES)}"),
        ({"block_size": 48}, "block_size is 48, but it must be one of 16, 32, 64, 128, 256"),
        ({"scale_dtype": torch.float64}, "scale_dtype is torch.float64, but it must be one of float32, bfloat16"),
        ({"x": torch.ones(4, dtype=torch.int32)}, "x.dtype is torch.int32, but it must be one of float32"),
        ({"center": torch.ones(4).double()}, "center.dtype is torch.float64, but it must be float32"),
        ({"center": torch.ones(3)}, "center has shape (3,), but for rows of length 4 it is (4,)"),
        ({"center": torch.ones(1, 4)}, "center has shape (1, 4), but for rows of length 4 it is (4,)"),
        ({"center": torch.ones(4, device="meta")}, "center is on meta, but what it is the center of is on cpu"),
        ({"seed": 2**63}, "seed is 9223372036854775808, but it must be None or fit in 64 bits"),
    ],
)
def test_bad_argument_of_quantize_is_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"x": torch.ones(4), "code": "nf4", "block_size": 64} | change
    with pytest.raises(FormatError, match=re.escape(message)):
        quantize_blockwise(arguments.pop("x"), **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": "nf5"}, f"code is 'nf5', but it must be one of {', '.join(CODES)}"),
        ({"block_size": 48}, "block_size is 48, but it must be one of"),
        ({"dtype": torch.float64}, "dtype is torch.float64, but it must be one of float32, bfloat16, float16"),
        ({"codes": torch.zeros(2, 50, dtype=torch.int8)}, "codes.dtype is torch.int8, but it must be uint8"),
        ({"scales": torch.zeros(2, 2, dtype=torch.int8)}, "scales.dtype is torch.int8, but it must be one of"),
        ({"scales": torch.zeros(2, 2, device="meta")}, "codes are on cpu and scales on meta, but both must be on one"),
        ({"scales": torch.zeros(3, 2)}, r"codes have shape \(2, 50\) and scales \(3, 2\), but they must .* agree"),
        ({"scales": torch.zeros(2)}, "but they must have at least one dimension and agree"),
        ({"scales": torch.zeros(2, 3)}, "scales in 3, but length 100 in nf4 with block_size 64 takes 50 and 2"),
        ({"length": 102}, "codes end in 50 and scales in 2, but length 102 in nf4 with block_size 64 takes 51 and 2"),
        ({"center": torch.ones(64)}, r"center has shape \(64,\), but for rows of length 100 it is \(100,\)"),
        ({"center": torch.ones(100).half()}, "center.dtype is torch.float16, but it must be float32"),
        ({"length": -1}, "length is -1, but it must be at least 0"),
    ],
)
def test_bad_argument_of_dequantize_is_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "codes": torch.zeros(2, 50, dtype=torch.uint8),
        "scales": torch.zeros(2, 2),
        "length": 100,
    } | change
    with pytest.raises(FormatError, match=message):
        dequantize_blockwise(arguments.pop("codes"), arguments.pop("scales"), **arguments)


@pytest.mark.parametrize("dtype", slow_but(DTYPES, torch.bfloat16))
def test_compiled_call_gives_the_same_bits(dtype: torch.dtype) -> None:
    def there_and_back(x: torch.Tensor, seed: int | None) -> torch.Tensor:
        center = None if seed is None else x[0].float()
        codes, scales = quantize_blockwise(x * 2, code="nf4", block_size=32, seed=seed, center=center)
        return dequantize_blockwise(
            codes, scales, length=x.shape[-1], block_size=32, dtype=x.dtype, after=x, center=center
        )

    compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((4, 70), (4, 71), (7, 64)):
        x = torch.randn(shape).to(dtype)
        for seed in (None, 3):
            assert same_bits(compiled(x, seed), there_and_back(x, seed))


def test_results_carry_no_gradient() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    codes, scales = quantize_blockwise(x)
    back = dequantize_blockwise(codes, scales.requires_grad_(), length=64)
    assert not codes.requires_grad
    assert not back.requires_grad
    assert not any(result.requires_grad for result in multiply_quantize_blockwise(x, x))
    assert not reference.dequantize_blockwise(codes, scales, "nf4", 64, 64, torch.float32).requires_grad


@pytest.mark.parametrize("name", sorted(OPS))
def test_dynamo_does_not_look_into_what_computes_an_op(name: str) -> None:
    # It would, below code that it has left to Python for ever, as it does with what once ran under a dispatch mode.
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        compiled.append(graph)
        return graph

    arguments = OPS[name].example(*OPS[name].examples[0])

    def left_to_python() -> object:
        return DIRECT[name](*arguments)

    torch._dynamo.reset()
    torch._dynamo.eval_frame.skip_code(left_to_python.__code__)
    torch.compile(left_to_python, backend=backend)()
    assert not compiled


class Watched(torch.Tensor):
    """Has memory, unlike most subclasses, so that an op which reads past it gives a result."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of Watched")


BLOCKWISE = [name for name, op in OPS.items() if op.family in ("blockwise", "gated", "linear")]


def tensors_of(name: str) -> tuple[dict[str, Any], list[str]]:
    """An op's arguments by name, and which of them are tensors."""
    op = OPS[name]
    names = [argument.name for argument in getattr(torch.ops.laconic, name).default._schema.arguments]
    choices = next((each for each in op.examples if len(each) > 4 and each[-1] is True), op.examples[-1])
    arguments = dict(zip(names, op.example(*choices), strict=False))
    return arguments, [key for key, value in arguments.items() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", BLOCKWISE)
def test_no_argument_is_read_past_its_subclass_or_its_negation(name: str) -> None:
    public = getattr(laconic.ops, name)
    arguments, tensors = tensors_of(name)
    for key in tensors:
        value = arguments[key]
        with pytest.raises((NotImplementedError, TypeError), match="Watched"):
            public(**arguments | {key: value.as_subclass(Watched)})
        if value.is_floating_point():
            found, wanted = (public(**arguments | {key: x}) for x in (torch._neg_view(value), -value))
            for one, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
                assert same_bits(one, other), key
