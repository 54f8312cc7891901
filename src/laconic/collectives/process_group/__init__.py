"""The backend `laconic` of torch.distributed; importing it makes it known to torch."""

from __future__ import annotations

from laconic.collectives.process_group.group import ProcessGroupLaconic, ProcessGroupOptions

__all__ = ["ProcessGroupLaconic", "ProcessGroupOptions"]
