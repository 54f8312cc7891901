"""Numbers that kernels use by name."""

from __future__ import annotations

import triton.language as tl


class KernelConstant(tl.constexpr):
    """A tl.constexpr that Triton compares quickly.

    Every launch compares every number that its kernel uses by name with a copy from when it was compiled, at 4 us each:
    ten of them cost the host more than all else of a launch. This one is its own copy.
    """

    def __deepcopy__(self, _: object) -> KernelConstant:
        return self

    def __ne__(self, other: object) -> bool:
        return other is not self and bool(super().__ne__(other))
