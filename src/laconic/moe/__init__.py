"""Mixture-of-experts layers: gates, experts, dispatchers and schedules as small, exchangeable classes."""

from __future__ import annotations

from laconic.moe.dispatch.base import Dispatched, Dispatcher, ExpertRows, LocalDispatcher, RoutedShare, SharesTokens
from laconic.moe.dispatch.expert_sharded import ShardedDispatcher
from laconic.moe.dispatch.flat import FlatDispatcher
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.dispatch.parm import BaselineDispatcher, S1Dispatcher, S2Dispatcher, make_dispatcher
from laconic.moe.dispatch.staged import StagedDispatcher
from laconic.moe.experts.grouped_mm import grouped_mm
from laconic.moe.experts.modules import Experts, GatedExperts, GptExperts
from laconic.moe.experts.shard import expert_shard
from laconic.moe.gates import (
    CosineGate,
    ExpertChoiceGate,
    Gate,
    GShardGate,
    SigmoidGate,
    SinkhornGate,
    SoftmaxGate,
    SoftMoEGate,
    TokenChoiceGate,
    make_gate,
)
from laconic.moe.hooks import Hook
from laconic.moe.huggingface import Parallelized, parallelize
from laconic.moe.layer import MoELayer, Schedule, auxiliary_losses, moe_layers
from laconic.moe.parallel.grid import Grid, Level
from laconic.moe.permute import DenseOrder, Order, SortedOrder
from laconic.moe.pipeline.grad_reduce import DenseGradients, mean_over
from laconic.moe.pipeline.grad_reduce_fsdp2 import reduce_in_slots
from laconic.moe.pipeline.schedule import ChunkedSchedule
from laconic.moe.placement.balancer import ExpertBalancer
from laconic.moe.placement.consensus import agree_on_depth
from laconic.moe.placement.copies import Copied, copy_hot_experts
from laconic.moe.placement.expert_map import Placement
from laconic.moe.placement.migration import ExpertMover, Moved
from laconic.moe.placement.query import agree_on_swaps
from laconic.moe.replica_gradients import fully_shard_layers, reduce_gradients
from laconic.moe.router_bias import update_router_biases
from laconic.moe.routing import RoutedTokens, Routing, SoftRouting
from laconic.moe.tuning.autotune import Autotuned, LayerChoice, autotune
from laconic.topology import GridLayout

__all__ = [
    "parallelize",
    "Parallelized",
    "autotune",
    "Autotuned",
    "LayerChoice",
    "MoELayer",
    "Schedule",
    "ChunkedSchedule",
    "DenseGradients",
    "mean_over",
    "reduce_in_slots",
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
    "SinkhornGate",
    "CosineGate",
    "ExpertChoiceGate",
    "SoftMoEGate",
    "make_gate",
    "Order",
    "SortedOrder",
    "DenseOrder",
    "Dispatcher",
    "Dispatched",
    "StagedDispatcher",
    "ExpertRows",
    "RoutedTokens",
    "RoutedShare",
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
    "copy_hot_experts",
    "Copied",
    "Moved",
    "ExpertBalancer",
    "agree_on_depth",
    "agree_on_swaps",
    "expert_shard",
    "update_router_biases",
    "fully_shard_layers",
    "reduce_gradients",
    "Grid",
    "GridLayout",
    "Level",
]
