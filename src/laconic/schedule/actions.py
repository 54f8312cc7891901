"""Actions of a pipeline: a pass of one stage over one micro-batch.

The text form is that of torch.distributed.pipelining: stage, kind, micro-batch, so `2F0` is the forward of micro-batch
0 through stage 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from laconic.errors import ScheduleError

Kind = Literal["F", "B", "I", "W"]

_PATTERN = re.compile(r"(\d+)([FBIW])(\d+)")
_KINDS: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}


@dataclass(frozen=True, order=True)
class Action:
    """A pass of one stage over one micro-batch.

    Attributes:
        stage: of the model, counted from the first layers.
        kind: "F" forward, "B" the whole backward, or its two halves "I" (gradient of the input) and "W" (of the
            weights). "B" or "W" frees the activations that forward saved.
        micro_batch: of the optimizer step.
    """

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def parse_action(text: str) -> Action:
    """Read what `str(action)` wrote.

    Raises:
        ScheduleError: the text is no action.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            f"action is {text!r}, but it must be stage, kind (F, B, I or W) and micro-batch, for example 2F0"
        )
    return Action(int(match[1]), _KINDS[match[2]], int(match[3]))


def actions_of(action: Any) -> Iterator[Action]:
    """Yield the passes in one entry of torch's `pipeline_order`: none, one, or those of an overlapped pair.

    Communication and (un)sharding are no passes. None is no entry.
    """
    if action is None:
        return
    if getattr(action, "sub_actions", None):
        for part in action.sub_actions:
            yield from actions_of(part)
        return
    kind = getattr(action.computation_type, "value", action.computation_type)
    if kind in _KINDS:
        yield Action(action.stage_index, _KINDS[kind], action.microbatch_index)
