"""`laconic explain`: predicted times of every candidate for sending a message, and the choice."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from laconic.cli.arguments import Parser, add_json, at_least
from laconic.cli.layer_flags import LAYER_FLAGS, add_layer, layer_shape
from laconic.cli.output import print_json
from laconic.cost.comm.explain import SWEEP_NBYTES, explain_one, explain_sweep, explained, rates_text
from laconic.cost.comm.rates import ITEM_NBYTES, OPERATIONS, WireRates, default_path
from laconic.cost.comm.seconds import GroupShape
from laconic.cost.moe import MoERates
from laconic.cost.moe.hierarchy import RowCounts
from laconic.cost.moe.rates import default_moe_path
from laconic.cost.moe.rates_text import moe_rates_text
from laconic.cost.moe.routes_text import candidates_data, candidates_text
from laconic.cost.moe.search import CostModel
from laconic.cost.sizes import parse_nbytes
from laconic.errors import ConfigError
from laconic.topology import GridLayout, Levels


def run(args: Sequence[str]) -> int:
    """Run `laconic explain` with `args`."""
    parser = make_parser()
    options = parser.parse_args(args)
    _refuse_unused(parser, options)
    if options.moe:
        return _explain_moe(options)
    path = options.record or default_path()
    rates = WireRates.load(path)
    if options.json:
        return _print_data(options, path, rates)
    print(f"rates of {path}")
    if options.rates:
        print("\n" + rates_text(rates))
        return 0
    group = _group_shape(options, rates)
    for operation in _operations(options):
        if options.nbytes is None:
            print("\n" + explain_sweep(operation, options.dtype, group, rates))
        else:
            print("\n" + explain_one(operation, parse_nbytes(options.nbytes, "nbytes"), options.dtype, group, rates))
    return 0


def _refuse_unused(parser: Parser, options: argparse.Namespace) -> None:
    if options.moe:
        parser.refuse(["--operation", "--nbytes"], "with --moe, which prices the messages of a layer")
    else:
        parser.refuse(LAYER_FLAGS, "without --moe")
    if options.rates:
        of_messages = ["--operation", "--nbytes", "--dtype", "--world", "--ranks-per-node"]
        parser.refuse([*of_messages, *LAYER_FLAGS], "with --rates, which prints all that was measured")


def _operations(options: argparse.Namespace) -> list[str]:
    return [options.operation] if options.operation else ["all_gather", "reduce_scatter", "all_reduce"]


def _print_data(options: argparse.Namespace, path: Path, rates: WireRates) -> int:
    if options.rates:
        print_json({"path": path, "rates": rates.to_dict()})
        return 0
    group = _group_shape(options, rates)
    sizes = SWEEP_NBYTES if options.nbytes is None else (parse_nbytes(options.nbytes, "nbytes"),)
    messages = [
        explained(operation, nbytes, options.dtype, group, rates)
        for operation in _operations(options)
        for nbytes in sizes
    ]
    shape = {"num_ranks": group.num_ranks, "ranks_per_node": group.ranks_per_node}
    print_json({"path": path, "group": shape, "dtype": options.dtype, "messages": messages})
    return 0


def _explain_moe(options: argparse.Namespace) -> int:
    """Candidate configurations of a layer with balanced routing, by the rates that `laconic profile --moe` measured."""
    path = Path(options.record) if options.record else default_moe_path()
    rates, shape = MoERates.load(path), layer_shape(options)
    if options.rates and options.json:
        print_json({"path": path, "rates": rates.to_dict()})
        return 0
    if options.rates:
        print(f"rates of {path}\n")
        print(moe_rates_text(rates))
        return 0
    num_ranks, per_node = _layout(options, rates.wire)
    ep = max(1, num_ranks // options.esp) if options.ep is None else options.ep
    grid = GridLayout(num_ranks, options.mp, ep, options.esp, min(per_node, num_ranks))
    shape.check(grid)
    counts = None
    if grid.mp == grid.esp == 1:
        inside = min(per_node, ep)
        levels = Levels.of_nodes(ep, inside) if ep % inside == 0 else Levels(ep, ranks_per_node=1)
        counts = RowCounts.uniform(shape.num_tokens, shape.num_experts, shape.top_k, levels)
    cost_model = CostModel(shape, grid, rates, counts, dtype=options.dtype)
    codes = ["raw", *rates.wire.codecs.get(options.dtype, {}), *rates.codecs.get(options.dtype, {})]
    title = (
        f"a layer of {shape.num_experts} experts {shape.model_dim} x {shape.hidden_dim}, top-{shape.top_k},"
        f" {shape.num_tokens} tokens of {options.dtype} per process, balanced; {num_ranks} processes, {per_node} per"
        f" node, mp {grid.mp}, ep {grid.ep}, esp {grid.esp}"
    )
    found = cost_model.candidates(codes)
    if options.json:
        print_json({"path": path, "layer": title, "candidates": candidates_data(found)})
    else:
        print(f"rates of {path}\n\n{candidates_text(found, title)}")
    return 0


def _layout(options: argparse.Namespace, rates: WireRates) -> tuple[int, int]:
    nodes, per_node = rates.layout
    per_node = max(1, per_node) if options.ranks_per_node is None else options.ranks_per_node
    return max(2, nodes * per_node) if options.world is None else options.world, per_node


def _group_shape(options: argparse.Namespace, rates: WireRates) -> GroupShape:
    num_ranks, per_node = _layout(options, rates)
    if per_node <= num_ranks and num_ranks % per_node:
        raise ConfigError(
            f"world is {num_ranks} with {per_node} ranks per node, but it must be a multiple of them; give --world and "
            "--ranks-per-node"
        )
    return GroupShape(num_ranks, min(per_node, num_ranks))


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic explain",
        description="Print what the cost model predicts for a collective, raw and with each code, which way is chosen "
        "and why. Without --nbytes, for sizes from 4 KB to 1 GB. Arithmetic on what laconic profile measured; ratios "
        "are those of Gaussian data, which a run corrects by what it observes.",
    )
    add = parser.add_argument
    add("--operation", choices=OPERATIONS, help="default: the three that data-parallel training uses")
    add("--nbytes", metavar="SIZE", help="of one rank's input, for example 4MB: the shard of an all-gather, the whole "
        "of what is reduced or exchanged")  # fmt: skip
    add("--dtype", default="bfloat16", choices=list(ITEM_NBYTES), help="default: %(default)s")
    add("--world", type=at_least(1), metavar="N", help="ranks (default: as measured)")
    add("--ranks-per-node", type=at_least(1), metavar="L", help="default: as measured")
    add("--record", metavar="FILE", help=f"written by laconic profile (default: {default_path()})")
    add("--rates", action="store_true", help="print what was measured instead")
    add_json(parser)
    moe = parser.add_argument_group("layers of experts")
    moe.add_argument("--moe", action="store_true", help="every way through a layer instead, priced by the rates of "
        f"laconic profile --moe ({default_moe_path()})")  # fmt: skip
    add_layer(moe.add_argument)
    return parser
