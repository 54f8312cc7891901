"""Cost of a run by arithmetic: bytes by rank and kind, seconds by step, and the plan that fits a budget.

Pure Python at import; nothing here needs torch. Bytes of a model are read off it by `laconic.train.memory.trace`.
"""

from laconic.cost.memory.job import Job, Layout, Settings
from laconic.cost.memory.predict import Prediction, RankMemory, predict
from laconic.cost.memory.saved_tensors import Batch, Choice, Unit
from laconic.cost.memory.traced import TracedModel
from laconic.cost.planner.plan import Plan, load_plan

__all__ = [
    "Batch",
    "Choice",
    "Job",
    "Layout",
    "Plan",
    "Prediction",
    "RankMemory",
    "Settings",
    "TracedModel",
    "Unit",
    "load_plan",
    "predict",
]
