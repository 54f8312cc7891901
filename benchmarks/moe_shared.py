"""Shared experts of Hugging Face blocks computed while rows travel over slow links, against the block's own order.

Two hosts of one process. The prediction is made of parts that are timed alone: of the shared experts and of the
exchange that they share the time with, the shorter one is saved, in forward and, where the block calls its shared
experts after the routed ones, in backward. Rows travel raw in fp32; both orders give the same bits, which is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.kit.timing import Case, seconds_of
from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import Network, as_rank, in_lab, networks, slowest_rank
from laconic.collectives import Raw
from laconic.formats.shards import local_part
from laconic.moe import Grid, SortedOrder, parallelize
from laconic.moe.dispatch.flat import FlatDispatcher
from laconic.moe.dispatch.in_flight import begin, moved

_NUM_HOSTS = 2
_MODEL_DIM, _EXPERT_DIM, _NUM_EXPERTS, _TOP_K = 512, 128, 8, 2
_SHARED = (1, 4, 16)
"""Hidden dimensions of the shared experts, in those of a routed one."""
_FAMILIES = {"after the routed experts": "deepseek_v3", "before the router": "qwen2_moe"}


@benchmark("moe-shared")
@in_lab("Shared experts while rows travel")
def moe_shared(options: Options) -> list[Table]:
    """Forward and backward of a block with and without the overlap, by place and size of its shared experts."""
    tables = []
    for network in networks(options, _NUM_HOSTS, (100e6, 1e9)):
        found = network.run(__name__, {"num_tokens": 16 if options.smoke else 512 if network.rate < 5e8 else 2048})
        tables.append(_table(network, found))
    return tables


def _table(network: Network, found: dict[str, Any]) -> Table:
    rows = found["rows"]

    def ms(direction: str, what: str) -> tuple[str, Callable[[str], str]]:
        return f"{direction} {what}", lambda name: f"{1e3 * rows[name][direction][what]:.1f}"

    def gain(direction: str, what: str) -> tuple[str, Callable[[str], str]]:
        def of(name: str) -> str:
            one = rows[name][direction]
            return f"{one['in place'] / (one['in place'] - one['saved'] if what == 'predicted' else one['moved']):.2f}x"

        return f"{direction} {what}", of

    columns = [
        column
        for way in ("forward", "backward")
        for column in (ms(way, "shared"), ms(way, "exchange"), ms(way, "in place"), gain(way, "predicted"))
    ]
    gains = [(f"{way} measured", gain(way, "measured")[1]) for way in ("forward", "backward")]
    return Table.of(
        f"Shared experts while rows travel, {network.where(found)}",
        rows,
        [("shared experts", str), *columns, *gains],
        f"{found['num_tokens']} tokens of {_MODEL_DIM} a rank, top {_TOP_K} of {_NUM_EXPERTS} experts of {_EXPERT_DIM};"
        " ms, and gains over the block's own order. Predicted: the shorter of shared experts and exchange is saved.",
    )


# --- what each rank does ---


def _block(family: str, width: int, overlap: bool, grid: Grid) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    own: dict[str, Any] = {
        "qwen2_moe": {"num_experts": _NUM_EXPERTS, "shared_expert_intermediate_size": width * _EXPERT_DIM},
        "deepseek_v3": {
            **{"n_routed_experts": _NUM_EXPERTS, "n_shared_experts": width, "first_k_dense_replace": 0},
            **{"n_group": 1, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16},
            **{"qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4},
        },
    }[family]
    config = AutoConfig.for_model(
        family,
        **{"vocab_size": 16, "hidden_size": _MODEL_DIM, "intermediate_size": 64, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "moe_intermediate_size": _EXPERT_DIM, "num_experts_per_tok": _TOP_K},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        **own,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    done = parallelize(model, grid, overlap_shared=overlap, codec=Raw())
    assert {one.place is None for one in done.shared.values()} == {not overlap}
    block: nn.Module = model.model.layers[0].mlp
    return block


def _row(family: str, width: int, grid: Grid, task: dict[str, Any]) -> dict[str, Any]:
    blocks = {"in place": _block(family, width, False, grid), "moved": _block(family, width, True, grid)}
    # A copy: its gradients are not the block's.
    child = "shared_expert" if family == "qwen2_moe" else "shared_experts"
    shared = copy.deepcopy(blocks["in place"].get_submodule(child))
    x = torch.randn(1, task["num_tokens"], _MODEL_DIM, generator=torch.Generator().manual_seed(dist.get_rank()))
    plan, buffers = _exchange(blocks["in place"], grid, x)
    gone = begin(plan, buffers, outward=True).end()
    inputs: dict[str, Tensor] = {}
    outs: dict[str, Tensor] = {}

    def before(case: str) -> None:
        way, name = case.split(maxsplit=1)
        module = shared if name == "shared" else blocks.get(name)
        if module is not None and way == "forward":
            module.zero_grad()
            inputs[name] = x.clone().requires_grad_()

    def forward(name: str, module: nn.Module) -> None:
        outs[name] = module(inputs[name])

    def backward(name: str) -> None:
        outs[name].sum().backward()

    cases: dict[str, Case] = {}
    for name, module in {**blocks, "shared": shared}.items():
        cases |= {f"forward {name}": partial(forward, name, module), f"backward {name}": partial(backward, name)}
    cases["forward exchange"] = lambda: begin(plan, buffers, outward=True).end()
    cases["backward exchange"] = torch.no_grad()(partial(moved, plan, gone, outward=False, is_backward=True))
    seconds = seconds_of(cases, 1 if task["smoke"] else max(5, task["rounds"]), before=before, clock=slowest_rank)
    assert torch.equal(outs["in place"], outs["moved"])
    gradients = [[inputs[name].grad, *[p.grad for p in block.parameters()]] for name, block in blocks.items()]
    for one, other in zip(*gradients, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(local_part(one), local_part(other))
    found: dict[str, Any] = {}
    for way in ("forward", "backward"):
        one = {name: seconds[f"{way} {name}"] for name in ("shared", "exchange", "in place", "moved")}
        overlaps = way == "forward" or family == "deepseek_v3"
        found[way] = one | {"saved": min(one["shared"], one["exchange"]) if overlaps else 0.0}
    return found


def _exchange(block: Any, grid: Grid, x: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
    """The plan of the block's dispatch of x, and what is sent."""
    with torch.no_grad():
        block(x)
        layer = block.experts.layer
        routing = layer.gate(x.flatten(0, 1))
        plan = FlatDispatcher(grid.ep, codec=Raw()).plan(routing, SortedOrder())
        return plan, plan.begin(x.flatten(0, 1))


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures."""
    grid = Grid(device_type="cpu")
    rows = {
        f"{place}, {width} of {_EXPERT_DIM}": _row(family, width, grid, task)
        for place, family in _FAMILIES.items()
        for width in (_SHARED[:1] if task["smoke"] else _SHARED)
    }
    return {"num_tokens": task["num_tokens"], "rows": rows}


if __name__ == "__main__":
    as_rank(measure)
