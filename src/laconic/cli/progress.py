"""A progress bar in bytes, on terminals only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(total_nbytes: Callable[[], int], what: str) -> Iterator[Callable[[int], None] | None]:
    """Show a progress bar while the block runs.

    Args:
        total_nbytes: returns the bytes of the whole work; called only if there is a bar.
        what: label of the bar.

    Yields:
        A function to call with each number of further bytes done; None when stderr is no terminal or tqdm is missing.
    """
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield None
        return
    with tqdm(
        total=total_nbytes(), desc=what, unit="B", unit_scale=True, dynamic_ncols=True, leave=False, file=sys.stderr
    ) as bar:

        def advance(nbytes: int) -> None:
            bar.update(nbytes)

        yield advance
