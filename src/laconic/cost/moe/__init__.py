"""Cost model of mixture-of-experts layers: shapes, rates and the seconds of every route."""

from laconic.cost.moe.fsmoe import FSMOE, fsmoe_route, layer_times, shares_link
from laconic.cost.moe.parm import BASELINE, S1, S2, parm_routes, saa_seconds
from laconic.cost.moe.rates import Coding, MoERates, Price, default_moe_path
from laconic.cost.moe.routes import Route, Step, fastest
from laconic.cost.moe.shape import LayerShape
from laconic.topology import GROUPS, GridLayout

__all__ = [
    "BASELINE",
    "FSMOE",
    "GROUPS",
    "S1",
    "S2",
    "Coding",
    "GridLayout",
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
    "shares_link",
]
