"""Cost model and planner of mixture-of-experts inference on attention and expert workers (FinDEP, arXiv 2512.21487)."""

from laconic.cost.infer.arrivals import ArrivalChoice, Arrivals, Steady, choose_for_arrivals
from laconic.cost.infer.costs import InferenceCostModel, Split, Workload
from laconic.cost.infer.engine_plan import Demand, EngineChoice, EngineLimits, Fixed, choose_for_engine
from laconic.cost.infer.memory import Limit, largest_batch, worker_nbytes
from laconic.cost.infer.planner import Candidate, Choice, Search, Workers, choose
from laconic.cost.infer.rates import InferenceRates, WorkerRates, default_infer_path
from laconic.cost.infer.shape import MODELS, InferenceShape
from laconic.cost.infer.vllm_afd import VllmAfd, VllmServe, plan_vllm_afd

__all__ = [
    "MODELS",
    "ArrivalChoice",
    "Arrivals",
    "Candidate",
    "Choice",
    "Demand",
    "EngineChoice",
    "EngineLimits",
    "Fixed",
    "InferenceCostModel",
    "InferenceRates",
    "InferenceShape",
    "Limit",
    "Search",
    "Steady",
    "Split",
    "VllmAfd",
    "VllmServe",
    "WorkerRates",
    "Workers",
    "Workload",
    "choose",
    "choose_for_arrivals",
    "choose_for_engine",
    "default_infer_path",
    "largest_batch",
    "plan_vllm_afd",
    "worker_nbytes",
]
