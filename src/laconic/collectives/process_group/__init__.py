"""Backend `laconic` of torch.distributed; importing it registers it with torch."""

from __future__ import annotations

from laconic.collectives.process_group.group import ProcessGroupLaconic, ProcessGroupOptions

__all__ = ["ProcessGroupLaconic", "ProcessGroupOptions"]
