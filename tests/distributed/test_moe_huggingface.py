"""Hugging Face models whose experts are spread over processes: as one process has them, and on to other numbers."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from laconic.activations import compress_activations
from laconic.errors import CheckpointError, ConfigError, ModelError, RoutingError
from laconic.formats.shards import local_part
from laconic.gradients import compress_gradients
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.huggingface import Parallelized, load_sharded, parallelize, save_sharded
from laconic.moe.parallel.grid import Grid
from laconic.moe.pipeline.schedule import ChunkedSchedule
from laconic.moe.placement.migration import ExpertMover
from laconic.optim import AdamW8bit
from tests.activations.models import VOCABULARY, make_ids, make_model
from tests.moe.worlds import run_world

FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3"]
"""What each layout is tried on; tests/moe/huggingface/test_families.py tries all that transformers has."""
BATCH = 4


def tiny(family: str, **changes: Any) -> nn.Module:
    """The same float64 model in every process."""
    model = make_model(family, experts_implementation="eager", **changes).double()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    return model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-10) -> bool:
    return got.shape == expected.shape and bool(((got - expected).abs() <= tolerance * (1 + expected.abs())).all())


def llama4() -> nn.Module:
    """Llama 4 calls its experts with a row for each expert and token."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = Llama4TextConfig(**sizes, **special, num_local_experts=4, use_qk_norm=False)
    model = Llama4ForCausalLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.double()


def own_ids(seed: int, length: int = 8) -> Tensor:
    """This process's part of a batch that does not depend on their number."""
    return make_ids(BATCH, length, seed).chunk(dist.get_world_size())[dist.get_rank()]


def loss_on(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def assert_like_one_process(family: str, grid: Grid, shard: bool = False, **options: Any) -> None:
    reference, model = tiny(family), tiny(family)
    if "gate" in options:
        parallelize(reference, gate=options["gate"])
    done = parallelize(model, grid, **options)
    held = 4 // grid.layout.ep
    for parameter in done.experts():
        assert isinstance(parameter, DTensor) == (held < 4)
        assert parameter.shape[0] == 4
        assert local_part(parameter).shape[0] == held
    if shard:
        done.fully_shard(model.model.layers)

    # 1. Outputs and router logits, on this process's tokens.
    ids = own_ids(1)
    records = {"output_router_logits": True} if family not in ("deepseek_v2", "deepseek_v3") else {}
    expected, got = (each(input_ids=ids, labels=ids, use_cache=False, **records) for each in (reference, model))
    assert close(got.logits, expected.logits)
    assert close(got.loss, expected.loss)  # with the auxiliary loss
    if records:
        assert close(got.aux_loss, expected.aux_loss)

    # 2. Gradients are those of the mean over all processes.
    expected.loss.backward()
    got.loss.backward()
    if not shard:
        done.reduce_gradients()
    for (name, parameter), (other, one) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert name == other
        assert one.grad is not None
        dist.all_reduce(one.grad)
        one.grad /= dist.get_world_size()
        assert parameter.grad is not None, name
        assert close(whole(parameter.grad), one.grad), name

    # 3. Clipping and a step.
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert close(done.clip_gradients(0.1), norm)
    for parameters in (reference.parameters(), done.parameter_groups()):
        torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3).step()
    for parameter, one in zip(model.parameters(), reference.parameters(), strict=True):
        assert close(whole(parameter.detach()), one.detach())


def llama4_is_like_one_process(folder: Path) -> None:
    for sizes in ({"ep": 2}, {"ep": 1, "esp": 2}, {"mp": 2, "ep": 2}):
        reference, model, grid = llama4(), llama4(), Grid(**sizes)
        done = parallelize(model, grid)
        ids = make_ids(BATCH, 8, 1)
        loss_on(reference, ids).backward()
        loss_on(model, ids if grid.layout.mp > 1 else own_ids(1)).backward()
        done.reduce_gradients()
        for (name, parameter), one in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert parameter.grad is not None
            assert one.grad is not None
            assert close(whole(parameter.grad), one.grad, 1e-12), name
        load = torch.stack([layer.load for layer in done.layers.values() if layer.load is not None])
        dist.all_reduce(load)
        assert load.sum(1).tolist() == [ids.numel()] * 2, "rows that no token chose stay"
    model.save_pretrained(folder)
    dist.barrier()
    again = type(model).from_pretrained(folder)
    for (name, parameter), one in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(whole(parameter.detach()), one.detach()), name


