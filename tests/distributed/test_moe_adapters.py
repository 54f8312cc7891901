"""LoRA of PEFT on experts that are spread over processes: as one process has it, in either order of the two calls."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import CheckpointError, ConfigError
from laconic.moe.huggingface import parallelize
from laconic.moe.parallel.grid import Grid
from laconic.moe.pipeline.schedule import ChunkedSchedule
from tests.distributed.test_moe_huggingface import close, loss_on, own_ids, tiny, whole
from tests.moe.worlds import run_world

peft = pytest.importorskip("peft")

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
BIASES = ["mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"]


def adapted(model: nn.Module, targets: list[str] = EXPERTS, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=2, init_lora_weights=False, target_modules=["q_proj", "o_proj"], target_parameters=targets
    )
    return peft.get_peft_model(model, config)


def spread(family: str, grid: Grid, first: bool, targets: list[str] = EXPERTS, **options: Any) -> Any:
    """The adapted model on `grid`, and the result of `parallelize`; `first` is the adapters' turn."""
    model = tiny(family, **options.pop("changes", {}))
    if first:
        model = adapted(model, targets)
    done = parallelize(model, grid, **options)
    return (model if first else adapted(model, targets)), done


def mean_gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    loss_on(model, ids).backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            found[name] = parameter.grad / dist.get_world_size()
    return found


def assert_gradients(model: Any, expected: dict[str, Tensor]) -> None:
    got = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        assert gradient is not None, name
        off = float((whole(gradient) - expected[name]).abs().max())
        assert close(whole(gradient), expected[name]), (name, off)


def outputs_and_gradients_are_those_of_one_process(sizes: dict[str, int]) -> None:
    ids, grid = own_ids(1), Grid(**sizes)
    for family, targets, changes in (
        ("qwen3_moe", EXPERTS, {}),
        ("gpt_oss", EXPERTS + BIASES, {}),  # transposed, and PEFT takes a bias [E, ...] for one matrix
        ("deepseek_v3", EXPERTS, {}),
        ("qwen3_moe", EXPERTS, {"num_experts": 5}),
    ):
        reference = adapted(tiny(family, **changes), targets)
        expected = mean_gradients(reference, ids)
        with torch.no_grad():
            logits = reference(input_ids=ids).logits
        for first in (True, False):
            model, done = spread(family, grid, first, targets, changes=changes)
            assert model.state_dict().keys() == reference.state_dict().keys()
            assert close(model(input_ids=ids).logits, logits, 1e-6 if family == "deepseek_v3" else 1e-10)
            if family == "deepseek_v3":  # its router is in fp32
                continue
            loss_on(model, ids).backward()
            done.reduce_gradients()
            assert_gradients(model, expected)
            model.zero_grad()
            wrapped = DistributedDataParallel(model)
            loss_on(wrapped, ids).backward()
            assert_gradients(model, expected)


def chunks_and_checkpoints_change_nothing() -> None:
    ids = own_ids(1)
    expected = mean_gradients(adapted(tiny("qwen3_moe")), ids)
    model, done = spread("qwen3_moe", Grid(ep=2), False, schedule=ChunkedSchedule(2))
    loss_on(model, ids).backward()
    done.reduce_gradients()
    assert_gradients(model, expected)
    for reentrant in (False, True):
        model, _ = spread("qwen3_moe", Grid(ep=2), True)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        wrapped = DistributedDataParallel(model.train())
        loss_on(wrapped, ids).backward()
        assert_gradients(model, expected)


def a_rank_without_rows_takes_part() -> None:
    """All tokens choose the experts of one process."""
    reference = adapted(tiny("mixtral"))
    ids = own_ids(1)
    models = [reference, *(spread("mixtral", Grid(ep=2), first)[0] for first in (True, False))]
    for model in models:
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.data[:2] = 0  # the lowest numbers of equal ones are chosen
                parameter.data[2:] = 0
    expected = mean_gradients(reference, ids)
    for model in models[1:]:
        wrapped = DistributedDataParallel(model)
        loss_on(wrapped, ids).backward()
        assert_gradients(model, expected)


