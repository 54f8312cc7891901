"""What the processes of test_tensor_parallel.py do: the same steps with and without packed activations."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import laconic
from laconic.activations import SavedTensorTracker
from tests.activations.models import make_model

VOCABULARY, LENGTH = 96, 32

PLANS = ("plain", "vocabulary", "sequence", "loss")
"""Tensor parallel; with a vocabulary-parallel head; with sequence-parallel norms; with torch's loss_parallel."""


def model_of(family: str) -> nn.Module:
    """A model of one layer, of as many key as query heads, the same on every rank."""
    return make_model(family, vocab_size=VOCABULARY, num_key_value_heads=4, num_hidden_layers=1)


def plan_of(model: Any, name: str) -> dict[str, ParallelStyle]:
    """A plan for `parallelize_module`; experts and their router stay whole."""
    sequence = name == "sequence"
    plan: dict[str, ParallelStyle] = {}
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    for index, layer in enumerate(model.model.layers):
        there = dict(layer.named_modules())
        place = f"model.layers.{index}."
        plan |= {place + name: ColwiseParallel() for name in columns if name in there}
        for name_ in ("self_attn.o_proj", "mlp.down_proj"):
            if name_ in there:
                plan[place + name_] = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
        if sequence:
            plan |= {place + norm: SequenceParallel() for norm in ("input_layernorm", "post_attention_layernorm")}
            plan[place + "self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
            plan[place + "mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    if sequence:
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan["model.norm"] = SequenceParallel()
    if name != "plain":
        plan["lm_head"] = ColwiseParallel(
            input_layouts=Shard(1) if sequence else Replicate(),
            output_layouts=Shard(-1) if name == "loss" else Replicate(),
            use_local_output=name != "loss",
        )
    return plan


def batch_of(rank: int = 0) -> dict[str, Tensor]:
    """Two samples, and their positions, which models with sequence-parallel embeddings cannot count."""
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(LENGTH)[None]}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(model: Any, batch: dict[str, Tensor], *, in_parallel: bool = False) -> dict[str, Any]:
    """The loss, the gradients and their placements, and what was saved, of one forward and backward."""
    model.zero_grad()
    with loss_parallel() if in_parallel else nullcontext():
        with SavedTensorTracker(model) as tracker:
            if in_parallel:
                logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
                loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            else:
                output = model(**batch)
                loss, logits = output.loss, output.logits
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        "loss": whole(loss).detach().clone(),
        "logits": whole(logits).detach().clone(),
        "grads": {name: whole(grad).clone() for name, grad in grads.items()},
        "placements": {name: str(getattr(grad, "placements", None)) for name, grad in grads.items()},
        "nbytes": tracker.nbytes,
        "by_module": dict(tracker.by_module),
    }


