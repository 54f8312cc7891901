"""Activation compression: saved tensors in about four bits, by sites, policies, plans and hand-written backwards."""

from laconic.activations.forwards.checkpoint import checkpoint
from laconic.activations.host.tracker import SavedTensorTracker
from laconic.activations.keep.choice import Choice, Offload, Recompute
from laconic.activations.keep.rounding import seed_rounding
from laconic.activations.recognize.plan import ActivationPlan, Policy, careful_head, uniform
from laconic.activations.recognize.sites import Site, find_sites
from laconic.activations.whole_model.apply import compress_activations, decompress_activations
from laconic.activations.whole_model.loss import linear_cross_entropy
from laconic.activations.whole_model.report import Report, SiteReport, saved_nbytes_per_token

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