def pair_is_like_one_process() -> None:
    grid = Grid(ep=2)
    for family in FAMILIES:
        assert_like_one_process(family, grid)
    assert_like_one_process("qwen3_moe", grid, shard=True)
    sharded_gradients_may_stay_sums(torch.float64, 1e-10)
    assert_like_one_process("olmoe", grid, movable=True)
    assert_like_one_process("olmoe", Grid(ep=1))
    assert_like_one_process("qwen3_moe", grid, gate="expert_choice")
    assert_like_one_process("qwen3_moe", grid, shard=True, gate="expert_choice")
    assert_like_one_process("mixtral", grid, dispatcher=lambda grid: HierarchicalDispatcher(grid.levels, 1))


def assert_gradients_are_means(reference: nn.Module, model: nn.Module, tolerance: float = 1e-10) -> None:
    for (name, parameter), one in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None, name
        assert one.grad is not None, name
        assert close(whole(parameter.grad), one.grad, tolerance), name


def average_gradients(reference: nn.Module) -> None:
    """Make the gradients of the whole model those of the mean of all processes' losses."""
    for parameter in reference.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def assert_steps_are_alike(reference: nn.Module, model: nn.Module, done: Parallelized) -> None:
    """After backward of both: the gradients, their norm, and the parameters after a step are the whole model's."""
    average_gradients(reference)
    assert_gradients_are_means(reference, model)
    assert close(done.clip_gradients(0.1), torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    for parameters in (reference.parameters(), done.parameter_groups()):
        torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3).step()
    for (name, parameter), one in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert close(whole(parameter.detach()), one.detach()), name


def mean_gradients(family: str, ids: Tensor) -> nn.Module:
    """The whole model with the gradients of the mean of all processes' losses."""
    reference = tiny(family)
    loss_on(reference, ids).backward()
    average_gradients(reference)
    return reference


def sharded_gradients_may_stay_sums(dtype: torch.dtype, tolerance: float) -> None:
    """For loops that divide their loss by the tokens of all processes."""
    ids, model = own_ids(1), tiny("qwen3_moe").to(dtype)
    done = parallelize(model, Grid(ep=2))
    with pytest.raises(ConfigError, match="gradient_divide_factor is 0, but it must be positive"):
        done.fully_shard(gradient_divide_factor=0)
    done.fully_shard(model.model.layers, gradient_divide_factor=1.0)
    (loss_on(model, ids) / dist.get_world_size()).backward()
    assert_gradients_are_means(mean_gradients("qwen3_moe", ids), model, tolerance)


def ddp_averages_everything(grids: list[dict[str, int]]) -> None:
    """Experts too, in each backward; micro-batches add up."""
    for sizes in grids:
        model, ids = tiny("qwen3_moe"), own_ids(1)
        reference = mean_gradients("qwen3_moe", ids)
        done = parallelize(model, Grid(**sizes))
        wrapped = DistributedDataParallel(model)
        with wrapped.no_sync():
            (loss_on(wrapped, ids) / 2).backward()
        (loss_on(wrapped, ids) / 2).backward()
        assert_gradients_are_means(reference, model)
        with pytest.raises(ConfigError, match="last forward was that of DistributedDataParallel"):
            done.reduce_gradients()
        # Without the wrapper it is the caller's again.
        model.zero_grad()
        loss_on(model, ids).backward()
        done.reduce_gradients()
        assert_gradients_are_means(reference, model)


def ddp_averages_checkpointed_layers() -> None:
    """In backward they run again, outside of DDP's forward."""
    for reentrant in (False, True):
        model, ids = tiny("qwen3_moe"), own_ids(1)
        reference = mean_gradients("qwen3_moe", ids)
        parallelize(model, Grid(ep=2))
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        wrapped = DistributedDataParallel(model.train())
        loss_on(wrapped, ids).backward()
        assert_gradients_are_means(reference, model)


