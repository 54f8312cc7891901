"""Mixture-of-experts layers whose parts are small classes of their own, and where their rows travel."""

from __future__ import annotations

from laconic.moe.agreement import agree_on_depth
from laconic.moe.autotune import Autotuned, LayerChoice, autotune
from laconic.moe.balancer import ExpertBalancer
from laconic.moe.dispatch import Dispatched, Dispatcher, LocalDispatcher, SharesTokens
from laconic.moe.drift import Drift
from laconic.moe.experts import Experts, GatedExperts, GptExperts
from laconic.moe.flat import FlatDispatcher
from laconic.moe.gates import (
    CosineGate,
    ExpertChoiceGate,
    Gate,
    GShardGate,
    SigmoidGate,
    SoftmaxGate,
    SoftMoEGate,
    TokenChoiceGate,
)
from laconic.moe.grid import Grid, GridLayout, Level
from laconic.moe.grouped import grouped_mm
from laconic.moe.hierarchy import HierarchicalDispatcher
from laconic.moe.hooks import Hook
from laconic.moe.huggingface import Parallelized, parallelize
from laconic.moe.layer import MoELayer, Schedule, auxiliary_losses, moe_layers
from laconic.moe.moves import ExpertMover, Moved
from laconic.moe.order import DenseOrder, Order, SortedOrder
from laconic.moe.parm import BaselineDispatcher, S1Dispatcher, S2Dispatcher, make_dispatcher
from laconic.moe.pipeline import PipelineSchedule
from laconic.moe.placement import Placement
from laconic.moe.replicas import fully_shard_layers, reduce_gradients
from laconic.moe.routing import Routing, SoftRouting
from laconic.moe.sharded import ShardedDispatcher
from laconic.moe.sharding import expert_shard
from laconic.moe.swap_look import agree_on_swaps
from laconic.moe.windows import DenseGradients, mean_over
from laconic.moe.windows_fsdp2 import reduce_in_windows

__all__ = [
    "parallelize",
    "Parallelized",
    "autotune",
    "Autotuned",
    "LayerChoice",
    "Drift",
    "MoELayer",
    "Schedule",
    "PipelineSchedule",
    "DenseGradients",
    "mean_over",
    "reduce_in_windows",
    "Hook",
    "auxiliary_losses",
    "moe_layers",
    "Routing",
    "SoftRouting",
    "Gate",
    "TokenChoiceGate",
    "SoftmaxGate",
    "GShardGate",
    "SigmoidGate",
    "CosineGate",
    "ExpertChoiceGate",
    "SoftMoEGate",
    "Order",
    "SortedOrder",
    "DenseOrder",
    "Dispatcher",
    "Dispatched",
    "LocalDispatcher",
    "HierarchicalDispatcher",
    "FlatDispatcher",
    "ShardedDispatcher",
    "SharesTokens",
    "BaselineDispatcher",
    "S1Dispatcher",
    "S2Dispatcher",
    "make_dispatcher",
    "Experts",
    "GptExperts",
    "GatedExperts",
    "grouped_mm",
    "Placement",
    "ExpertMover",
    "Moved",
    "ExpertBalancer",
    "agree_on_depth",
    "agree_on_swaps",
    "expert_shard",
    "fully_shard_layers",
    "reduce_gradients",
    "Grid",
    "GridLayout",
    "Level",
]
