"""What code decides by values is decided once: its second run starts from rounded values and is told."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import laconic
from laconic.activations import ActivationPlan, SavedTensorTracker, find_sites
from laconic.activations.backward import decisions as module_of_decisions
from laconic.activations.backward.decisions import Decisions
from laconic.activations.forwards.checkpoint import checkpoint
from laconic.activations.forwards.replacement import replacements_of
from laconic.activations.keep.rounding import quantized
from laconic.errors import ModelError
from laconic.formats import BlockFormat
from tests.activations.models import MIXTURES, gradients_of, loss_of, make_ids, make_model, relative_error
from tests.grid import few, grid, slow_but

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning"
)  # older names of transformers

NF4 = BlockFormat("nf4")

# Mixtures of experts

FURTHER: dict[str, dict[str, Any]] = {
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.01},
    "jamba": {"num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 1, "expert_layer_offset": 0}
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 0}
    | {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 48, "head_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_layer_start_index": 0},
    "deepseek_v32": {},
}
"""Families with mixtures that the other tests do not have, four experts each."""

LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
FURTHER["deepseek_v32"] = {
    **LATENT,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
}

WAYS = ("reentrant", "not reentrant", "plan")
BY_HAND = ("reentrant by hand", "not reentrant by hand", "wrapper")


def make_mixture(family: str, **options: Any) -> nn.Module:
    return make_model(family, **{**FURTHER.get(family, {}), "num_hidden_layers": 3, **options}).train()


def run_layers_again(model: nn.Module, way: str, **options: Any) -> None:
    """Compress a model whose layers run again in backward, in one of `WAYS` or `BY_HAND`."""
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    names = {id(module): name for name, module in model.named_modules()}
    if way == "plan":
        kinds = {site.name: NF4 for site in find_sites(model) if site.kind in ("norm", "experts", "router")}
        laconic.compress_activations(model, plan=ActivationPlan(kinds, {names[id(layer)]: NF4 for layer in layers}))
        return
    given = {} if options.get("mode") == "hooks" else {"checkpoint": "nf4"}  # hooks know no layers
    laconic.compress_activations(model, **given, **options)
    if way in WAYS:
        model.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
    for index, layer in enumerate(layers):
        if way == "wrapper":
            layers[index] = checkpoint_wrapper(layer)
        elif way in BY_HAND:
            layer.forward = _checkpointed(layer.forward, way == "reentrant by hand")


def _checkpointed(forward: Callable[..., Any], use_reentrant: bool) -> Callable[..., Any]:
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return torchs_checkpoint(lambda x: forward(x, *args, **kwargs), x, use_reentrant=use_reentrant)

    return run


class Chosen(torch.overrides.TorchFunctionMode):
    """Notes, in order, which experts modules of experts are given: in forward, and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.by_run: dict[bool, list[Tensor]] = {False: [], True: []}

    def watch(self, model: nn.Module) -> None:
        for site in find_sites(model):
            if site.kind == "experts":
                module = model.get_submodule(site.name)
                module.register_forward_pre_hook(lambda module, args, name=site.name: self.note(name, args[1]))

    def note(self, name: str, index: Tensor) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        self.by_run[in_backward].append((name, index.detach().clone()))  # type: ignore[arg-type]

    def flips(self) -> tuple[int, int]:
        """Tokens that went to other experts when their layer ran again, and all of these tokens."""
        first: dict[str, Tensor] = dict(self.by_run[False])  # type: ignore[arg-type]
        second: dict[str, Tensor] = dict(self.by_run[True])  # type: ignore[arg-type]
        flipped = [(first[name].sort(-1)[0] != index.sort(-1)[0]).any(-1) for name, index in second.items()]
        return sum(int(each.sum()) for each in flipped), sum(each.numel() for each in flipped)