def the_mean_stays_with_its_forward() -> None:
    """Whatever becomes of the parameters, and whatever else runs before backward."""
    ids = own_ids(1)
    reference = mean_gradients("qwen3_moe", ids)
    for schedule in (None, ChunkedSchedule(2)):
        model = tiny("qwen3_moe")
        parallelize(model, Grid(ep=2), schedule=schedule)
        model.float().double()._apply(torch.clone)
        wrapped = DistributedDataParallel(model)
        with wrapped.no_sync():
            first = loss_on(wrapped, ids) / 2
        with torch.no_grad():
            loss_on(model, ids)
        first.backward()
        loss = loss_on(wrapped, ids) / 2
        with torch.no_grad():
            loss_on(model, ids)
        loss_on(model.eval(), ids)
        loss.backward()
        assert_gradients_are_means(reference, model, 1e-6)

    # Without DDP nothing is averaged, even if DDP has run in between.
    model.zero_grad()
    loss = loss_on(model, ids)
    with torch.no_grad():
        loss_on(wrapped, ids)
    loss.backward()
    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(name).grad
        assert isinstance(expected, Tensor)
        assert isinstance(parameter.grad, Tensor)
        if "experts" in name:
            assert close(whole(parameter.grad), expected * dist.get_world_size(), 1e-6)


def frozen_experts_need_no_mean() -> None:
    model = tiny("qwen3_moe")
    done, ids = parallelize(model, Grid(ep=2)), own_ids(1)
    first, *others = done.experts()
    first.requires_grad_(False)
    reference = mean_gradients("qwen3_moe", ids)
    wrapped = DistributedDataParallel(model)
    loss_on(wrapped, ids).backward()
    assert first.grad is None
    first.grad = next(p.grad for n, p in reference.named_parameters() if n.endswith("gate_up_proj"))
    assert_gradients_are_means(reference, model)
    for parameter in others:
        parameter.requires_grad_(False)
    loss_on(wrapped, ids).backward()


def sharded_doubles_keep_their_mean() -> None:
    """FSDP2 leaves experts of such dtypes alone."""
    model, ids = tiny("qwen3_moe"), own_ids(1)
    reference = mean_gradients("qwen3_moe", ids)
    parallelize(model, Grid(ep=2)).fully_shard(model.model.layers)
    model.float().double()
    loss_on(model, ids).backward()
    assert_gradients_are_means(reference, model, 1e-6)


def sharded_experts_that_are_trained_later_have_their_mean() -> None:
    """As in training of the dense part first."""
    ids = own_ids(1)
    for dtype in (torch.float32, torch.float64):
        model, reference = tiny("qwen3_moe").to(dtype), mean_gradients("qwen3_moe", ids)
        done = parallelize(model, Grid(ep=2))
        for trains in (False, True):
            for parameter in done.experts():
                parameter.requires_grad_(trains)
            if not trains:
                done.fully_shard(model.model.layers)
        loss_on(model, ids).backward()
        assert_gradients_are_means(reference.to(dtype), model, 1e-4 if dtype == torch.float32 else 1e-10)


def runs_that_a_reentrant_checkpoint_cannot_tell_apart_are_refused() -> None:
    model, ids = tiny("qwen3_moe"), own_ids(1)
    reference = mean_gradients("qwen3_moe", ids)
    parallelize(model, Grid(ep=2))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    wrapped = DistributedDataParallel(model.train())

    def step(train: bool) -> None:
        loss = loss_on(wrapped, ids)
        model.train(train)
        with torch.no_grad():
            loss_on(model, ids)
        model.train()
        loss.backward()

    with torch.no_grad():
        loss_on(model, ids)  # before a step it is nobody's forward
    step(train=False)
    assert_gradients_are_means(reference, model)
    with pytest.raises(ConfigError, match=r"unknown who averages their gradients; call model\.eval"):
        step(train=True)


def checkpointed_layers_in_chunks_run_in_one_piece() -> None:
    model, ids = tiny("mixtral"), own_ids(1)
    reference = mean_gradients("mixtral", ids)
    done = parallelize(model, Grid(ep=2), schedule=ChunkedSchedule(2))
    model.gradient_checkpointing_enable()
    with pytest.warns(UserWarning, match="runs in one piece"):
        loss_on(model.train(), ids).backward()
    done.reduce_gradients()
    assert_gradients_are_means(reference, model)


def compiled_models_break_their_graph_at_experts() -> None:
    for wrap in (lambda model: model, DistributedDataParallel):
        model, ids = tiny("qwen3_moe"), own_ids(1)
        reference = mean_gradients("qwen3_moe", ids)
        done = parallelize(model, Grid(ep=2))
        compiled = torch.compile(wrap(model), backend="aot_eager")
        loss_on(compiled, ids).backward()
        if compiled._orig_mod is model:
            done.reduce_gradients()
        assert_gradients_are_means(reference, model, 1e-6)


