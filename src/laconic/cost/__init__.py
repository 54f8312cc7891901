"""What a run costs, by arithmetic: bytes by rank and kind, seconds by step, and the plan that fits a budget.

Pure Python at import; nothing here needs torch.
"""

from laconic.cost.memory import Job, Layout, Prediction, RankMemory, Settings, predict
from laconic.cost.model_shape import ModelShape
from laconic.cost.plan import Plan, load_plan
from laconic.cost.units import Batch, Choice, Unit

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
