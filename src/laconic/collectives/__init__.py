"""Collectives over codecs: public functions, process group backend, background executor and choice of a codec."""

from __future__ import annotations

from laconic.collectives.api import all_gather, all_reduce, all_to_all, broadcast, gather, reduce_scatter, scatter
from laconic.collectives.codec import Auto, Blockwise, Codec, Lossless, Raw
from laconic.collectives.engine.layouts import TwoLevel
from laconic.collectives.point_to_point import recv, send
from laconic.collectives.process_group.group import ProcessGroupLaconic, ProcessGroupOptions
from laconic.collectives.runtime.agent_store import agent_store
from laconic.collectives.runtime.background import Work

__all__ = [
    "Auto",
    "Blockwise",
    "Codec",
    "Lossless",
    "ProcessGroupLaconic",
    "ProcessGroupOptions",
    "Raw",
    "TwoLevel",
    "Work",
    "agent_store",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
]
