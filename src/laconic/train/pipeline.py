"""One process's part of a pipeline: its chunks, wrapped for its replicas, driven by torch's own schedules.

The schedules are those of torch.distributed.pipelining: GPipe (Huang et al. 2019), 1F1B and interleaved 1F1B (Narayanan
et al. 2021, arXiv 2104.04473). A chunk takes tokens or hidden states and gives hidden states or, the last one, the loss
of its micro-batch divided by the number of micro-batches; so nothing is scaled afterwards. DDP reduces with the last
backward of a step, and FSDP2 after it.

An embedding that is tied to the head has a copy on the first and on the last stage. Their gradients are added up after
the backwards, so both copies see the gradient of the whole model and stay equal bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from laconic.activations import SavedTensorTracker
from laconic.collectives.integrations.pipeline_stage import ZipStage
from laconic.errors import ModelError
from laconic.train.config.schema import TrainConfig
from laconic.train.distributed.comm_compression import stage_codec
from laconic.train.distributed.data_parallel import autocast, wrap_model
from laconic.train.distributed.parallel_state import ParallelState
from laconic.train.distributed.world import World
from laconic.train.model_split import ModelChunk, balanced_split, split_model
from laconic.train.step_timeline import TaskTime

IGNORED = -100
"""A label that does not count."""


class LocalChunks(nn.ModuleList):
    """The chunks of one process as one module: names are "<index>." and the name in the whole model."""


class StageModule(nn.Module):
    """A chunk as a pipeline stage calls it, [n, T] or [n, T, hidden] -> [n, T, hidden], or [1]: the loss."""

    def __init__(
        self, chunk: ModelChunk, device: torch.device, precision: Literal["fp32", "bf16"], chunked_loss: bool
    ) -> None:
        super().__init__()
        self._chunked_loss = chunked_loss
        self.chunk = chunk
        self._device = device
        self._precision: Literal["fp32", "bf16"] = precision
        self.saved_nbytes: int | None = None
        """Bytes kept for backward by one micro-batch; measured in the first."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Hidden states of the chunk, or on the last stage its share of the loss."""
        if self.saved_nbytes is not None or not torch.is_grad_enabled():
            return self._run(x, labels)
        with SavedTensorTracker(self.chunk.model) as tracker:
            out = self._run(x, labels)
        self.saved_nbytes = tracker.nbytes
        return out

    def _run(self, x: Tensor, labels: Tensor | None) -> Tensor:
        with autocast(self, self._device, self._precision):
            if not self.chunk.is_last:
                return self.chunk.hidden_states(x)
            assert labels is not None
            return torch.stack([self.chunk.loss(x, labels, self._chunked_loss)])  # FSDP2 wants no view


