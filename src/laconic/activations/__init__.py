"""Activations kept for backward in about four bits: sites, policies, plans, and the functions that make it so."""

from laconic.activations.apply import compress_activations, decompress_activations
from laconic.activations.loss import linear_cross_entropy
from laconic.activations.plan import ActivationPlan, Policy, careful_head, uniform
from laconic.activations.report import Report, SiteReport, saved_nbytes_per_token
from laconic.activations.sites import Site, find_sites
from laconic.activations.tracker import SavedTensorTracker

__all__ = [
    "compress_activations",
    "decompress_activations",
    "linear_cross_entropy",
    "saved_nbytes_per_token",
    "Report",
    "SiteReport",
    "SavedTensorTracker",
    "Site",
    "find_sites",
    "ActivationPlan",
    "Policy",
    "careful_head",
    "uniform",
]
