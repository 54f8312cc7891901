"""What mutation.py changes, and the tests that have to notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Room:
    """Files whose mutants the same tests have to notice.

    Attributes:
        files: below src/laconic.
        tests: below tests, the quick ones first: a run ends with the first that fails.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "blockwise": Room(
        ("ops/reference/blockwise.py", "formats/blockwise.py"),
        ("ops/test_numerics.py", "ops/test_affine.py", "ops/test_native.py", "formats/test_blockwise.py"),
    ),
    "adamw": Room(("ops/reference/adamw.py",), ("ops/test_adamw.py",)),
    "other ops": Room(
        tuple(f"ops/reference/{name}.py" for name in ("accumulate", "bits", "gated", "reduce", "rows")),
        tuple(f"ops/test_{name}.py" for name in ("accumulate", "bits", "gated", "reduce", "rows")),
    ),
    "lossless": Room(
        ("ops/reference/lossless.py", "ops/reference/lossless_ranked.py", "formats/lossless.py"),
        (
            "ops/test_lossless.py",
            "ops/test_lossless_native.py",
            "formats/test_lossless.py",
            "formats/test_lossless_ranked.py",
        ),
    ),
    "entropy": Room(("ops/reference/entropy.py", "ops/entropy.py"), ("formats/test_entropy.py",)),
    "activations": Room(
        (
            *(f"activations/backward/{name}.py" for name in ("functions", "gated", "norms")),
            *(f"activations/keep/{name}.py" for name in ("kept", "witnesses")),
            "ops/derivatives.py",
        ),
        (
            *(f"activations/test_{name}.py" for name in ("kept", "functions", "norms", "gated_products", "notes")),
            "ops/test_derivatives.py",
            "activations/test_second_derivatives.py",
            *(f"activations/test_{name}.py" for name in ("witnesses", "hand_written", "compress")),
        ),
    ),
    "gradients": Room(
        ("gradients/store.py", "formats/coded_gradient.py", "formats/gradient.py"),
        ("gradients/test_store.py", "gradients/test_coded_gradient.py"),
    ),
    "coded sums": Room(
        ("gradients/reduce.py",),
        ("gradients/test_store_ranks.py", "gradients/test_flipped_messages.py", "distributed/test_reduce.py"),
    ),
    "dispatch": Room(
        tuple(f"moe/dispatch/{name}.py" for name in ("chunking", "flat", "send_plan", "staged", "traffic")),
        tuple(f"moe/test_{name}.py" for name in ("traffic", "legs", "cuts", "flat", "pipeline")),
    ),
}
