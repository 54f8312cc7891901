"""A computation that a layer does while its rows travel, and its place in backward.

[Note: order of backward]
autograd runs what is ready with the highest sequence number first, and gradients that meet at one tensor are added in
the order in which they come. A computation that is moved in forward is moved in backward, too, and a sum of three
gradients is then rounded differently. So its nodes get the numbers of the place where it was called, if moving them
would change a sum. Moving them between the two nodes of an exchange's start and end changes none of a layer's: what the
exchange gives back goes on to the layer's input from the first of the two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class ReservedPlace:
    """Sequence numbers for nodes of autograd that will be made later but belong here."""

    def __init__(self, num_nodes: int) -> None:
        self._numbers = _fresh_numbers(num_nodes) if torch.is_grad_enabled() else []

    def take(self, nodes: list[torch.autograd.graph.Node]) -> bool:
        """Move `nodes` here, in their order; return False, having moved none, where there are too many."""
        if len(nodes) > len(self._numbers):
            return False
        for node, number in zip(nodes, self._numbers, strict=False):
            node._set_sequence_nr(number)  # type: ignore[attr-defined]
        return True


class Meanwhile:
    """Runs `compute` once: in the layer, while rows travel, or when somebody asks for the result first."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute: Callable[[], Tensor] | None = compute
        self._result: Tensor | None = None

    @property
    def has_run(self) -> bool:
        """Whether the result is there."""
        return self._result is not None

    def run(self) -> Tensor:
        """Return the result; compute it now if that has not been done."""
        if self._result is None:
            assert self._compute is not None, "the computation has failed before"
            compute, self._compute = self._compute, None
            self._result = compute()
        return self._result


def next_number() -> int:
    """Return the sequence number of the next node of autograd that this thread makes."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def nodes_since(out: Tensor, first: int, end: int) -> list[torch.autograd.graph.Node]:
    """List the nodes of the graph of `out` with sequence numbers first ... end - 1, ascending."""
    found: dict[int, torch.autograd.graph.Node] = {}
    seen, waiting = set(), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        number = node._sequence_nr()
        if first <= number < end:
            found[number] = node
            waiting += [following for following, _ in node.next_functions]
    return [found[number] for number in sorted(found)]


def _fresh_numbers(count: int) -> list[int]:
    anchor = torch.empty(0, requires_grad=True, dtype=torch.float32, device="cpu")
    numbers = []
    for _ in range(count):
        node = anchor.view_as(anchor).grad_fn
        assert node is not None, "gradients are on"
        numbers.append(node._sequence_nr())
    return numbers