@pytest.mark.parametrize(("family", "way"), grid(few(sorted({*MIXTURES, *FURTHER}), 5), WAYS, strength=1))
def test_tokens_go_to_the_same_experts_when_a_layer_runs_again(family: str, way: str) -> None:
    model = make_mixture(family)
    chosen = Chosen()
    chosen.watch(model)
    run_layers_again(model, way)
    for seed in range(2):
        loss_of(model, make_ids(4, 64, seed), seed).backward()  # which checks what it saved, if it is not reentrant
        flipped, tokens = chosen.flips()
        assert flipped == 0
        assert tokens >= 4 * 64 * 2


@pytest.mark.parametrize(("way", "mode"), grid(BY_HAND, ["sites", "hooks", "combined"], strength=1))
def test_layers_that_are_checkpointed_by_hand_choose_once(way: str, mode: str) -> None:
    model = make_mixture("qwen3_moe")
    chosen = Chosen()
    chosen.watch(model)
    run_layers_again(model, way, mode=mode)
    loss_of(model, make_ids(4, 64)).backward()
    flipped, tokens = chosen.flips()
    assert flipped == 0
    assert tokens == 3 * 4 * 64


@pytest.mark.parametrize(
    ("family", "use_reentrant"),
    grid(few(["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"], 2), [False, True], strength=1),
)
def test_experts_have_the_gradients_that_they_have_without_checkpoints(family: str, use_reentrant: bool) -> None:
    model = make_mixture(family)
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8, attention="exact")  # checkpoints are int8, the default
    worst: dict[bool, float] = {}
    for checkpointed in (False, True):
        if checkpointed:
            twin.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        errors = []
        for seed in range(3):
            ids, found = make_ids(4, 64, seed), []
            for each in (model, twin):
                loss_of(each, ids).backward()
                gradients = gradients_of(each)
                found.append(torch.cat([g.flatten() for name, g in gradients.items() if ".experts." in name]))
            errors.append(relative_error(found[1], found[0]))
        worst[checkpointed] = max(errors)
    assert 0 < worst[True] < 0.02
    assert worst[True] < 2 * worst[False]


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_many_seeds_neither_flip_nor_fail(use_reentrant: bool) -> None:
    for seed in range(40):
        model = make_mixture(("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")[seed % 4])
        chosen = Chosen()
        chosen.watch(model)
        run_layers_again(model, "reentrant" if use_reentrant else "not reentrant")
        loss_of(model, make_ids(4, 64, seed), seed).backward()
        assert chosen.flips()[0] == 0


def test_an_indexer_looks_at_the_same_keys_when_attention_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_mixture("deepseek_v32")
    indexers = [module for name, module in model.named_modules() if name.endswith("indexer")]
    seen: dict[bool, list[Tensor]] = {False: [], True: []}

    def note(module: nn.Module, args: Any, out: Any) -> None:
        leaf = out if isinstance(out, Tensor) else next(x for x in out if isinstance(x, Tensor))
        seen[torch._C._current_graph_task_id() != -1].append(leaf.detach().clone())

    laconic.compress_activations(model, attention="recompute")
    loss_of(model, make_ids())  # in which mixers are tried
    for indexer in indexers:
        indexer.register_forward_hook(note)
    loss_of(model, make_ids(2, 48, 2)).backward()
    assert len(seen[False]) == len(indexers) == 3
    assert len(seen[True]) == len(indexers)
    assert all(torch.equal(a, b) for a, b in zip(seen[False], reversed(seen[True]), strict=True))


def test_attention_that_decides_from_some_length_on_decides_once() -> None:
    from transformers import AttentionInterface

    seen: dict[bool, list[Tensor]] = {False: [], True: []}

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float = 1.0, **kwargs: Any
    ) -> tuple[Tensor, None]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        logits = query @ key.mT * scaling
        if logits.shape[-1] > 16:
            nearest = logits.topk(4).indices
            seen[torch._C._current_graph_task_id() != -1].append(nearest)
            logits = torch.full_like(logits, -torch.inf).scatter(-1, nearest, 0.0) + logits
        return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("sparse", attend)
    model = make_model("llama").train()
    model.set_attn_implementation("sparse")  # type: ignore[operator]
    laconic.compress_activations(model, attention="nf4", sequence_length=8)
    for length in (8, 64):
        loss_of(model, make_ids(2, length)).backward()
    assert len(seen[False]) == len(seen[True]) == 2
    assert all(torch.equal(a, b) for a, b in zip(seen[False], reversed(seen[True]), strict=True))


