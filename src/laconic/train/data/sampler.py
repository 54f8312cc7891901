"""The order of samples as a pure function: no state to save, none to restore.

Sample `global_index` of a run is position `index mod n` of epoch `index div n`; each epoch is a pseudo-random
permutation of the n samples, keyed by (seed, epoch). The permutation is a Feistel network over the next even power of
two, walked until it lands inside [0, n) (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
2002), so any position is reached directly. Resuming at a step, or on another number of processes, needs nothing but the
step.
"""

from __future__ import annotations

import functools

_MASK = (1 << 64) - 1
_ROUNDS = 6


def sample_id(seed: int, global_index: int, num_samples: int) -> int:
    """The sample in [0, num_samples) at `global_index` of the run with `seed`; every sample comes once per epoch."""
    epoch, value = divmod(global_index, num_samples)
    # At least 2 x 3 bits: a Feistel network over fewer reaches only some of the permutations.
    half_bits = max(3, ((num_samples - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    keys = _round_keys(seed, epoch)
    while True:
        left, right = value >> half_bits, value & mask
        for key in keys:
            left, right = right, left ^ (split_mix(key ^ right) & mask)
        value = left << half_bits | right
        if value < num_samples:
            return value


def global_indices(step: int, batch_size: int, accumulation: int, micro: int, rank: int, world: int) -> range:
    """Global indices of one micro-batch of one process.

    Step `step` owns the indices [step * batch_size, (step + 1) * batch_size) whatever the number of processes;
    consecutive ranges go to micro-batches, then to processes. The batch divides (`parallel_state.check_division`).
    """
    per_process = batch_size // (accumulation * world)
    start = step * batch_size + (micro * world + rank) * per_process
    return range(start, start + per_process)


def evenly(count: int, available: int) -> list[int]:
    """`count` numbers of [0, available), evenly spaced: the validation samples of an evaluation."""
    return [index * available // count for index in range(count)]


def split_mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): 64 bits in, 64 well-mixed bits out."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    key = split_mix(split_mix(seed & _MASK) ^ epoch)
    return tuple(split_mix(key + number) for number in range(_ROUNDS))
