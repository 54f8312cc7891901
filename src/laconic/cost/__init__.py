"""Cost of a run by arithmetic: bytes by rank and kind, seconds by step, and the plan that fits a budget.

Pure Python at import; nothing here needs torch.
"""

from laconic.cost.memory.model_shape import ModelShape
from laconic.cost.memory.predict import Job, Layout, Prediction, RankMemory, Settings, predict
from laconic.cost.memory.saved_tensors import Batch, Choice, Unit
from laconic.cost.planner.plan import Plan, load_plan

__all__ = [
    "Batch",
    "Choice",
    "Job",
    "Layout",
    "ModelShape",
    "Plan",
    "Prediction",
    "RankMemory",
    "Settings",
    "Unit",
    "load_plan",
    "predict",
]
