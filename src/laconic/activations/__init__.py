"""Activation compression: saved tensors in about four bits, by sites, policies, plans and hand-written backwards."""

from laconic.activations.apply import compress_activations, decompress_activations
from laconic.activations.checkpoint import checkpoint
from laconic.activations.choice import Choice, Offload, Recompute
from laconic.activations.loss import linear_cross_entropy
from laconic.activations.plan import ActivationPlan, Policy, careful_head, uniform
from laconic.activations.report import Report, SiteReport, saved_nbytes_per_token
from laconic.activations.rounding import seed_rounding
from laconic.activations.sites import Site, find_sites
from laconic.activations.tracker import SavedTensorTracker

__all__ = [
    "compress_activations",
    "decompress_activations",
    "linear_cross_entropy",
    "checkpoint",
    "seed_rounding",
    "saved_nbytes_per_token",
    "Report",
    "SiteReport",
    "SavedTensorTracker",
    "Site",
    "find_sites",
    "ActivationPlan",
    "Choice",
    "Offload",
    "Recompute",
    "Policy",
    "careful_head",
    "uniform",
]
