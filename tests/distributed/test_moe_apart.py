"""Experts that a model's own code calls apart, spread over processes: as one process has them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from laconic import audit
from laconic.collectives.codec import Blockwise
from laconic.errors import CheckpointError, ConfigError, ModelError
from laconic.formats import BlockFormat
from laconic.moe.huggingface import Parallelized, from_pretrained, load_sharded, parallelize, save_sharded
from laconic.moe.huggingface.apart import find_apart, own_names
from laconic.moe.huggingface.blocks import unknown_experts
from laconic.moe.parallel.grid import Grid
from laconic.train.memory.fake_experts import spread_evenly
from tests.moe.worlds import run_world

VOCABULARY, BATCH = 97, 4
SIZES = {"vocab_size": VOCABULARY, "num_experts": 4, "pad_token_id": 0, "decoder_start_token_id": 1}
SWITCH = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
SPARSE = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 3}
NLLB = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layerdrop": 0, "decoder_layerdrop": 0}
JETMOE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "kv_channels": 8,
    "intermediate_size": 48,
}
FAMILIES = ["switch_transformers", "nllb-moe", "jetmoe"]


def tiny(family: str, **changes: Any) -> nn.Module:
    """The same float64 model in every process, with dropout, also in experts."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    own: dict[str, Any] = {
        "switch_transformers": SIZES | SWITCH | SPARSE | {"dropout_rate": 0.1},
        "nllb-moe": SIZES
        | NLLB
        | HEADS
        | {"dropout": 0.1, "attention_dropout": 0.1, "moe_token_dropout": 0.2, "activation_dropout": 0.3}
        | {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 5, "max_position_embeddings": 64},
        "jetmoe": JETMOE
        | {"intermediate_size": 48, "vocab_size": VOCABULARY, "num_local_experts": 4, "num_experts_per_tok": 2},
    }[family]
    torch.manual_seed(0)
    maker: Any = AutoModelForCausalLM if family == "jetmoe" else AutoModelForSeq2SeqLM
    model = maker.from_config(AutoConfig.for_model(family, **own | changes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    for module in model.modules():
        if hasattr(module, "classifier"):
            module.dtype = torch.float64
    return model.double()


def batch_of(family: str, seed: int, whole: bool = False) -> dict[str, Tensor]:
    """This process's part of a batch that does not depend on their number, or all of it."""
    ids = torch.randint(2, VOCABULARY, (BATCH, 8), generator=torch.Generator().manual_seed(seed))
    if not whole and dist.is_initialized():
        ids = ids.chunk(dist.get_world_size())[dist.get_rank()]
    return {"input_ids": ids, "labels": ids.flip(1)}


def loss_on(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch, use_cache=False).loss
    return loss


def by_own_names(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors by the names that the model has in one process."""
    names, found = own_names(model), dict[str, Tensor]()
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found |= dict(zip(names[name], whole, strict=True)) if name in names else {name: whole}
    return found


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert got.keys() == expected.keys(), set(got) ^ set(expected)
    for name, one in expected.items():
        assert got[name].shape == one.shape, name
        far = ((got[name] - one).abs() / (1 + one.abs())).max()
        assert far <= tolerance, (name, float(far))


def gradients(model: nn.Module, averages: bool = False) -> dict[str, Tensor]:
    """By name; zeros where an expert had no rows; with `averages`, the mean over processes of whole models'."""
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    for grad in found.values() if averages else ():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    for name, parameter in model.named_parameters():
        parameter.grad = found[name]
    return found


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_like_one_process(family: str, grid: Grid, shard: bool = False, ddp: bool = False, **changes: Any) -> None:
    reference, model = tiny(family, **changes), tiny(family, **changes)
    done = parallelize(model, grid)
    assert any(isinstance(p, DTensor) for p in done.experts()) == (grid.layout.ep > 1)
    if shard:
        done.fully_shard()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if ddp else model
    optimizers = [
        torch.optim.AdamW(each, lr=1e-2, eps=1e-3) for each in (reference.parameters(), done.parameter_groups())
    ]
    for step in range(2):
        batch = batch_of(family, step)
        torch.manual_seed(dist.get_rank())
        expected = reference(**batch, use_cache=False)
        drawn = torch.get_rng_state()
        torch.manual_seed(dist.get_rank())
        got = wrapped(**batch, use_cache=False)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert_close({"logits": got.logits, "loss": got.loss}, {"logits": expected.logits, "loss": expected.loss})
        expected.loss.backward()
        got.loss.backward()
        if not (shard or ddp):
            done.reduce_gradients()
        assert_close(by_own_names(model, gradients(model)), gradients(reference, averages=True))
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        assert_close({"norm": done.clip_gradients(0.1)}, {"norm": norm})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_close(by_own_names(model, weights(model)), weights(reference))


def pair_is_like_one_process() -> None:
    for family in FAMILIES:
        assert_like_one_process(family, Grid(ep=2))
        assert_like_one_process(family, Grid(ep=2), ddp=True)
        assert_like_one_process(family, Grid(ep=1))
        for ep in (1, 2):
            assert_like_one_process(family, Grid(ep=ep), shard=True)


SWITCH_MODULE = "transformers.models.switch_transformers.modeling_switch_transformers"


class Experts(nn.ModuleList):
    """As Switch might have it: each expert gets its rows, with dropout by torch's function."""

    __module__, __qualname__ = SWITCH_MODULE, "SwitchTransformersExperts"

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self):
            tokens, choice = torch.where(chosen == number)
            out = out.index_add(0, tokens, expert(x[tokens]) * weights[tokens, choice, None])
        return out


class Foreign(Experts):
    """A user's own."""


class OtherOfTheFamily(Experts):
    """A class that another version of transformers may have."""

    __module__, __qualname__ = SWITCH_MODULE, "SwitchTransformersSharedExperts"


class Changing(Experts):
    """Leaves out an expert in every second run."""

    __module__, __qualname__ = SWITCH_MODULE, "SwitchTransformersExperts"

    def __init__(self, experts: list[nn.Module], left_out: int) -> None:
        super().__init__(experts)
        self.left_out, self.runs = left_out, 0

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        self.runs += 1
        for number, expert in enumerate(self):
            if self.runs % 2 or number != self.left_out:
                expert(x)
        return x


class Expert(nn.Module):
    __module__, __qualname__ = SWITCH_MODULE, "SwitchTransformersDenseActDense"

    def __init__(self, drop: Any) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 24), nn.Linear(24, 16, bias=False), drop

    def forward(self, rows: Tensor) -> Tensor:
        inner = F.dropout(self.up(rows).relu(), training=self.training, p=0.2)
        out: Tensor = self.down(self.drop(inner))
        return out


class ForeignExpert(Expert):
    """A user's own."""


class Block(nn.Module):
    def __init__(
        self, kind: Callable[..., nn.ModuleList] = Experts, of: type[Expert] = Expert, drop: Any = None, number: int = 4
    ) -> None:
        super().__init__()
        self.router = nn.Linear(16, number)
        self.experts: Any = kind([of(drop or nn.Dropout(0.3)) for _ in range(number)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out: Tensor = self.experts(x, chosen, weights)
        return out


def own(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Block(**options)).double()


def own_modules_are_like_one_process() -> None:
    for casts in (False, True):
        reference, model = own(), own()
        done = parallelize(model, Grid(ep=dist.get_world_size()))
        if casts:
            reference.float()
            model.float()
        x = torch.randn(6, 16, dtype=torch.float32 if casts else torch.float64)
        results = []
        for each in (reference, model):
            torch.manual_seed(dist.get_rank())
            with torch.autocast("cpu", enabled=casts):
                out = each(x)
            out.float().square().sum().backward()
            results.append({"out": out.detach(), "drawn": torch.get_rng_state().double()})
        done.reduce_gradients()
        assert_close(results[1], results[0], 2e-2 if casts else 1e-10)
        assert_close(
            by_own_names(model, gradients(model)), gradients(reference, averages=True), 2e-1 if casts else 1e-6
        )
    model(x[:0]).sum().backward()  # a process without rows takes part
    experts: Any = model.get_submodule("1.experts")
    assert not any("ask" in vars(stub) for stub in experts)  # which held rows and their graph
    with pytest.raises(ModelError, match="a part of stacks over processes, so its up is not to be had alone; take the"):
        nn.init.zeros_(experts[0].up.weight)
    for options in ({"kind": Foreign}, {"kind": OtherOfTheFamily}, {"of": ForeignExpert}):  # code that nobody has tried
        assert not find_apart(plain := own(**options))
        assert unknown_experts(plain)
    for left_out in (0, 3):
        changing = parallelize(own(kind=partial(Changing, left_out=left_out)), Grid(ep=dist.get_world_size()))
        with pytest.raises(ModelError, match="calls its experts otherwise once they have answered"):
            changing.model(x.double())
    sharded = parallelize(own(), Grid(ep=1))
    sharded.fully_shard()
    sharded.model(x[: dist.get_rank()].double()).sum().backward()  # with other experts on each
    assert all(p.grad is not None for p in sharded.experts())


def what_cannot_be_spread_is_refused() -> None:
    grid = Grid(ep=2)
    with pytest.raises(ModelError, match="its experts are modules of their own"):
        parallelize(own(kind=nn.ModuleList), grid)
    for sizes in ({"ep": 1, "esp": 2}, {"mp": 2, "ep": 2}):
        with pytest.raises(ConfigError, match="cannot be cut, nor share their tokens; use ep alone"):
            parallelize(own(), Grid(**sizes))
    with pytest.raises(ModelError, match="which work without gate, movable and hooks alone"):
        parallelize(own(), grid, movable=True)
    model = own()
    model.get_submodule("1.experts.2.up").register_forward_hook(lambda *_: None)
    with pytest.raises(ModelError, match=r"experts\.2\.up has _forward_hooks, but over processes experts are parts of"):
        parallelize(model, grid)
    model = own()
    for expert in model.get_submodule("1.experts").children():
        expert.eval()
    with pytest.raises(ModelError, match=r"experts\.0 has training False, other than the list, but over processes"):
        parallelize(model, grid)
    x = torch.randn(6, 16, dtype=torch.float64)
    model = own(drop=nn.AlphaDropout(0.1))
    parallelize(model, grid)
    with pytest.raises(ModelError, match="alpha_dropout"):
        model(x)
    model = own()
    parallelize(model, grid, codec=Blockwise(BlockFormat("int8")))
    with pytest.raises(ConfigError, match="the dispatcher's codec rounds what travels; take a lossless codec"):
        model(x)
    with pytest.raises(CheckpointError, match="neither pickled nor copied"):
        copy.deepcopy(model)


@pytest.mark.ci
def test_a_pair_computes_what_one_process_does(tmp_path: Path) -> None:
    scenarios = [
        pair_is_like_one_process,
        own_modules_are_like_one_process,
        what_cannot_be_spread_is_refused,
        audits_find_the_experts_alone,
        partial(files_are_those_of_the_whole_model, tmp_path),
    ]
    run_world(scenarios, 2, tmp_path)


def audits_find_the_experts_alone() -> None:
    for family in FAMILIES:
        model = tiny(family)
        done = parallelize(model, Grid(ep=2))
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        report = audit(model, batch_of(family, 1))
        assert report.num_layers_of_experts == len(done.layers), family


def files_are_those_of_the_whole_model(folder: Path) -> None:
    for family in FAMILIES:
        model = tiny(family)
        if dist.get_rank() == 0:
            model.save_pretrained(folder / family / "whole")
        whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        parallelize(model, Grid(ep=2))
        model.save_pretrained(folder / family / "spread")
        for path in (folder / family / "whole").iterdir() if dist.get_rank() == 0 else ():
            assert path.read_bytes() == (folder / family / "spread" / path.name).read_bytes(), path.name
        dist.barrier()

        # 1. Whole tensors, as hosts load them.
        for parameter in model.parameters():
            parameter.detach().zero_()
        model.load_state_dict(whole)
        assert_close(by_own_names(model, model.state_dict()), whole, 0)
        del whole[next(name for name in reversed(whole) if "expert" in name or "linear" in name)]
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(whole)

        # 2. Files, each process its own experts.
        loaded = from_pretrained(folder / family / "whole", Grid(ep=2), model_class=type(model), dtype=torch.float64)
        assert_close(by_own_names(loaded.model, weights(loaded.model)), by_own_names(model, weights(model)), 0)


def start(family: str) -> tuple[Parallelized, torch.optim.Optimizer]:
    done = parallelize(tiny(family), Grid(ep=dist.get_world_size()) if dist.is_initialized() else None)
    return done, torch.optim.AdamW(done.parameter_groups(), lr=1e-2, eps=1e-3)


def train(done: Parallelized, optimizer: torch.optim.Optimizer, family: str, step: int) -> None:
    done.model.eval()
    loss_on(done.model, batch_of(family, step)).backward()
    done.reduce_gradients()
    gradients(done.model)
    optimizer.step()
    optimizer.zero_grad()


def sharded_replicas_save(folder: Path, family: str) -> None:
    """Of three experts over two processes, so that FSDP2 cuts what is in an expert over the other two."""
    done = parallelize(tiny(family, **three(family)), Grid(ep=2))
    done.fully_shard()
    optimizer = torch.optim.AdamW(done.parameter_groups(), lr=1e-2, eps=1e-3)
    done.model.eval()
    loss_on(done.model, batch_of(family, 0)).backward()
    optimizer.step()
    save_sharded(folder / family, done.model, optimizer)


def three(family: str) -> dict[str, int]:
    return {"num_local_experts" if family == "jetmoe" else "num_experts": 3}


@pytest.mark.slow
def test_one_process_goes_on_with_what_four_have_sharded(tmp_path: Path) -> None:
    run_world([partial(sharded_replicas_save, tmp_path, family) for family in FAMILIES], 4, tmp_path)
    for family in FAMILIES:
        models = [tiny(family, **three(family)) for _ in range(2)]
        alone, other = (torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in models)
        loss_on(models[0].eval(), batch_of(family, 0)).backward()
        gradients(models[0])
        alone.step()
        load_sharded(tmp_path / family, models[1], other)
        assert_close(weights(models[1]), weights(models[0]), 1e-6)
        for got, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert_close(other.state[got], alone.state[expected], 1e-6)


def test_a_prediction_over_processes_is_refused() -> None:
    for family in FAMILIES:
        with pytest.raises(ModelError, match="are called apart, which is predicted for one process only"):
            spread_evenly(tiny(family), 2, "cpu")


def go_on(folder: Path, family: str, source: str, target: str, step: int) -> None:
    done, optimizer = start(family)
    load_sharded(folder / source, done.model, optimizer)
    train(done, optimizer, family, step)
    save_sharded(folder / target, done.model, optimizer)


def five_experts_over_four() -> None:
    own_modules_are_like_one_process()
    with pytest.raises(ConfigError, match=r"1\.experts has 3 experts, but ep = 4 processes need at least one each"):
        parallelize(own(number=3), Grid(ep=4))
    for family in FAMILIES:
        changes = {"num_local_experts": 5} if family == "jetmoe" else {"num_experts": 5}
        assert_like_one_process(family, Grid(ep=4), **changes)
        assert_like_one_process(family, Grid(ep=2), **changes)
        assert_like_one_process(family, Grid(ep=2), shard=True)


@pytest.mark.slow
def test_four_with_each_expert_twice_or_none_compute_what_one_process_does(tmp_path: Path) -> None:
    run_world([five_experts_over_four], 4, tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_go_from_one_process_to_two_to_four_and_back(family: str, tmp_path: Path) -> None:
    done, optimizer = start(family)
    train(done, optimizer, family, 0)
    save_sharded(tmp_path / "0", done.model, optimizer)
    for step, world in enumerate([2, 4, 1], 1):
        (tmp_path / f"world-{step}").mkdir()
        run_world([partial(go_on, tmp_path, family, f"{step - 1}", f"{step}", step)], world, tmp_path / f"world-{step}")
        train(done, optimizer, family, step)
    last, again = start(family)
    load_sharded(tmp_path / "3", last.model, again)
    assert_close(weights(last.model), weights(done.model), 1e-6)
    for got, expected in zip(last.model.parameters(), done.model.parameters(), strict=True):
        assert_close(again.state[got], optimizer.state[expected], 1e-6)
