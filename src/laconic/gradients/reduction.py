"""Reduction of a store's gradients over a group: once per step or not at all, and on all ranks alike."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.collectives.runtime.background import Work
from laconic.errors import TrainingError
from laconic.formats import QuantizedGradient, quantized_gradient, set_quantized_gradient
from laconic.formats.shards import local_part
from laconic.gradients.buckets import Buckets
from laconic.gradients.reduce import all_reduce_quantized
from laconic.gradients.replicas import check_same_settings, largest_of_ranks, settings_digest
from laconic.gradients.turns import Turn, TurnGuard, set_turn, turn_of


class Reduction:
    """The ranks that reduce together, their buckets, and the gradients whose reduction has started in this step.

    `take` sets the parameters whose gradients, stored in `bits`, are reduced.
    """

    def __init__(self, group: dist.ProcessGroup, bits: int, average: bool, bucket_nbytes: int) -> None:
        self.group = group
        self.average = average
        self._bits = bits
        self._bucket_nbytes = bucket_nbytes
        self._launched: dict[int, QuantizedGradient] = {}
        self._made_on: dict[int, torch.cuda.Stream] = {}
        self.take({})

    def take(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Reduce the gradients of these parameters from now on; between two steps only."""
        self._parameters = dict(parameters)
        self._settings = settings_of(parameters, self._bits, self.average, self._bucket_nbytes)
        self._digest = settings_digest(self._settings)
        nbytes = [local_part(parameter).numel() * self._bits // 8 for parameter in parameters.values()]
        self.buckets = Buckets(nbytes, self._bucket_nbytes, self._start)

    @property
    def is_under_way(self) -> bool:
        """Whether the last micro-batch has begun and its gradients have not been reduced yet."""
        return self.buckets.is_under_way

    def arrived(self, number: int, device: torch.device) -> None:
        """Note a new gradient of parameter `number`, made on the current stream; call `buckets.check_open` before."""
        if self.is_under_way and device.type == "cuda":
            self._made_on[number] = torch.cuda.current_stream(device)
        self.buckets.arrived(number)

    def run(self) -> None:
        """Reduce all gradients; every rank of the group calls it. It raises what `CompressedGradients.reduce` does."""
        if not self._meet(gives_up=False):
            return
        arrived = torch.zeros(len(self._parameters), dtype=torch.uint8, device="cpu")
        for number, (name, parameter) in enumerate(self._parameters.items()):
            if quantized_gradient(parameter) is None:
                zeros = zeros_for(parameter, self._bits)
                set_quantized_gradient(parameter, zeros, TurnGuard(name, self.average))
            else:
                arrived[number] = 1
        try:
            self.buckets.finish()
            arrived = arrived.to(self._device)
            dist.all_reduce(arrived, dist.ReduceOp.MAX, group=self.group)
        except BaseException:  # some are reduced and some are not, and it is unknown which
            self.drop()
            raise
        missing = {number for number, anywhere in enumerate(arrived.tolist()) if not anywhere}
        for number, parameter in enumerate(self._parameters.values()):
            if number in missing:
                set_quantized_gradient(parameter, None)
            else:
                set_turn(parameter, Turn.REDUCED)
        self._launched.clear()
        self.buckets.put_last(missing)

    def abandon(self) -> None:
        """Give this step up, with all other ranks, if its last micro-batch has begun; gradients are dropped."""
        if self.is_under_way:
            self._meet(gives_up=True)

    def drop(self) -> None:
        """Drop all gradients."""
        self._launched.clear()
        self._made_on.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    @property
    def _device(self) -> torch.device:
        return local_part(next(iter(self._parameters.values()))).device

    def _start(self, numbers: list[int]) -> Work[None]:
        """Start the reduction of a bucket, given by its parameters' numbers."""
        parameters = list(self._parameters.values())
        for number in numbers:
            set_turn(parameters[number], Turn.IN_FLIGHT)
            if number not in self._launched:
                # Gone since it arrived: the ranks learn of it in `_meet`.
                gradient = quantized_gradient(parameters[number]) or zeros_for(parameters[number], self._bits)
                self._launched[number] = gradient
        gradients = [self._launched[number] for number in numbers]
        # Autograd makes each gradient on the stream that its parameter was first read on in forward, and only the end
        # of backward waits for all of them.
        streams = {stream for number in numbers if (stream := self._made_on.pop(number, None)) is not None}
        for stream in streams:
            current = torch.cuda.current_stream(stream.device)
            if stream != current:
                current.wait_stream(stream)
        return all_reduce_quantized(gradients, self.group, average=self.average)

    def _meet(self, gives_up: bool) -> bool:
        """Exchange the state of the step with all ranks, before they wait for each other.

        When one of them gives the step up, or lost a gradient whose bucket was launched, all of them do, with the same
        number of buckets launched.

        Returns:
            Whether there is anything to reduce.

        Raises:
            TrainingError: the step is given up, or its gradients were reduced already; raised on all ranks, except on
                those that give up.
            ConfigError: the ranks' parameters have become different; raised on all ranks.
        """
        current = list(self._parameters.values())
        lost = any(quantized_gradient(current[number]) is not sent for number, sent in self._launched.items())
        turns = [turn_of(parameter) for parameter in current if parameter.grad is not None]
        facts = (
            self._digest,
            -self._digest,
            int(gives_up or self.buckets.has_failed),
            int(lost),
            int(any(turn is not Turn.REDUCED for turn in turns)),
            int(Turn.REDUCED in turns),
            self.buckets.num_launched,
        )
        found = largest_of_ranks(facts, self.group, self._device)
        digest, negative, given_up, lost_anywhere, any_local, any_reduced, num_launched = found
        if digest != -negative:
            self._give_up(self.buckets.num_launched)
            check_same_settings(self._settings, self.group)
        if given_up or lost_anywhere:
            self._give_up(num_launched)
            if gives_up:
                return False
            why = "gave the step up (zero_(), or an exception in last_micro_batch())"
            if not given_up:
                why = "zeroed a gradient while it was being reduced"
            raise TrainingError(
                f"the gradients of this step are gone on every rank, because a rank {why}; start the step again, and"
                " call the same functions on every rank"
            )
        if any_reduced and not any_local:
            raise TrainingError(
                "all gradients have been reduced already, and no backward came after; zero gradients after a step, and"
                " call reduce() once for each"
            )
        if any_reduced and not self.average:
            raise TrainingError(
                "some gradients have been added up over the ranks already, and would be added up once more; zero"
                " gradients before the next backward"
            )
        if not any_local:
            self.buckets.drain(num_launched)
        return bool(any_local)

    def _give_up(self, num_launched: int) -> None:
        try:
            self.buckets.drain(num_launched)
        finally:
            self.drop()


def zeros_for(parameter: Tensor, bits: int) -> QuantizedGradient:
    """A zero gradient for this rank's part of a parameter."""
    local = local_part(parameter)
    return QuantizedGradient.zeros(local.shape, bits, local.device)


def settings_of(
    parameters: Mapping[str, nn.Parameter], bits: int, average: bool, bucket_nbytes: int
) -> dict[str, object]:
    """The settings that must be equal on all ranks, by name."""
    settings: dict[str, object] = {
        "laconic's version": import_module("laconic").__version__,
        "torch's version": torch.__version__,
        "bits": bits,
        "average": average,
        "bucket_nbytes": bucket_nbytes,
        "the number of trainable parameters": len(parameters),
    }
    for number, (name, parameter) in enumerate(parameters.items()):
        dtype = str(parameter.dtype).removeprefix("torch.")
        settings[f"trainable parameter {number}"] = f"{name} {list(local_part(parameter).shape)} {dtype}"
    return settings
