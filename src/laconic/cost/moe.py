"""The cost of mixture-of-experts layers in one place: shapes, rates and the seconds of every route."""

from laconic.cost.fsmoe import FSMOE, fsmoe_route, layer_times, shares_a_wire
from laconic.cost.moe_rates import Coding, MoERates, Price, default_moe_path
from laconic.cost.moe_shape import GROUPS, GridShape, LayerShape
from laconic.cost.parm import BASELINE, S1, S2, parm_routes, saa_seconds
from laconic.cost.routes import Route, Step, fastest

__all__ = [
    "BASELINE",
    "FSMOE",
    "GROUPS",
    "S1",
    "S2",
    "Coding",
    "GridShape",
    "LayerShape",
    "MoERates",
    "Price",
    "Route",
    "Step",
    "default_moe_path",
    "fastest",
    "fsmoe_route",
    "layer_times",
    "parm_routes",
    "saa_seconds",
    "shares_a_wire",
]