def a_rank_without_tokens_takes_part() -> None:
    model, reference = tiny("mixtral"), tiny("mixtral")
    done = parallelize(model, init_device_mesh("cpu", (2,)))
    layer, block = done.layers["model.layers.0.mlp.experts"], reference.model.layers[0].mlp
    spread = model.model.layers[0].mlp
    x = torch.randn(1, 5 if dist.get_rank() == 0 else 0, 64, dtype=torch.float64, requires_grad=True)
    y = spread(x)
    assert y.shape == x.shape
    y.sum().backward()
    if dist.get_rank() == 0:
        assert close(y, block(x.detach()))
    block(torch.randn(1, 5, 64, dtype=torch.float64) if dist.get_rank() else x.detach()).sum().backward()
    for name, parameter in layer.experts.named_parameters():
        got, expected = whole(parameter.grad), block.experts.get_parameter(name).grad
        dist.broadcast(expected, 0)
        assert close(got, expected)


def files_are_those_of_the_whole_model(folder: Path) -> None:
    for family in ("qwen3_moe", "deepseek_v3"):
        model = tiny(family)
        if dist.get_rank() == 0:
            model.save_pretrained(folder / "whole")
        parallelize(model, Grid(ep=2))
        model.save_pretrained(folder / "spread")
        for path in (folder / "whole").iterdir() if dist.get_rank() == 0 else ():
            assert path.read_bytes() == (folder / "spread" / path.name).read_bytes(), path.name
        dist.barrier()
        (folder / "file").touch()
        with pytest.raises(CheckpointError, match="could not be saved"):
            model.save_pretrained(folder / "file" / "below")


def experts_change_places() -> None:
    model, reference = tiny("olmoe"), tiny("olmoe")
    grid = Grid(ep=2)
    done = parallelize(model, grid, movable=True)
    optimizer = torch.optim.AdamW(done.parameter_groups(), lr=1e-2, eps=1e-3)
    other = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    mover = ExpertMover([*done.layers.values()], grid.ep, [optimizer])
    for step in range(3):
        ids = own_ids(step)
        expected = loss_on(reference, make_ids(BATCH, 8, step))
        expected.backward()
        other.step()
        other.zero_grad()
        loss = loss_on(model, ids)
        loss.backward()
        dist.all_reduce(loss.data)
        assert close(loss / 2, expected, 1e-6)  # transformers computes it in fp32
        done.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
        assert mover.swap([(0, 3 - step)] * len(done.layers)).num_experts == 2 * len(done.layers)
    with pytest.raises(CheckpointError, match="logical order"):
        model.state_dict()
    with mover.logical_order():
        for name, tensor in model.state_dict().items():
            assert close(whole(tensor), reference.state_dict()[name], 1e-6), name


def misfits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"1 experts, but ep = 2 processes need at least one each; lower ep to 1"):
        parallelize(make_model("mixtral", num_local_experts=1, num_experts_per_tok=1), Grid(ep=2))
    with pytest.raises(ModelError, match="has no mixture-of-experts block"):
        parallelize(make_model("llama"), Grid(ep=2))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    with pytest.raises(
        ConfigError, match=r"none is called ep, so every process would keep all experts; pass Grid\(mp=2, ep=2\)"
    ):
        parallelize(make_model("mixtral"), mesh)
    model = make_model("mixtral")
    parallelize(model, Grid(ep=2))
    with pytest.raises(ModelError, match="parallelized already"):
        parallelize(model, Grid(ep=2))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(CheckpointError, match="neither pickled nor copied; save the model with save_pretrained"):
            copied(model)
    copy.deepcopy(parallelize(make_model("mixtral"), Grid(ep=1)).model)