def meet(rank: int, num_ranks: int, folder: str) -> None:
    """Join the other ranks, on one thread."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks)


class Records:
    """Results by name, written by each rank."""

    def __init__(self, folder: str) -> None:
        self.found: dict[str, Any] = {}
        self._path = Path(folder) / f"rank{dist.get_rank()}.pt"

    def write(self) -> None:
        torch.save(self.found, self._path)
        dist.destroy_process_group()


def compared(make: Callable[[], nn.Module], batch: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    """A step of a model as it is and one with packed activations, and of that decompressed again."""
    in_parallel = options.pop("in_parallel", False)
    exact = step(make(), batch, in_parallel=in_parallel)
    model = make()
    report = laconic.compress_activations(model, sequence_length=LENGTH, **options)
    packed = step(model, batch, in_parallel=in_parallel)
    laconic.decompress_activations(model)
    again = step(model, batch, in_parallel=in_parallel)
    return {"exact": exact, "packed": packed, "again": again, "unmeasured": report.unmeasured}


def torch_plans(rank: int, num_ranks: int, folder: str, cases: list[tuple[str, str]]) -> None:
    """`parallelize_module` before and after the conversion, for families and plans."""
    meet(rank, num_ranks, folder)
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
    records, batch = Records(folder), batch_of()
    for family, plan in cases:
        base = model_of(family)
        if f"{family}-alone" not in records.found:
            records.found[f"{family}-alone"] = compared(lambda base=base: copy.deepcopy(base), batch)  # type: ignore[misc]

        def parallel(base: nn.Module = base, plan: str = plan) -> nn.Module:
            return parallelize_module(copy.deepcopy(base), mesh, plan_of(base, plan))

        found = compared(parallel, batch, in_parallel=plan == "loss")
        late = copy.deepcopy(base)
        laconic.compress_activations(late, sequence_length=LENGTH)
        parallelize_module(late, mesh, plan_of(base, plan))
        found["late"] = step(late, batch, in_parallel=plan == "loss")
        records.found[f"{family}-{plan}"] = found
    if ("llama", "plain") in cases:
        _chunked(records, mesh, batch)
        _trained(records, mesh, batch)
    records.write()


def _chunked(records: Records, mesh: DeviceMesh, batch: dict[str, Tensor]) -> None:
    for plan in ("vocabulary", "sequence"):
        model = parallelize_module(model_of("llama"), mesh, plan_of(model_of("llama"), plan))
        records.found[f"unchunked-{plan}"] = step(model, batch)
        laconic.compress_activations(model, loss="chunked", sequence_length=LENGTH)
        records.found[f"chunked-{plan}"] = step(model, batch)
    rows = {"lm_head": RowwiseParallel(input_layouts=Replicate())}
    model = parallelize_module(model_of("llama"), mesh, rows)
    laconic.compress_activations(model, loss="chunked", example_inputs={"input_ids": batch["input_ids"]})
    try:
        model(**batch)
    except laconic.errors.ModelError as error:
        records.found["chunked-rows"] = str(error)


def _trained(records: Records, mesh: DeviceMesh, batch: dict[str, Tensor]) -> None:
    """Losses of a few steps with everything in codes, beside those of the exact model."""
    for name in ("exact", "coded"):
        model = parallelize_module(model_of("llama"), mesh, plan_of(model_of("llama"), "vocabulary"))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
        if name == "coded":
            laconic.compress_activations(model, sequence_length=LENGTH)
            store = laconic.compress_gradients(model)
            # Blocks of moments cross the columns of a row-parallel weight, so those stay in fp32.
            rows = [p for p in model.parameters() if isinstance(p, DTensor) and p.placements == (Shard(1),)]
            others = [p for p in model.parameters() if not any(p is row for row in rows)]
            groups = [{"params": others}, {"params": rows, "min_8bit_numel": 1 << 30}]
            optimizer = laconic.AdamW8bit(groups, lr=3e-3)
        losses = []
        for _ in range(3):
            loss = model(**batch).loss
            loss.backward()
            losses.append(float(loss.detach()))
            if name == "coded":
                store.clip_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        records.found[f"trained-{name}"] = losses


def two_dimensions(rank: int, num_ranks: int, folder: str) -> None:
    """Tensor parallel inside of FSDP2, the conversion before both, between them, and after both."""
    meet(rank, num_ranks, folder)
    mesh = init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    records, batch = Records(folder), batch_of(mesh.get_local_rank("dp"))
    for name in ("exact", "before", "between", "after"):
        model: Any = model_of("llama")
        plan = plan_of(model, "vocabulary")
        if name == "before":
            laconic.compress_activations(model, sequence_length=LENGTH)
        parallelize_module(model, mesh["tp"], plan)
        if name == "between":
            laconic.compress_activations(model, sequence_length=LENGTH)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        if name == "after":
            records.found["unmeasured"] = laconic.compress_activations(model).unmeasured
        records.found[name] = step(model, batch)
    records.write()


def transformers_plans(rank: int, num_ranks: int, folder: str, families: list[str]) -> None:
    """Models that transformers loads in parallel: with its plan, with FSDP2, with the loss in chunks."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils.logging import disable_progress_bar

    meet(rank, num_ranks, folder)
    disable_progress_bar()
    records, batch = Records(folder), batch_of(rank // 2)
    for family in families:
        path = f"{folder}/{family}"
        if rank == 0:
            model_of(family).save_pretrained(path)  # type: ignore[operator]
        dist.barrier()

        def load(path: str = path) -> nn.Module:
            config = DistributedConfig(tp_size=2, tp_plan="auto", fsdp_size=num_ranks // 2)
            model: nn.Module = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
            return model.train()

        records.found[family] = compared(load, batch)
        if num_ranks == 2:
            model = load()
            laconic.compress_activations(model, loss="chunked", sequence_length=LENGTH)
            records.found[f"{family}-chunked"] = step(model, batch)
    records.write()


class _Gathered(torch.autograd.Function):
    """[batch, heads, tokens, features] of this rank -> those of all ranks, along the tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 2)[dist.get_rank()]


class ContextParallel:
    """What torch's `context_parallel` does to attention, for CPUs: it has no such attention for these.

    Puts a function in the place of torch's that attends to the keys and values of all ranks.
    """

    def __enter__(self) -> None:
        self._before = before = F.scaled_dot_product_attention

        def attend(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
            keys, values = _Gathered.apply(key), _Gathered.apply(value)
            here = torch.arange(query.shape[2]) + dist.get_rank() * query.shape[2]
            mask = here[:, None] >= torch.arange(keys.shape[2])
            return before(query, keys, values, attn_mask=mask)

        F.scaled_dot_product_attention = attend

    def __exit__(self, *_: object) -> None:
        F.scaled_dot_product_attention = self._before


def context_parallel(rank: int, num_ranks: int, folder: str) -> None:
    """Each rank has a part of the sequence; its attention sees all of it."""
    meet(rank, num_ranks, folder)
    records, batch = Records(folder), batch_of()
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    part = slice(rank * LENGTH // num_ranks, (rank + 1) * LENGTH // num_ranks)
    mine = {name: x[:, part].contiguous() for name, x in batch.items() if name != "labels"}
    mine |= {
        "labels": batch["labels"][:, part].contiguous(),
        "shift_labels": labels[:, part].contiguous(),
        "num_items_in_batch": 2 * LENGTH - 2,
    }  # type: ignore[dict-item]
    records.found["alone"] = step(model_of("llama"), batch)
    for name, loss in (("exact", None), ("packed", "exact"), ("chunked", "chunked")):
        model = model_of("llama")
        if loss is not None:
            laconic.compress_activations(model, loss=loss)  # type: ignore[arg-type]
        with ContextParallel():
            records.found[name] = step(model, mine)
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        records.found[name]["grads"] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for name, options in (("attention", {}), ("mixer", {"attention": "recompute"})):
        model = model_of("llama")
        laconic.compress_activations(model, **options)  # type: ignore[arg-type]
        with ContextParallel():
            loss_ = model(**mine).loss
        try:
            loss_.backward()
        except laconic.errors.ModelError as error:
            records.found[f"outside-{name}"] = str(error)
    records.write()
