"""What an op is: torch's schema, shapes of its results, and small examples; `declare` makes the rest of it.

An op has one declaration, in the file of its family in this folder. The functions of the same name in `reference/`,
`native/` and `triton/` compute it; they run the check of this file first, so that a bad argument is refused with the
same words everywhere and no kernel sees a pointer that does not fit its sizes. Dispatch, self-checks, tests and
`laconic doctor` read `OPS`.

The ops carry no gradient: their outputs never require grad, whatever their inputs do. All are functional but those with
a trailing underscore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types and scale types of the block-wise ops."""

_LIBRARY = torch.library.Library("laconic", "DEF")

Arguments = tuple[Any, ...]
Choices = tuple[Any, ...]
"""What selects a kernel's code: dtypes, formats, which optional tensors there are."""


@dataclass(frozen=True)
class Op:
    """An op that has kernels."""

    name: str
    family: str
    """The name of its file here, in `reference/`, `native/` and `triton/`."""
    choices_of: Callable[..., Choices]
    """The choices that a call makes, of its arguments."""
    example: Callable[..., Arguments]
    """Small arguments on the CPU, of choices."""
    examples: Sequence[Choices]
    """Choices that cover the code of the op's kernels."""
    significant: Callable[[Tensor], Tensor]
    """The part of the first result that is defined."""


OPS: dict[str, Op] = {}
"""Every op that has kernels."""

DIRECT: dict[str, Callable[..., Any]] = {}
"""What computes each op on the CPU."""


def declare(
    schema: str,
    *,
    fake: Callable[..., Any],
    examples: Sequence[Choices] = (),
    example: Callable[..., Arguments] | None = None,
    choices_of: Callable[..., Choices] | None = None,
    significant: Callable[[Tensor], Tensor] = lambda result: result,
    composed: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Define an op; return torch's.

    Args:
        schema: in torch's words, with the name of the op; `Tensor(a!)` is written to.
        fake: takes the op's arguments, checks them, and returns results without values, of the right shapes, dtypes and
            devices.
        examples, example, choices_of, significant: as in `Op`.
        composed: computes the op on every device by calling others. Such an op has no kernels, and no examples.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=[torch.Tag.pt2_compliant_tag])
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"laconic::{name}", fake, lib=_LIBRARY)
    if composed is not None:
        implement(name, composed, "CompositeExplicitAutograd")
    else:
        assert example is not None, name
        assert choices_of is not None, name
        OPS[name] = Op(name, example.__module__.rpartition(".")[2], choices_of, example, examples, significant)
    op: Callable[..., Any] = getattr(torch.ops.laconic, name).default
    return op


def implement(op: str, function: Callable[..., Any], key: str) -> None:
    """Let `function`, positional arguments, compute `op` for a dispatch key.

    Dynamo neither compiles it nor what it calls, as where it reaches the function in the middle of code that it left
    to Python: below a dispatch mode of the user's, say. Other than `torch.compiler.disable` this costs a call nothing.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    _LIBRARY.impl(op, function, key)


def is_direct(*tensors: Tensor | None) -> bool:
    """Whether an op on all of these goes past torch's dispatcher, which takes longer than the kernel of small tensors.

    So it does in eager mode, for plain tensors on the CPU, as long as no mode, transform or profiler watches ops. A
    kernel reads memory, which is not a subclass's value (a DTensor's, a FakeTensor's), nor that of a negated view.
    """
    if torch.compiler.is_dynamo_compiling():  # what else traces does so on tensors of other classes
        return False
    for x in tensors:
        if x is not None and (type(x) is not Tensor or not x.is_cpu or x.is_neg()):
            return False
    return not _num_dispatch_modes() and not _num_function_modes() and _transforms() is None and not _profiler_enabled()


def is_memory(*tensors: Tensor) -> bool:
    """Whether a kernel outside of torch's dispatcher may read these, on any device: plain tensors or parameters.

    They have to have memory, as empty tensors, those that FSDP has freed and torch's symbolic zeros do not. Modes and
    profilers that watch do not matter, as a result must not depend on them; but one that traces has to see all.
    """
    if torch.compiler.is_dynamo_compiling() or _transforms() is not None or _mode(_PROXY) is not None:
        return False
    return not any([type(x) not in _PLAIN or x.is_neg() or not x.data_ptr() for x in tensors])


_PLAIN = (Tensor, torch.nn.Parameter)
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_mode: Callable[[Any], object] = torch._C._get_dispatch_mode

_num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_transforms: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled


def names(dtypes: Sequence[torch.dtype]) -> str:
    """Dtypes as an error lists them: "float32, bfloat16"."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


# --- for examples ---


def random_values(*shape: int, seed: int = 0) -> Tensor:
    """Fp32 with magnitudes over some decades and zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")
    values *= torch.exp2(torch.randint(-6, 6, shape, generator=generator, device="cpu"))
    return torch.where(torch.rand(*shape, generator=generator, device="cpu", dtype=torch.float32) < 0.1, 0.0, values)


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    """Codes of any kind."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device="cpu")