# Regions of one's own: every function that decides

ROWS, COLUMNS = 24, 64


def undecided(seed: int) -> Tensor:
    """[ROWS, COLUMNS], in pairs of values that four bits do not tell apart, and close to whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (ROWS, COLUMNS // 2), generator=generator).repeat_interleave(2, 1) / 1.0
    return x + 1e-3 * torch.randn(ROWS, COLUMNS, generator=generator)


def in_place(x: Tensor) -> Tensor:
    index = torch.empty(ROWS, dtype=torch.int64)
    index.copy_(x.detach()[:, 0] * 1e4)
    return index


def given(x: Tensor) -> Tensor:
    out = (torch.empty(ROWS, 5), torch.empty(ROWS, 5, dtype=torch.int64))
    torch.topk(x.detach(), 5, out=out)
    return out[1]


def written_to(x: Tensor) -> Tensor:
    index = x.argmax(-1)
    kept = index.clone()
    index.zero_()
    return kept


DECIDING: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda x: torch.topk(x, 5).indices,
    "topk of a dimension": lambda x: x.topk(5, 0, sorted=True)[1],
    "topk by name": lambda x: torch.topk(input=x, k=5, dim=-1).indices,
    "sort": lambda x: x.sort(-1, descending=True).indices,
    "stable sort": lambda x: torch.sort(x, stable=True, dim=0)[1],
    "argsort": lambda x: x.argsort(dim=-1),
    "argmax": lambda x: x.argmax(-1),
    "argmin of all": lambda x: x.argmin(),
    "max": lambda x: x.max(-1).indices,
    "min, kept dimension": lambda x: torch.min(x, 0, keepdim=True)[1],
    "kthvalue": lambda x: x.kthvalue(7).indices,
    "median": lambda x: x.median(-1).indices,
    "mode": lambda x: x.round(decimals=3).mode(-1).indices,
    "cummax": lambda x: x.cummax(-1).indices,
    "comparison": lambda x: x > 1,
    "comparison by name": lambda x: torch.le(x, -1.0),
    "comparison of two": lambda x: x[:, 1:] > x[:, :-1],
    "permuted": lambda x: (x.t() > 1).nonzero(),
    "nonzero": lambda x: F.relu(x - 2).nonzero(),
    "where": lambda x: torch.where(x > 2)[0],
    "one-hot": lambda x: F.one_hot(x.argmax(-1), COLUMNS),
    "cast": lambda x: (x * 1e4).long(),
    "cast to bytes": lambda x: (x * 10 + 50).to(torch.uint8),
    "cast to bool": lambda x: F.relu(x - 1).bool(),
    "multinomial": lambda x: torch.multinomial((2e3 * x).softmax(-1), 1),
    "bernoulli": lambda x: torch.bernoulli((50 * (x - 1)).sigmoid()).bool(),
    "histc": lambda x: x.histc(bins=64, min=-2.001, max=2.001),
    "gumbel": lambda x: F.gumbel_softmax(2e3 * x, hard=True).argmax(-1),
    "bucketize": lambda x: torch.bucketize(x.detach(), torch.tensor([-2.0, -1, 0, 1, 2])),
    "searchsorted": lambda x: torch.searchsorted(torch.tensor([-2.0, -1, 0, 1, 2]), x.detach()),
    "isclose": lambda x: torch.isclose(x, x.round(), atol=5e-4),
    "item": lambda x: x[0, 0].item(),
    "float": lambda x: float(x.detach().sum()),
    "list": lambda x: x[0].tolist(),
    "branch": lambda x: bool(x[3, 5] > x[3, 4]),
    "allclose": lambda x: torch.allclose(x[:3], x[:3].round(), rtol=0, atol=6e-3),
    "in place": in_place,
    "given tensors": given,
    "written to": written_to,
    "largest pool": lambda x: F.max_pool1d(x, 2, return_indices=True)[1],
    "operator of torch": lambda x: torch.ops.aten.topk(x, 5)[1],
    "capacity": lambda x: F.one_hot(x.argmax(-1), COLUMNS).cumsum(0) <= 2,
}


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("name", DECIDING)
def test_a_region_decides_once(name: str) -> None:
    decide, seen = DECIDING[name], []

    def region(x: Tensor) -> Tensor:
        seen.append(decide(x))
        return x.sin()

    flips = 0
    for seed in range(4):
        seen.clear()
        x = undecided(seed).requires_grad_()
        torch.manual_seed(seed)
        checkpoint(region, x * 1.0, format=NF4).sum().backward()
        first, second = seen
        assert same(second, first)
        torch.manual_seed(seed)
        rounded = decide(quantized(x.detach(), NF4).dequantize())
        flips += not same(rounded, first)
    assert flips, "rounding changes nothing here, so this has shown nothing"


SELECTING: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda x: torch.topk(x, 5),
    "topk of a dimension": lambda x: x.topk(5, dim=0),
    "sort": lambda x: x.sort(-1, descending=True),
    "max": lambda x: x.max(1),
    "min, kept dimension": lambda x: torch.min(x, 0, keepdim=True),
    "kthvalue": lambda x: x.kthvalue(7),
    "median": lambda x: x.median(-1),
    "cummax": lambda x: x.cummax(-1),
}


@pytest.mark.parametrize("name", SELECTING)
def test_values_come_from_the_places_of_the_first_run(name: str) -> None:
    """Their gradient arrives where the first run found them, as that of the exact function does."""
    select = SELECTING[name]
    x = undecided(0).requires_grad_()
    values = select(x).values
    weights = torch.arange(1.0, values.numel() + 1).view(values.shape)
    (expected,) = torch.autograd.grad((values * weights).sum(), x)
    got = checkpoint(lambda x: select(x).values * weights, x * 1.0, format=NF4)
    assert torch.equal(got, values * weights)
    assert torch.equal(torch.autograd.grad(got.sum(), x)[0], expected)


def test_a_retained_graph_runs_again_twice() -> None:
    seen: list[Tensor] = []

    def region(x: Tensor) -> Tensor:
        values, index = x.topk(5)
        seen.append(index)
        return values.sin()

    x = undecided(0).requires_grad_()
    y = checkpoint(region, x * 1.0, format=NF4).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x)[0], first)
    assert len(seen) == 3
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


DISAGREEING: dict[str, Callable[[Tensor, int], Any]] = {
    "another function": lambda x, run: x.argmax(-1) if run else x.argmin(-1),
    "another shape": lambda x, run: x.topk(5 - run),
    "another dtype": lambda x, run: x.to(torch.int32 if run else torch.int64),
    "one more": lambda x, run: [x.argmax(-1) for _ in range(1 + run)],
    "one after none of its kind": lambda x, run: x.argmax(-1) if run else (x > 1, x.argmax(-1)),
}


@pytest.mark.parametrize("name", DISAGREEING)
def test_a_second_run_that_decides_otherwise_is_refused(name: str) -> None:
    runs: list[int] = []

    def fickle(x: Tensor) -> Tensor:
        DISAGREEING[name](x, len(runs))
        runs.append(1)
        return x.sin().cos()

    y = checkpoint(fickle, torch.randn(8, 64, requires_grad=True) * 1.0).sum()
    with pytest.raises(ModelError, match="fickle runs again in backward and calls"):
        y.backward()


# What it costs


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Calls of torch that were looked at, and decisions that were noted."""
    counts = {"calls": 0, "decisions": 0}
    look, note = module_of_decisions._FirstRun.__torch_function__, Decisions.note

    def looking(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts["calls"] += 1
        return look(self, func, types, args, kwargs)

    def noting(self: Any, *args: Any) -> None:
        counts["decisions"] += 1
        note(self, *args)

    with monkeypatch.context() as patches:
        patches.setattr(module_of_decisions._FirstRun, "__torch_function__", looking)
        patches.setattr(Decisions, "note", noting)
        yield counts


@pytest.mark.parametrize("options", [{"attention": "int8"}, {"attention": "recompute"}, {"checkpoint": "int8"}])
def test_layers_that_decide_nothing_are_looked_at_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama").train()
    laconic.compress_activations(model, **options)
    if "checkpoint" in options:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with counted(monkeypatch) as first:
        loss_of(model, make_ids()).backward()
    with counted(monkeypatch) as second:
        loss_of(model, make_ids()).backward()
    assert first["decisions"] == second["decisions"] == 0
    assert second["calls"] == 0


class LongIsSparse(nn.Module):
    """Attention to the largest two scores only, from nine tokens on, or where it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_dense: Any = 8
        self.query, self.value = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ x.transpose(1, 2)
        if self.longest_dense is not None and x.shape[1] > self.longest_dense:
            scores = scores.masked_fill(scores < scores.topk(2)[0][..., -1:], -torch.inf)
        out: Tensor = self.value(scores.softmax(-1) @ x)
        return out


def test_layers_that_decide_from_some_length_on_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList([LongIsSparse()])
    laconic.compress_activations(model, bits=8)
    for length, decides in ((4, False), (4, False), (16, True), (16, True)):
        with counted(monkeypatch) as counts:
            model[0](torch.randn(2, length, 32, requires_grad=True)).sum().backward()
        assert (counts["decisions"] > 0) == decides


def test_what_tells_layers_of_many_lengths_is_held_once() -> None:
    model = nn.ModuleList([LongIsSparse()])
    laconic.compress_activations(model, bits=8)
    for length in (4, 5, 6):
        model[0](torch.randn(2, length, 32, requires_grad=True)).sum().backward()
    (replacement,) = replacements_of(model[0])
    idle = replacement.habit._idle
    assert len(idle) == 3
    assert len(set(map(id, idle.values()))) == 1


class ByFunctions(nn.Module):
    """Attention by the function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).transpose(1, 3).unbind(2)
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