class Pipeline:
    """Runs the micro-batches of a step, or of an evaluation, through all stages; all processes call it together."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        parallel_state: ParallelState,
        model: nn.Module,
        chunked_loss: bool = False,
    ) -> None:
        """`model` is the whole model on the CPU, the same on every process; this process's chunks are taken from it.

        `chunked_loss`: see `mean_loss`.

        Raises:
            ConfigError: the layers cannot be divided among the stages.
            ModelError: the model cannot be cut.
        """
        self._world = world
        self._num_micro_batches = config.micro_batches
        num_chunks = parallel_state.num_stages * config.pipeline.virtual_stages
        self.split = config.pipeline.split or balanced_split(model, num_chunks)
        """Layers of each chunk."""
        chunks = split_model(model, self.split)
        tied = _tied_names(model, chunks)
        own = range(parallel_state.stage, num_chunks, parallel_state.num_stages)
        for index in own:
            nn.Module.to(chunks[index].model, world.device)
        self.parts = LocalChunks([chunks[index].model for index in own])
        """What this process trains."""
        self._modules = [StageModule(chunks[index], world.device, config.precision, chunked_loss) for index in own]
        self.wrapped = [wrap_model(module, config, world, parallel_state) for module in self._modules]
        """Its chunks as the schedule calls them, wrapped for their replicas."""

        # 1. What a stage takes and gives, known before anything runs.
        micro_size = config.batch_size // (parallel_state.num_replicas * config.micro_batches)
        tokens = torch.empty(micro_size, config.sequence_length, dtype=torch.int64, device="meta")
        # FSDP2 computes the layers in bf16; autocast leaves the residual stream in fp32.
        in_bf16 = config.precision == "bf16" and config.parallel == "fsdp" and parallel_state.num_replicas > 1
        hidden = torch.empty(
            *tokens.shape,
            model.config.get_text_config().hidden_size,  # type: ignore[union-attr, operator]
            dtype=torch.bfloat16 if in_bf16 else torch.float32,
            device="meta",
            requires_grad=True,
        )
        loss = torch.empty(1, device="meta", requires_grad=True, dtype=torch.float32)
        codec, self.sends = stage_codec(config, hidden, parallel_state.pipeline_group)
        """Whether activations and their gradients are shortened between stages, and why, in words."""
        stage = PipelineStage if codec is None else partial(ZipStage, codec=codec)
        self._has_first, self._has_last = own[0] == 0, own[-1] == num_chunks - 1
        stages: list[Any] = [
            stage(
                module,
                index,
                num_chunks,
                world.device,
                input_args=tokens if index == 0 else hidden,
                output_args=loss if index == num_chunks - 1 else hidden,
                group=parallel_state.pipeline_group,
            )
            for index, module in zip(own, self.wrapped, strict=True)
        ]
        self._stages = stages

        # 2. The order of forwards and backwards.
        def share(output: Tensor, target: Tensor) -> Tensor:
            return output / config.micro_batches

        options: dict[str, Any] = {"loss_fn": share, "scale_grads": False}
        self._schedule: Any
        if config.pipeline.schedule == "interleaved-1f1b":
            self._schedule = ScheduleInterleaved1F1B(stages, config.micro_batches, **options)
        else:
            schedule = Schedule1F1B if config.pipeline.schedule == "1f1b" else ScheduleGPipe
            self._schedule = schedule(stages[0], config.micro_batches, **options)

        # 3. Copies of one parameter at both ends.
        ends = {name for name, _ in _named(self.parts)} & tied if self._has_first or self._has_last else set()
        self.copies = [p for name, p in _named(self.parts) if name in ends and p.requires_grad]
        """Parameters shared over `parallel_state.embedding_group`, which adds up their gradients after each step."""
        self.counted = [parameter for name, parameter in _named(self.parts) if not (self._has_last and name in ends)]
        """The parameters of this process without second copies: over all stages, each of the model's once."""

    @property
    def saved_nbytes(self) -> int | None:
        """Bytes that the chunks of this process keep for backward for one micro-batch; None before the first step."""
        sizes = [module.saved_nbytes for module in self._modules]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def measure_again(self) -> None:
        """Let the next micro-batch be measured for `saved_nbytes`."""
        for module in self._modules:
            module.saved_nbytes = None

    @contextmanager
    def recorded(self) -> Iterator[list[TaskTime]]:
        """Record the passes of this process while the block runs, by `time.perf_counter`; a device is waited for."""
        tasks: list[TaskTime] = []

        def timed(call: Callable[..., Any], what: str) -> Callable[..., Any]:
            def run(micro_batch: int, *args: Any, **options: Any) -> Any:
                started = self._now()
                out = call(micro_batch, *args, **options)
                tasks.append(TaskTime(f"{what}{micro_batch}", started, self._now()))
                return out

            return run

        for stage in self._stages:
            stage.forward_one_chunk = timed(stage.forward_one_chunk, f"{stage.stage_index}F")
            stage.backward_one_chunk = timed(stage.backward_one_chunk, f"{stage.stage_index}B")
        try:
            yield tasks
        finally:
            for stage in self._stages:
                del stage.forward_one_chunk, stage.backward_one_chunk

    def _now(self) -> float:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return time.perf_counter()

    def forward_backward(self, tokens: Tensor) -> Tensor:
        """Gradients of the mean loss over `tokens`, int64 [micro_batches * n, T + 1], this replica's share of a batch.

        Returns:
            The loss, fp64 0-dim, on the last stage, and 0 elsewhere.
        """
        losses: list[Tensor] = []
        self._run(self._schedule.step, tokens, losses)
        return self._sum(losses)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Sum of the mean losses of the sequences `tokens`, int64 [micro_batches * n, T + 1], that count.

        `counts`: bool [micro_batches * n].

        Returns:
            The sum, fp64 0-dim, on the last stage, and 0 elsewhere.
        """
        losses: list[Tensor] = []
        tokens = tokens.clone()
        labels = torch.where(counts[:, None], tokens[:, 1:], IGNORED)
        self._run(self._schedule.eval, tokens, losses, labels)
        if not losses:
            return self._sum(losses)
        # The loss of a micro-batch is a mean over the sequences in it that count.
        weights = counts.reshape(self._num_micro_batches, -1).sum(1) * self._num_micro_batches
        return self._sum([loss * weight for loss, weight in zip(losses, weights, strict=True)])

    def _run(self, run: Any, tokens: Tensor, losses: list[Tensor], labels: Tensor | None = None) -> None:
        args = (tokens[:, :-1],) if self._has_first else ()
        options: dict[str, Any] = {}
        if self._has_last:
            labels = (tokens[:, 1:] if labels is None else labels).contiguous()
            options = {"target": labels, "labels": labels, "losses": losses}
        run(*args, return_outputs=False, **options)

    def _sum(self, losses: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for loss in losses:
            total += loss.detach().double().squeeze(0)
        return total


def _named(parts: LocalChunks) -> list[tuple[str, nn.Parameter]]:
    return [(name.partition(".")[2], parameter) for name, parameter in parts.named_parameters()]


def _tied_names(model: nn.Module, chunks: list[ModelChunk]) -> set[str]:
    """Names of parameters that the first and the last chunk both have; refuses any other sharing."""
    holders: dict[str, list[int]] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for index, chunk in enumerate(chunks):
        for parameter in chunk.model.parameters():
            holders.setdefault(names[id(parameter)], []).append(index)
    shared = {name: where for name, where in holders.items() if len(where) > 1}
    for name, where in shared.items():
        if where != [0, len(chunks) - 1]:
            raise ModelError(
                f"parameter {name} belongs to chunks {where} of the pipeline, but only first and last can share one; "
                "untie it, or train with pipeline.stages = 1"
            )
    return set(shared)
