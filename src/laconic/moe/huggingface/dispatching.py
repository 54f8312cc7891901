"""The dispatcher of a Hugging Face model's layers: a path by name or one of the caller's, checked against the grid."""

from __future__ import annotations

from collections.abc import Callable

from laconic.collectives.codec import Codec
from laconic.errors import ConfigError
from laconic.moe.dispatch.base import Dispatcher, LocalDispatcher
from laconic.moe.dispatch.expert_sharded import ShardedDispatcher
from laconic.moe.dispatch.flat import FlatDispatcher
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.dispatch.parm import Path, S1Dispatcher, make_dispatcher
from laconic.moe.parallel.grid import Grid


def choose_dispatcher(
    grid: Grid | None, wanted: Path | Callable[[Grid | None], Dispatcher] | None, codec: Codec | str
) -> Dispatcher:
    """Return the dispatcher of one layer: the wanted path, what a function makes, or for None what fits the grid.

    A path that does not exist, or is none for this grid, is a ConfigError. `codec` is of rows, but not of a function's.
    """
    if callable(wanted):
        made = wanted(grid)
        if grid is not None:
            _check(made, grid)
        return made
    if grid is None:
        if wanted is not None:
            raise ConfigError(f"dispatcher is {wanted!r}, but there is no mesh to send rows over; pass one")
        return LocalDispatcher()
    if wanted is None and grid.layout.joint == grid.layout.mp == 1:
        return LocalDispatcher()
    made = make_dispatcher(grid, wanted or ("s1" if grid.layout.mp > 1 else "joint"), codec=codec)
    _check(made, grid)
    return made


def _check(dispatcher: Dispatcher, grid: Grid) -> None:
    """Refuse known dispatchers that would count a row twice or leave a shard's part of an output out."""
    name, mp, esp = type(dispatcher).__name__, grid.layout.mp, grid.layout.esp
    of_own_tokens = (LocalDispatcher, FlatDispatcher, ShardedDispatcher, HierarchicalDispatcher)
    if mp > 1 and isinstance(dispatcher, of_own_tokens):
        raise ConfigError(
            f"dispatcher is a {name} and mp is {mp}, but it would send the tokens that MP ranks have alike {mp} times;"
            " use path s1, s2 or sharded, or S1Dispatcher(grid, ...) around it"
        )
    inner = dispatcher.inner if isinstance(dispatcher, S1Dispatcher) else dispatcher
    adds_shards = inner.num_shards == esp if isinstance(inner, FlatDispatcher) else isinstance(inner, ShardedDispatcher)
    if esp > 1 and isinstance(inner, of_own_tokens) and not adds_shards:
        raise ConfigError(
            f"dispatcher is a {type(inner).__name__} and esp is {esp}, but it does not add up the parts of {esp} shards"
            f" of an expert; use FlatDispatcher(grid.joint, num_shards={esp}) or ShardedDispatcher(grid.ep, grid.esp)"
        )
