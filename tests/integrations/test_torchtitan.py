"""torchtitan's own trainer with its Llama 3: converted on the meta device, sharded, with AdamW8bit, resumed."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import laconic
from laconic.activations import ActivationPlan, SavedTensorTracker, find_sites
from laconic.errors import ConfigError
from laconic.formats import BlockFormat
from laconic.integrations import LaconicConfig
from tests.activations.models import relative_error
from tests.distributed.processes import free_port, rank_environment, run_ranks
from tests.integrations.moe_hosts import FAMILIES, cases_of, measure

pytest.importorskip("torchtitan")

pytestmark = pytest.mark.xdist_group("torchtitan")


def _train(rank: int, num_ranks: int, port: int, folder: Path, parallelism: dict[str, Any]) -> None:
    os.environ.update(rank_environment(rank, num_ranks, port))
    os.chdir(folder)
    warnings.simplefilter("ignore")  # torchtitan's own, of a device that is no accelerator
    torch.set_num_threads(1)
    from tests.integrations import titan  # before anything else imports torchtitan

    from laconic.integrations.torchtitan import LaconicConverter, adamw8bit  # isort: skip

    plain, _ = titan.trained(titan.trainer_config("plain", [], **parallelism))
    assert plain[-1] < plain[0]

    def config() -> Any:
        return titan.trainer_config("ours", [LaconicConverter.Config()], adamw8bit(lr=2e-3), **parallelism)

    losses, weights = titan.trained(config())
    assert losses[0] == plain[0]  # the bits of the forward
    assert losses == pytest.approx(plain, rel=5e-3)
    for value in weights.values():  # gathered from shards on every rank; equal on all replicas
        first = value.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, value)

    dist.barrier()
    resumed, again = titan.trained(config(), load_step=2)
    assert resumed == losses[2:]
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def _run(num_ranks: int, folder: Path, **parallelism: Any) -> None:
    run_ranks(_train, (num_ranks, free_port(), folder, parallelism), num_ranks)


@pytest.mark.slow
def test_one_process_trains_and_resumes(tmp_path: Path) -> None:
    _run(1, tmp_path)


@pytest.mark.slow
def test_two_processes_with_shards(tmp_path: Path) -> None:
    # Under spmd_types, its default, torchtitan 0.3 hands fully_shard plain tensors, which torch 2.13 refuses.
    _run(2, tmp_path, spmd_backend="partial_dtensor")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_over_processes_train_as_in_one(family: str, tmp_path: Path) -> None:
    cells = [("torchtitan", family, case) for case in cases_of("torchtitan")]
    for (_, _, case), number in zip(cells, measure(cells, tmp_path), strict=True):
        assert isinstance(number, float), number
        assert number < 1e-9, case


@pytest.fixture
def titan() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.integrations import titan
    return titan


def _ids() -> torch.Tensor:
    return torch.randint(0, 2048, (2, 64), generator=torch.Generator().manual_seed(0))


def _saved(model: torch.nn.Module, **inputs: Any) -> tuple[torch.Tensor, int]:
    with SavedTensorTracker(model) as tracker:
        out = model(**inputs)
    logits = out if isinstance(out, torch.Tensor) else out.logits
    logits.float().logsumexp(-1).sum().backward()
    return logits.detach(), tracker.nbytes


def test_a_model_built_on_meta_saves_what_llama_saves_and_computes_what_it_did(titan: Any) -> None:
    from laconic.integrations.torchtitan import LaconicConverter

    inputs = {"tokens": _ids(), "attention_masks": None, "positions": torch.arange(64).expand(2, -1)}
    found = {}
    for name, converters in (("plain", []), ("ours", [LaconicConverter.Config()])):
        torch.manual_seed(0)
        model = titan.make_model(titan.model_spec(converters, layers=2).model, "cpu")
        found[name] = *_saved(model, **inputs), {n: p.grad for n, p in model.named_parameters()}
    assert torch.equal(found["ours"][0], found["plain"][0])
    for name, gradient in found["ours"][2].items():
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), found["plain"][2][name].flatten(), 0) > 0.98

    config = LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=16
    )
    llama = LlamaForCausalLM(config).train()
    before = _saved(llama, input_ids=_ids(), use_cache=False)[1]
    laconic.compress_activations(llama)
    after = _saved(llama, input_ids=_ids(), use_cache=False)[1]
    factor, expected = found["plain"][1] / found["ours"][1], before / after
    assert factor > 0.9 * expected > 3


@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_attention_around_kernels_is_a_site_that_runs_again(titan: Any, backend: str, monkeypatch: Any) -> None:
    from torchtitan.models.common import attention as titan_attention

    config = {"flex": titan_attention.FlexAttention, "varlen": titan_attention.VarlenAttention}[backend].Config()
    runs = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        runs.append(q.requires_grad)
        if backend == "flex":
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), None
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)

    masks: Any = titan_attention.VarlenMetadata(torch.tensor([0, 64]), torch.tensor([0, 64]), 64, 64)
    if backend == "flex":
        masks = object.__new__(titan_attention.BlockMask)
    # The kernels have no backward on the CPU; what is between them and the module is torchtitan's.
    model = torch.nn.ModuleDict({"0": config.build()})
    site = find_sites(model)[0]
    assert site.kind == "attention"
    monkeypatch.setattr(titan_attention.FlexAttention, "compiled_flex_attn", staticmethod(kernel))
    monkeypatch.setattr(titan_attention, "varlen_attn", kernel)
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, plan=ActivationPlan({site.name: BlockFormat("int8")}))

    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 64, 4, 32, generator=generator).bfloat16().requires_grad_() for _ in range(3)]
    results = []
    for inner in (model["0"], twin["0"]):
        out = inner(*qkv[:2], v_BLNH=qkv[2], attention_masks=masks)
        results.append((out.detach(), *torch.autograd.grad(out.float().square().sum(), qkv)))
    assert torch.equal(results[0][0], results[1][0])
    for expected, got in zip(results[0][1:], results[1][1:], strict=True):
        assert 0 < relative_error(got, expected) < 0.05
    assert runs == [True] * 3  # the second run of the twin is in backward


def test_what_torchtitan_does_itself_or_would_undo_is_refused(titan: Any) -> None:
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    from laconic.integrations.torchtitan import LaconicConverter, LaconicOptimizersContainer, adamw8bit

    for wrong, message in (
        (LaconicConfig(gradients=8), "gradients is 8, but in torchtitan fully_shard holds"),
        (LaconicConfig(optimizer="adamw8bit"), r"set optimizer=adamw8bit\(lr"),
        (LaconicConfig(loss="chunked"), "ChunkedLossWrapper"),
        (8, "must be a LaconicConfig"),
    ):
        with pytest.raises(ConfigError, match=message):
            LaconicConverter.Config(laconic=wrong).build()
    converter = LaconicConverter.Config().build()
    with pytest.raises(ConfigError, match="a model is converted as a whole"):
        converter.convert(adamw8bit())
    nothing = LaconicConverter.Config(laconic=LaconicConfig(activations=16)).build()
    plain = titan.model_spec([]).model
    assert nothing.convert(plain) is plain

    config = titan.trainer_config("out", [LaconicConverter.Config()])
    for checkpointing in (FullAC, SelectiveAC):
        config.activation_checkpoint = checkpointing.Config()
        with pytest.raises(ConfigError, match=f"activation_checkpoint is {checkpointing.__name__}"):
            config.model_spec.model.update_from_config(config=config)
    config.activation_checkpoint = None
    config.parallelism.spmd_backend, config.parallelism.tensor_parallel_degree = "partial_dtensor", 2
    with pytest.raises(ConfigError, match="activations are DTensors"):
        config.model_spec.model.update_from_config(config=config)

    model = titan.make_model(plain, "cpu")
    optimizer = adamw8bit()
    optimizer.implementation = "fused_opt_states_bf16"
    with pytest.raises(ConfigError, match="moments of AdamW8bit are in 8 or 4 bits"):
        optimizer.build(model_parts=[model])
    with pytest.raises(ConfigError, match="none is 'AdamW8bit'"):
        LaconicOptimizersContainer.Config(param_groups=titan.default_adamw().param_groups).build(model_parts=[model])