def test_attention_by_a_function_that_decides_nothing_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(ByFunctions())
    laconic.compress_activations(model, bits=8, attention="int8")
    calls = []
    for _ in range(2):
        with counted(monkeypatch) as counts:
            model(torch.randn(2, 8, 32, requires_grad=True)).sum().backward()
        calls.append(counts["calls"])
    assert calls[0] > 0
    assert calls[1] == 0


@pytest.mark.parametrize("kind", [int, torch.tensor, lambda longest: None if longest == 8 else Fraction(longest)])
def test_layers_that_are_told_to_decide_are_looked_at_again(
    kind: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.ModuleList([LongIsSparse()])
    laconic.compress_activations(model, bits=8)
    for longest, decides in ((8, False), (4, True), (8, False)):
        model[0].longest_dense = kind(longest)
        with counted(monkeypatch) as counts:
            model[0](torch.randn(2, 6, 32, requires_grad=True)).sum().backward()
        assert (counts["decisions"] > 0) == decides


def sparse_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    logits = query @ key.mT
    logits = logits.masked_fill(logits < logits.topk(4)[0][..., -1:], -torch.inf)
    return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("options", [{"attention": "int8"}, {"attention": "recompute"}, {"checkpoint": "int8"}])
def test_attention_that_is_put_in_place_later_decides_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register("sparse in place", sparse_attention)
    model = make_model("llama").train()
    laconic.compress_activations(model, **options)
    if "checkpoint" in options:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for implementation in ("sdpa", "sparse in place"):
        model.set_attn_implementation(implementation)  # type: ignore[operator]
        with counted(monkeypatch) as counts:
            loss_of(model, make_ids()).backward()
        pickle.dumps(model.model.layers)
        assert (counts["decisions"] > 0) == (implementation != "sdpa")


@pytest.mark.parametrize("family", few(sorted(set(MIXTURES) - {"gpt_oss"}), 2))
def test_experts_that_are_told_where_to_go_are_looked_at_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_mixture(family)
    laconic.compress_activations(model)
    loss_of(model, make_ids()).backward()
    with counted(monkeypatch) as second:
        loss_of(model, make_ids()).backward()
    assert second == {"calls": 0, "decisions": 0}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_decisions_are_counted_small_and_gone_after_backward(
    use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = make_mixture("mixtral"), make_ids()
    laconic.compress_activations(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    alive: list[weakref.ref[Tensor]] = []
    note = Decisions.note

    def noting(self: Decisions, *args: Any) -> None:
        note(self, *args)
        alive.extend(map(weakref.ref, self.tensors))

    monkeypatch.setattr(Decisions, "note", noting)
    with SavedTensorTracker(model) as tracker:
        loss = loss_of(model, ids)
    layers = {f"model.layers.{index}": BlockFormat("int8").nbytes((64,)) for index in range(3)}
    of_layers = sum(n for name, n in tracker.by_module.items() if name.startswith("model.layers."))
    assert of_layers - ids.numel() * sum(layers.values()) == 3 * ids.numel() * 2  # two experts of a token, a byte each
    assert {each().dtype for each in alive} == {torch.uint8}  # type: ignore[union-attr]
    loss.backward()
    gc.collect()
    assert all(each() is None for each in alive)


# Narrow storage


@pytest.mark.parametrize("columns", [3, 256, 257, 40_000])
def test_places_are_stored_in_as_few_bytes_as_hold_them(columns: int) -> None:
    decisions = Decisions("region")
    x = torch.randn(2, columns)
    with decisions.first_run():
        places = [x.argmax(-1), x.topk(2)[1], x.argsort(-1), x.argmax(), x > 0]
    sizes = [stored.dtype.itemsize for stored in decisions.tensors]
    expected = 1 if columns <= 256 else 2 if columns <= 2**15 else 4
    whole = 1 if 2 * columns <= 256 else 2 if 2 * columns <= 2**15 else 4
    assert sizes == [expected] * 3 + [whole, 1]
    assert decisions.tensors[-1].numel() == (2 * columns + 7) // 8
    other = torch.randn(2, columns)
    with decisions.again():
        again = [other.argmax(-1), other.topk(2)[1], other.argsort(-1), other.argmax(), other > 0]
    for first, second in zip(places, again, strict=True):
        assert torch.equal(first, second)
        assert first.dtype == second.dtype
        assert first.stride() == second.stride()


def test_what_integers_and_parameters_decide_is_not_noted() -> None:
    decisions = Decisions("region")
    ids, weight = torch.randint(0, 9, (4, 8)), nn.Parameter(torch.randn(8))
    with decisions.first_run():
        ids.topk(2), ids > 3, ids.float().histc(9), ids.float().argmax(-1), weight > 0
        torch.randn(3, 4).view(torch.int32), torch.zeros_like(torch.randn(3), dtype=torch.bool)
    assert not decisions.calls
    scores = ids.float()
    with decisions.first_run():
        scores = ids.float()
        scores *= torch.randn(8)  # they were integers once
        scores.argmax(-1)
    assert len(decisions.calls) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which Dynamo reads
@pytest.mark.parametrize("decides", slow_but([False, True], True))
def test_compiled_code_in_a_region_is_one_graph_in_both_runs(decides: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    linear = nn.Linear(64, 64)
    compiled = torch.compile(lambda x: x.topk(4).values.sum(-1, keepdim=True) * linear(x).tanh(), backend="aot_eager")

    def region(x: Tensor) -> Tensor:
        y: Tensor = compiled(x).cos()
        return y + x.argmax(-1)[:, None] if decides else y

    for seed in range(3):
        x = undecided(seed).requires_grad_()
        checkpoint(region, x * 1.0).sum().backward()  # which checks that both runs save the same
        assert x.grad is not None