def hosts_that_would_reduce_other_gradients_are_refused() -> None:
    """Each of them would train on, with gradients that are no means, or none."""
    ids, grid = own_ids(1), Grid(ep=2)

    # 1. What was around the model before its experts were spread.
    for is_inside in (True, False):
        model = tiny("mixtral")
        wrapped = DistributedDataParallel(nn.Sequential(model) if is_inside else model)
        parallelize(model, grid)
        with pytest.raises(ConfigError, match=r"DistributedDataParallel was made before, .*; call parallelize first"):
            wrapped(ids)

    done = parallelize(tiny("mixtral"), grid)
    with pytest.raises(
        ConfigError, match=r"DistributedDataParallel is over ranks \[\d\], but \[\d\] have other tokens"
    ):
        DistributedDataParallel(done.model, process_group=grid.edp)(ids)

    for ids_here in (ids, ids[:, : 8 - dist.get_rank()]):
        done = parallelize(tiny("mixtral"), Grid(mp=2, ep=2))
        with pytest.raises(RoutingError, match=r"^the ranks \(0, 1\) of an MP group have .*tokens, but S1"):
            done.model(ids_here)

    # 2. replicate, before and after; without the experts it is DDP.
    model = tiny("mixtral")
    for before in (True, False):
        refused = tiny("mixtral")
        for step in (replicate, partial(parallelize, mesh=grid))[:: 1 if before else -1]:
            step(refused)
        with pytest.raises(ConfigError, match="replicate would give all the first one's; give it ignored_modules"):
            loss_on(refused, ids)
    done = parallelize(model, grid)
    replicate(model, ignored_modules=[layer.experts for layer in done.layers.values()])
    loss_on(model, ids).backward()
    assert_gradients_are_means(mean_gradients("mixtral", ids), model)

    # 3. FSDP2 around a part, or all, and reduce_gradients after it.
    for shards_all in (False, True):
        model = tiny("mixtral")
        done = parallelize(model, grid)
        if shards_all:
            done.fully_shard()
        else:
            fully_shard(model.model.layers[0].self_attn)
        with pytest.raises(ConfigError, match=r"(self_attn|FSDPMixtralForCausalLM) is FSDP2's, .* leave the call out"):
            done.reduce_gradients()

    # 4. A group over which gradients in codes would be added to those of other experts.
    model, other = tiny("mixtral").float(), tiny("mixtral").float()
    gradients = compress_gradients(model, dist.group.WORLD)
    for one in (model, other):
        parallelize(one, grid)
    for step in (gradients.follow, partial(compress_gradients, other, dist.group.WORLD)):
        with pytest.raises(ModelError, match=r"_proj is cut over ranks, and the group's ranks \[\d\] hold other"):
            step()
    for norm in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match=f"max_norm is {norm}, but it must be at least 0"):
            done.clip_gradients(norm)


def gradients_are_reduced_once_a_step() -> None:
    """Not after each micro-batch: what was reduced then would be divided again."""
    for zeroes, warns in ((False, True), (True, False)):
        model = tiny("mixtral")
        done = parallelize(model, Grid(ep=2))
        for step in range(2):
            loss_on(model, own_ids(step)).backward()
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                done.reduce_gradients()
            assert ["the gradients of experts were reduced before" in str(one.message) for one in heard] == (
                [True] if step and warns else []
            )
            if zeroes and not step:
                model.zero_grad(set_to_none=False)
    assert_gradients_are_means(mean_gradients("mixtral", own_ids(1)), model)


def start(family: str, eight_bits: bool) -> tuple[Parallelized, torch.optim.Optimizer]:
    model = make_model(family) if eight_bits else tiny(family)
    done = parallelize(model, Grid(ep=dist.get_world_size()) if dist.is_initialized() else None)
    if eight_bits:
        return done, AdamW8bit(done.parameter_groups(), lr=1e-2, eps=1e-3, min_8bit_numel=16)
    return done, torch.optim.AdamW(done.parameter_groups(), lr=1e-2, eps=1e-3)


def train(done: Parallelized, optimizer: torch.optim.Optimizer, step: int) -> None:
    ids = own_ids(step) if dist.is_initialized() else make_ids(BATCH, 8, step)
    loss_on(done.model, ids).backward()
    done.reduce_gradients()
    optimizer.step()
    optimizer.zero_grad()


def go_on(folder: Path, family: str, source: str, target: str, step: int, eight_bits: bool = False) -> None:
    """Load what another world saved, train one step, save."""
    done, optimizer = start(family, eight_bits)
    load_sharded(folder / source, done.model, optimizer)
    train(done, optimizer, step)
    save_sharded(folder / target, done.model, optimizer)


def chain(folder: Path, family: str, worlds: list[int], eight_bits: bool = False) -> None:
    """Train one step in each world, each from the checkpoint before; in the end compare with never having stopped."""
    done, optimizer = start(family, eight_bits)
    train(done, optimizer, 0)
    save_sharded(folder / "0", done.model, optimizer)
    for step, world in enumerate(worlds, 1):
        (folder / f"world-{step}").mkdir()
        scenario = partial(go_on, folder, family, f"{step - 1}", f"{step}", step, eight_bits)
        run_world([scenario], world, folder / f"world-{step}")
        train(done, optimizer, step)
    last, again = start(family, eight_bits)
    load_sharded(folder / f"{len(worlds)}", last.model, again)
    # transformers' losses are fp32, and so are DeepSeek's router logits, products of a process's own rows. 8-bit
    # moments of gradients that differ by that rounding may round to neighbors.
    tolerance = 2e-3 if eight_bits else 1e-4 if "deepseek" in family else 1e-6
    for (name, got), expected in zip(last.model.named_parameters(), done.model.parameters(), strict=True):
        assert close(got.detach(), expected.detach(), tolerance), name
        moments, others = again.state[got], optimizer.state[expected]
        assert moments.keys() == others.keys()
        if not eight_bits:
            assert all(close(moments[key], others[key], tolerance) for key in moments), name


