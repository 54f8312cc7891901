"""What each op is, one file per family: torch's schema, checks, shapes of results, examples, the public function."""

from laconic.ops.declarations import accumulate, adamw, bits, blockwise, gated, lossless, reduce, rows
from laconic.ops.declarations.op import DIRECT, DTYPES, OPS, implement

__all__ = [
    "DIRECT",
    "DTYPES",
    "implement",
    "OPS",
    "accumulate",
    "adamw",
    "bits",
    "blockwise",
    "gated",
    "lossless",
    "reduce",
    "rows",
]
