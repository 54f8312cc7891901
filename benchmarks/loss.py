"""The head of a language model: linear layer and cross entropy, plain beside chunked.

U is tokens x hidden x 2 bytes, what a layer's input takes in bf16.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kit.timing import seconds_of
from benchmarks.registry import Options, Table, benchmark, dtype_name
from laconic import BlockFormat, linear_cross_entropy

# (vocabulary, hidden size, tokens): the demo's; a small model's; the ratio of a Llama-3-8B, 128,256 to 4096, at an
# eighth of its size.
_SIZES = ((257, 256, 4096), (32000, 512, 2048), (16032, 512, 2048))
_SMOKE = ((257, 64, 64),)


@benchmark("loss")
def loss(options: Options) -> list[Table]:
    """Time of forward and backward, what is kept between them, and the most that is there at once."""
    sizes = _SMOKE if options.smoke else _SIZES
    return [_table(*size, dtype, options) for size in sizes for dtype in (torch.float32, torch.bfloat16)]


def _table(vocabulary: int, hidden_size: int, tokens: int, dtype: torch.dtype, options: Options) -> Table:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, hidden_size, generator=generator) / hidden_size**0.5).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator)

    def plain() -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels)

    cases: dict[str, Callable[[], Tensor]] = {
        "plain": plain,
        "chunked": lambda: linear_cross_entropy(hidden, weight, labels),
        "chunked, hidden states at int8": lambda: linear_cross_entropy(
            hidden, weight, labels, format=BlockFormat("int8")
        ),
    }

    def step(case: Callable[[], Tensor]) -> None:
        case().backward()
        hidden.grad = weight.grad = None

    seconds = seconds_of({name: lambda case=case: step(case) for name, case in cases.items()}, options.rounds)
    reference = torch.autograd.grad(plain(), weight)[0].double()
    unit = tokens * hidden_size * 2
    rows = []
    for name, case in cases.items():
        value, kept = _kept_nbytes(case, hidden, weight, labels)
        error = (torch.autograd.grad(value, weight)[0].double() - reference).norm() / reference.norm()
        with _Peak() as peak:
            step(case)
        rows.append(
            (
                name,
                f"{seconds[name] * 1e3:.0f} ms",
                f"{seconds[name] / seconds['plain']:.2f}",
                f"{kept / unit:.2f} U",
                f"{(peak.nbytes - weight.nbytes - hidden.nbytes) / unit:.1f} U",
                f"{abs(value.item() - plain().item()):.1e}",
                f"{error:.1e}",
            )
        )
    return Table(
        f"Vocabulary {vocabulary:,}, hidden {hidden_size}, {tokens:,} tokens, {dtype_name(dtype)}, "
        f"{options.thread_text}",
        ("", "forward and backward", "of plain", "kept for backward", "peak beside the gradients", "loss off by", "dW"),
        rows,
        "Kept: what autograd saves, labels and parameters left out, and gradients that the chunked loss makes in "
        "forward. dW: relative difference to the plain gradient.",
    )


def _kept_nbytes(case: Callable[[], Tensor], *known: Tensor) -> tuple[Tensor, int]:
    """The loss, and the bytes of what autograd saved for it that was not there before; hidden states count."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = case()
    for tensor in known[1:]:
        storages.pop(tensor.untyped_storage()._cdata, None)
    return value, sum(storage.nbytes() for storage in storages.values())


class _Peak(TorchDispatchMode):
    """Counts the bytes of all tensors made by operations while they live; `nbytes` is the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.nbytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen and storage._cdata not in given:
                    self._add(tensor, storage._cdata, storage.nbytes())
        return result

    def _add(self, tensor: Tensor, key: int, nbytes: int) -> None:
        # Views that outlive the first tensor of a storage are missed; none of what is measured here has such.
        self._seen.add(key)
        self.now += nbytes
        self.nbytes = max(self.nbytes, self.now)

        def forget() -> None:
            self._seen.discard(key)
            self.now -= nbytes

        weakref.finalize(tensor, forget)