def adapters_are_saved_loaded_and_merged(folder: Path) -> None:
    ids = own_ids(1)
    reference = adapted(tiny("qwen3_moe"))
    for first in (True, False):
        place = folder / f"{first}"
        model, _ = spread("qwen3_moe", Grid(ep=2), first)
        with torch.no_grad():
            expected = reference(input_ids=ids).logits
            # Rank 0 alone may save, as hosts do.
            if dist.get_rank() == 0:
                model.save_pretrained(place)
                reference.save_pretrained(place / "one")
                weights, config = "adapter_model.safetensors", "adapter_config.json"
                assert (place / weights).read_bytes() == (place / "one" / weights).read_bytes()
                configs = [json.loads((each / config).read_text()) for each in (place, place / "one")]
                for each in configs:
                    each["target_modules"].sort()  # a set
                assert configs[0] == configs[1]
            dist.barrier()
            base = tiny("qwen3_moe")
            parallelize(base, Grid(ep=2))
            again = peft.PeftModel.from_pretrained(base, place)
            assert close(again(input_ids=ids).logits, expected)

            # Two at a time, merged, taken out again, and off.
            for each in (model, reference):
                torch.manual_seed(2)
                each.add_adapter("other", each.peft_config["default"])
                each.base_model.set_adapter(["default", "other"])
            both = reference(input_ids=ids).logits
            assert not close(both, expected)
            assert close(model(input_ids=ids).logits, both)
            model.merge_adapter()
            assert close(model(input_ids=ids).logits, both)
            model.unmerge_adapter()
            assert close(model(input_ids=ids).logits, both)
            with model.disable_adapter(), reference.disable_adapter():
                assert close(model(input_ids=ids).logits, reference(input_ids=ids).logits)
            for each in (model, reference):
                each.base_model.set_adapter("default")
                each.delete_adapter("other")

            # The merged model is the base model, and all processes save it.
            merged = model.merge_and_unload(safe_merge=True)
            assert close(merged(input_ids=ids).logits, expected)
            merged.save_pretrained(place / "merged")
            if dist.get_rank() == 0:
                saved = type(merged).from_pretrained(
                    place / "merged", dtype=torch.float64, experts_implementation="eager"
                )
                assert close(saved(input_ids=ids).logits, expected, 1e-6)
            dist.barrier()


def a_merge_that_overflows_is_refused_everywhere() -> None:
    model, _ = spread("qwen3_moe", Grid(ep=2), False)
    experts = model.base_model.model.model.layers[0].mlp.experts
    experts.lora_A["default"].weight.data[0] = torch.inf  # expert 0 is on rank 0
    with pytest.raises(ValueError, match=r"would make .*_proj NaN or infinite"):
        model.merge_and_unload(safe_merge=True)


def what_would_be_wrong_is_refused() -> None:
    for options, message in (
        ({"grid": Grid(mp=2, ep=1, esp=2)}, "mp is 2, so that a process would get only a part"),
        ({"grid": Grid(ep=2), "movable": True}, "movable experts would leave their factors behind"),
    ):
        grid = options.pop("grid")
        model = adapted(tiny("qwen3_moe"))
        before = [name for name, _ in model.named_parameters()]
        with pytest.raises(ConfigError, match=message):
            parallelize(model, grid, **options)
        assert [name for name, _ in model.named_parameters()] == before
        base = tiny("qwen3_moe")
        parallelize(base, grid, **options)
        with pytest.raises(ConfigError, match=message):
            adapted(base)
    model, _ = spread("qwen3_moe", Grid(ep=2), True)
    for name, parameter in model.named_parameters():
        if "gate_up_proj" in name:
            parameter.requires_grad_(True)
    with pytest.raises(CheckpointError, match="is trained beside the adapters and cut over processes") as caught:
        model.save_pretrained("nowhere")
    assert len(str(caught.value)) < 300


@pytest.mark.ci
def test_adapters_on_a_pair_are_those_of_one_process(tmp_path: Path) -> None:
    same = partial(outputs_and_gradients_are_those_of_one_process, {"ep": 2})
    run_world([same, a_rank_without_rows_takes_part, what_would_be_wrong_is_refused], 2, tmp_path)


@pytest.mark.ci
def test_adapters_on_a_pair_are_checkpointed_saved_and_merged(tmp_path: Path) -> None:
    kept = partial(adapters_are_saved_loaded_and_merged, tmp_path)
    run_world([chunks_and_checkpoints_change_nothing, kept, a_merge_that_overflows_is_refused_everywhere], 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"ep": 1, "esp": 2}, {"ep": 2, "esp": 2}, {"ep": 2}])
def test_adapters_are_cut_with_the_hidden_dimension_and_have_replicas(sizes: dict[str, int], tmp_path: Path) -> None:
    world = 2 if sizes["ep"] == 1 else 4
    run_world([partial(outputs_and_gradients_are_those_of_one_process, sizes)], world, tmp_path)
