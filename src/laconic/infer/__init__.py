"""Inference of mixture-of-experts models on attention workers and expert workers (FinDEP, arXiv 2512.21487).

>>> from laconic.infer import Engine
>>> with Engine("path/to/model", attention=1, experts=1) as engine:  # doctest: +SKIP
...     engine.generate([[1, 2, 3]], max_new_tokens=8)
"""

from __future__ import annotations

from laconic.infer.auto_plan import AutoPlan
from laconic.infer.engine import Engine
from laconic.infer.in_flight import Generation
from laconic.infer.launch import serve_rank
from laconic.infer.payload import LinkTraffic
from laconic.infer.recording import Recording
from laconic.infer.run_trace import RunTrace, TraceSummary, WorkerUse
from laconic.infer.sampling import ChosenToken, Sampling
from laconic.infer.transformers_seam import planned_shape
from laconic.infer.workers import WorkerReport
from laconic.schedule.inference import InferencePlan

__all__ = [
    "AutoPlan",
    "ChosenToken",
    "Engine",
    "Generation",
    "InferencePlan",
    "LinkTraffic",
    "Recording",
    "RunTrace",
    "Sampling",
    "TraceSummary",
    "WorkerReport",
    "WorkerUse",
    "planned_shape",
    "serve_rank",
]
