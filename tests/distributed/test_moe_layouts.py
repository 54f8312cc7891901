"""Experts of layouts of their own, over processes: LongCat's beside identities, and DBRX's behind each other."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import ConfigError
from laconic.formats.shards import local_part
from laconic.moe import update_router_biases
from laconic.moe.huggingface import from_pretrained, load_sharded, parallelize, save_sharded
from laconic.moe.parallel.grid import Grid
from tests.activations.models import VOCABULARY, make_ids
from tests.distributed.test_moe_huggingface import (
    BATCH,
    assert_gradients_are_means,
    assert_steps_are_alike,
    average_gradients,
    close,
    loss_on,
    own_ids,
    whole,
)
from tests.moe.worlds import run_world

_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def own_layout(family: str, seed: int = 0) -> nn.Module:
    """The same float64 model in every process."""
    from transformers import DbrxConfig, DbrxForCausalLM, LongcatFlashConfig, LongcatFlashForCausalLM

    torch.manual_seed(seed)
    if family == "dbrx":
        sizes: dict[str, Any] = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCABULARY}
        attention = {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}  # it does not run without the last two
        inside = {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}
        model: nn.Module = DbrxForCausalLM(DbrxConfig(**sizes, **_SPECIAL, attn_config=attention, ffn_config=inside))
    else:
        sizes = {"hidden_size": 32, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "num_layers": 2}
        sizes |= {"num_attention_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
        sizes |= {"qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "vocab_size": VOCABULARY}
        config = LongcatFlashConfig(**sizes, **_SPECIAL, n_routed_experts=4, zero_expert_num=6, moe_topk=4)
        model = LongcatFlashForCausalLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.double()


def a_pair_is_like_one_process(family: str, folder: Path) -> None:
    tolerance = 1e-10 if family == "dbrx" else 1e-5  # LongCat routes in fp32
    ids = own_ids(1)
    reference = own_layout(family)
    with torch.no_grad():
        logits = reference(input_ids=ids, use_cache=False).logits
    loss_on(reference, ids).backward()
    average_gradients(reference)
    for layout in ({"ep": 2}, {"mp": 2, "ep": 2}, {"ep": 1, "esp": 2}):
        model = own_layout(family)
        if family == "dbrx" and "esp" in layout:
            with pytest.raises(ConfigError, match=r"esp is 2, but experts of .* lie behind each other"):
                parallelize(model, Grid(**layout))
            continue
        done = parallelize(model, Grid(**layout))
        its_ids = make_ids(BATCH, 8, 1) if "mp" in layout else ids
        got = model(input_ids=its_ids, labels=its_ids, use_cache=False)
        if "mp" not in layout:
            assert close(got.logits, logits, tolerance), layout
        got.loss.backward()
        done.reduce_gradients()
        assert_gradients_are_means(reference, model, tolerance)
        if layout == {"ep": 2}:
            for parameter in done.experts():
                assert parameter.to_local().numel() * 2 == parameter.numel()  # type: ignore[operator]

    # DDP and FSDP2.
    model = own_layout(family)
    parallelize(model, Grid(ep=2))
    wrapped = DistributedDataParallel(model)
    loss_on(wrapped, ids).backward()
    assert_gradients_are_means(reference, model, tolerance)
    other, model = own_layout(family), own_layout(family)
    done = parallelize(model, Grid(ep=2))
    done.fully_shard()
    loss_on(other, ids).backward()
    loss_on(model, ids).backward()
    if family == "dbrx":
        assert_steps_are_alike(other, model, done)
    else:
        average_gradients(other)
        assert_gradients_are_means(other, model, tolerance)

    # Saved with the family's own names.
    model = own_layout(family)
    done = parallelize(model, Grid(ep=2))
    assert model.state_dict().keys() == reference.state_dict().keys()
    model.save_pretrained(folder / "saved")  # type: ignore[operator]
    optimizer = torch.optim.AdamW(done.parameter_groups(), lr=1e-2)
    loss_on(model, ids).backward()
    done.reduce_gradients()
    optimizer.step()
    save_sharded(folder / "sharded", model, optimizer)
    dist.barrier()
    again = type(reference).from_pretrained(folder / "saved")  # type: ignore[attr-defined]
    for (name, parameter), one in zip(reference.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, one), name
    read = from_pretrained(folder / "saved", Grid(ep=2)).model
    for (name, parameter), one in zip(reference.named_parameters(), read.parameters(), strict=True):
        assert torch.equal(parameter, whole(one)), name

    # On with one process's experts, and with state dicts of whole tensors.
    alone = own_layout(family, seed=1)
    theirs = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    load_sharded(folder / "sharded", alone, theirs)
    for (name, parameter), one in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(whole(parameter.detach()), one), name
        assert torch.equal(whole(optimizer.state[parameter]["exp_avg"]), theirs.state[one]["exp_avg"]), name
    model.load_state_dict(reference.state_dict())
    for (name, parameter), one in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(parameter.detach()), one), name


def four_in_two_replicas(family: str) -> None:
    """FSDP2 cuts experts over their replicas, and no rows of them that are cut in blocks."""
    tolerance = 1e-10 if family == "dbrx" else 1e-5
    reference, model, ids = own_layout(family), own_layout(family), own_ids(1)
    done = parallelize(model, Grid(ep=2))
    done.fully_shard()
    loss_on(reference, ids).backward()
    loss_on(model, ids).backward()
    average_gradients(reference)
    assert_gradients_are_means(reference, model, tolerance)
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert close(done.clip_gradients(0.1), norm, tolerance)
    for parameters in (reference.parameters(), done.parameter_groups()):
        torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3).step()
    for (name, parameter), one in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert close(whole(parameter.detach()), one.detach(), tolerance), name
        assert local_part(parameter).numel() * (4 if "experts" in name else 1) <= parameter.numel(), name


def others_are_refused(family: str) -> None:
    size = "the 2 experts in blocks beside identities" if family == "longcat_flash" else "the 4 experts behind"
    with pytest.raises(ConfigError, match=f"ep is 3, but it must divide {size}"):
        parallelize(own_layout(family), Grid(ep=3))
    with pytest.raises(ConfigError, match=r"movable is True, but .* which an ExpertMover does not know"):
        parallelize(own_layout(family), movable=True)
    if family == "longcat_flash":
        done = parallelize(own_layout(family))
        with pytest.raises(ConfigError, match="has an e_score_correction_bias of as many values as experts"):
            update_router_biases(done.model)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["longcat_flash", "dbrx"])
def test_a_pair_computes_what_one_process_does(family: str, tmp_path: Path) -> None:
    run_world([partial(a_pair_is_like_one_process, family, tmp_path)], 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["longcat_flash", "dbrx"])
def test_four_with_each_expert_twice_compute_what_one_process_does(family: str, tmp_path: Path) -> None:
    run_world([partial(four_in_two_replicas, family)], 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["longcat_flash", "dbrx"])
def test_what_its_layout_does_not_allow_is_refused(family: str, tmp_path: Path) -> None:
    run_world([partial(others_are_refused, family)], 3, tmp_path)