@pytest.mark.ci
def test_a_pair_computes_what_one_process_does(tmp_path: Path) -> None:
    scenarios = [
        pair_is_like_one_process,
        a_rank_without_tokens_takes_part,
        experts_change_places,
        misfits_are_refused,
        hosts_that_would_reduce_other_gradients_are_refused,
        gradients_are_reduced_once_a_step,
        partial(files_are_those_of_the_whole_model, tmp_path),
        partial(ddp_averages_everything, [{"ep": 2}, {"ep": 1}]),
        checkpointed_layers_in_chunks_run_in_one_piece,
        ddp_averages_checkpointed_layers,
        the_mean_stays_with_its_forward,
        frozen_experts_need_no_mean,
        sharded_doubles_keep_their_mean,
        sharded_experts_that_are_trained_later_have_their_mean,
        runs_that_a_reentrant_checkpoint_cannot_tell_apart_are_refused,
    ]
    run_world(scenarios, 2, tmp_path)


def sharded_packed_and_in_eight_bits() -> None:
    """FSDP2, activations in four bits and AdamW8bit together have the losses and gradients of one process."""
    reference, model = (tiny("qwen3_moe").float() for _ in range(2))
    done = parallelize(model, Grid(ep=2))
    for each in (reference, model):
        compress_activations(each)
    done.fully_shard(model.model.layers)
    optimizers = [AdamW8bit(each, lr=1e-3) for each in ([*reference.parameters()], done.parameter_groups())]
    for step in range(4):
        alone, own = loss_on(reference, make_ids(BATCH, 16, step)), loss_on(model, own_ids(step, 16))
        alone.backward()
        own.backward()
        for (name, parameter), one in zip(model.named_parameters(), reference.parameters(), strict=True):
            if step == 0:  # then weights are a little apart
                assert parameter.grad is not None
                assert one.grad is not None
                assert (whole(parameter.grad) - one.grad).norm() < 0.4 * one.grad.norm(), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mean = own.detach().clone()
        dist.all_reduce(mean)
        assert float(mean) / dist.get_world_size() == pytest.approx(float(alone), rel=1e-2)


@pytest.mark.slow
def test_a_pair_trains_in_few_bits_and_shards_what_one_process_does(tmp_path: Path) -> None:
    run_world([sharded_packed_and_in_eight_bits], 2, tmp_path)


@pytest.mark.slow
def test_a_pair_computes_what_llama4_does(tmp_path: Path) -> None:
    run_world([partial(llama4_is_like_one_process, tmp_path / "saved")], 2, tmp_path)


@pytest.mark.slow
def test_a_pair_computes_what_one_process_does_compiled(tmp_path: Path) -> None:
    run_world([compiled_models_break_their_graph_at_experts], 2, tmp_path)


def test_a_checkpoint_goes_on_in_another_world(tmp_path: Path) -> None:
    chain(tmp_path, "qwen3_moe", [2])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_go_from_one_process_to_two_to_four_and_back(family: str, tmp_path: Path) -> None:
    chain(tmp_path, family, [2, 4, 1])


@pytest.mark.slow
def test_eight_bit_moments_of_experts_go_along(tmp_path: Path) -> None:
    chain(tmp_path, "mixtral", [2, 4, 1], eight_bits=True)


def four_in_two_replicas() -> None:
    grid = Grid(ep=2)
    assert grid.layout.edp == 2
    for family in ("qwen3_moe", "deepseek_v3"):
        assert_like_one_process(family, grid)
        assert_like_one_process(family, grid, shard=True)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        sharded_gradients_may_stay_sums(dtype, tolerance)
    ddp_averages_everything([{"ep": 2}, {"ep": 4}])


@pytest.mark.slow
def test_four_with_each_expert_twice_compute_what_one_process_does(tmp_path: Path) -> None:
    run_world([four_in_two_replicas], 4, tmp_path)
