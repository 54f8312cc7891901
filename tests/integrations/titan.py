"""torchtitan's own trainer on the CPU: its device is replaced by one that has no memory statistics.

FlexAttention, torchtitan's default, has no backward on the CPU, so models here take its ScaledDotProductAttention.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_DEVICE = SimpleNamespace(
    current_device=lambda: 0,
    device_count=lambda: 1,
    set_device=lambda *_: None,
    synchronize=lambda *_: None,
    get_device_name=lambda *_: "CPU",
    get_device_properties=lambda *_: SimpleNamespace(total_memory=2**30),
    memory_stats=lambda *_: {},
    reset_peak_memory_stats=lambda *_: None,
    empty_cache=lambda: None,
)
_before = torch._utils._get_available_device_type, torch._utils._get_device_module
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda device_type: _DEVICE

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import OptimizersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.protocols.model import BaseModel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

torch._utils._get_available_device_type, torch._utils._get_device_module = _before

from laconic.formats.shards import local_part, local_runs, taken  # noqa: E402
from tests.activations.models import VOCABULARY  # noqa: E402

dist_utils.set_pg_timeouts = lambda **_: None  # torch.distributed.set_timeout comes after torch 2.13

SEQUENCE = 64


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


class Counting(BaseDataLoader):
    """Sequences that count from different numbers; the place in them is saved."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any) -> None:
        self.rank, self.shape, self.place = dp_rank, (local_batch_size, seq_len + 1), 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        batch, length = self.shape
        for place in itertools.count(self.place + 1):
            self.place = place
            generator = torch.Generator().manual_seed(1000 * self.rank + place)
            starts = torch.randint(0, 512, (batch, 1), generator=generator)
            ids = (starts + 3 * torch.arange(length)) % 512
            positions = torch.arange(length - 1).expand(batch, -1)
            yield {"input": ids[:, :-1], "positions": positions}, ids[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


def model_spec(converters: list[Any], layers: int = 1) -> Any:
    spec = model_registry("debugmodel", converters=converters)
    del spec.model.layers[layers:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def make_model(config: Any, device: str) -> Any:
    """As the trainer makes it: built on the meta device in the training's dtype, given memory, then its weights."""
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()
    return model.train()


def trainer_config(
    folder: str, converters: list[Any], optimizer: OptimizersContainer.Config | None = None, **parallelism: Any
) -> Trainer.Config:
    config = llama3_debugmodel()
    config.model_spec = model_spec(converters)
    config.dump_folder = folder
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 4, SEQUENCE, 4
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=2048))
    config.optimizer = optimizer or default_adamw(lr=2e-3)
    config.optimizer.implementation = "for-loop"
    config.lr_scheduler.warmup_steps = 2
    config.activation_checkpoint = None
    config.validator.enable = False
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Counting.Config()
    config.debug.seed = 1
    config.parallelism = dataclasses.replace(config.parallelism, **parallelism)
    config.checkpoint = dataclasses.replace(
        config.checkpoint, enable=True, interval=2, last_save_model_only=False, keep_latest_k=0
    )
    return config


class HostedModel(BaseModel):
    """A Hugging Face model; made by torchtitan on the meta device, it gets the weights of `JOB.made()`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        def update_from_config(self, **_: Any) -> None:
            pass

        def get_nparams_and_flops(self, model: torch.nn.Module, seq_len: int) -> tuple[int, int]:
            return sum(parameter.numel() for parameter in model.parameters()), 1

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = JOB.made().double()

    def verify_module_protocol(self) -> None:
        pass  # the parts of a Hugging Face model are modules of torch

    def init_states(self, **_: Any) -> None:
        made = JOB.made().double()
        whole = dict(made.named_parameters()) | dict(made.named_buffers())
        own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name, tensor in own.items():
            value = whole[name].detach()
            if isinstance(tensor, DTensor):
                value = taken(value, local_runs(value.shape, tensor.device_mesh, tensor.placements))
            local_part(tensor.detach()).copy_(value)

    def forward(self, tokens: Tensor, **_: Any) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


class JobRows(BaseDataLoader):
    """The micro-batches of `JOB`, epoch after epoch."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, **_: Any) -> None:
        assert (dp_rank, dp_world_size) == (JOB.rank, JOB.world)
        self.place = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        batches = JOB.batches()
        while True:
            ids = batches[self.place % len(batches)]
            self.place += 1
            yield {"input": ids[:, :-1]}, ids[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


JOB: Any = None
"""The job of tests/integrations/moe_hosts.py that is trained."""


def hosted(job: Any, parallelize_fn: Any) -> Trainer.Config:
    """The configuration of a job's training."""
    global JOB
    JOB = job
    optimizer = default_adamw(lr=1e-2)
    for group in optimizer.param_groups:
        group.optimizer_kwargs |= {"eps": 1e-3, "weight_decay": 0.1}
    parallelism = {"expert_parallel_degree": job.world, "spmd_backend": "partial_dtensor"}
    config = trainer_config(str(job.folder), [], optimizer, **parallelism)
    config.model_spec = dataclasses.replace(
        config.model_spec,
        model=HostedModel.Config(),
        parallelize_fn=parallelize_fn,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    config.training.local_batch_size = job.batch_size
    config.training.global_batch_size = job.batch_size * job.world * job.micro_batches
    config.training.max_norm = job.max_norm or 1e9
    config.lr_scheduler.warmup_steps = 0
    config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    config.dataloader = JobRows.Config()
    return config


def run(config: Trainer.Config) -> torch.nn.Module:
    """Train and return the model."""
    trainer = Trainer(config)
    trainer.metrics_processor.log = lambda *_, **__: None
    with mock.patch("torchtitan.trainer.time.sleep"):  # two seconds, for other ranks to print
        trainer.train()
    model: torch.nn.Module = trainer.model_parts[0]
    trainer.close()
    return model


def trained(config: Trainer.Config, load_step: int = -1) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a run's steps, and the weights after the last; from the checkpoint of `load_step` on if it is given."""
    config.checkpoint.load_step = load_step
    trainer = Trainer(config)
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):  # torchtitan asks for a sum that is scaled, which gloo does not know
            module.set_force_sum_reduction_for_comms(True)
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
    with mock.patch("torchtitan.trainer.time.sleep"):  # two seconds, for other ranks to print
        trainer.train()
    weights = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in trainer.model_parts[0].state_dict().items()
    }
    trainer.close()
    return losses, weights
