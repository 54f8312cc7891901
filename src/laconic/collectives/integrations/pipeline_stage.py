"""Pipeline stages that send activations and gradients over the lossless code.

torch's schedules ask a stage for the sends and receives of a micro-batch and start them. This stage gives them messages
in the tensors' places: a tensor is encoded when the schedule asks for its send, and a received one is decoded when the
stage is about to compute with it. The schedule keeps deciding who sends what, where and when.

A message's length depends on its values. gloo delivers into a buffer that is longer than the message, so the receiver
offers one for the longest message possible and reads the length from its header: no sizes are exchanged, and no wait is
added. NCCL needs sizes that are equal on both sides; its stages stay as they are.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from laconic.collectives import audit
from laconic.collectives.codec import Codec
from laconic.errors import ConfigError, FormatError

_Arriving = tuple[Tensor, Tensor, int]
"""The buffer that receives a message, the destination of its values, and the rank it comes from."""


class ZipStage(PipelineStage):
    """A `PipelineStage` that sends in fewer bytes, over gloo, by a lossless codec without a fixed capacity.

    All stages of a pipeline have to be of this class, with any codec: a message names its coding in its header.
    """

    def __init__(self, *args: Any, codec: Codec, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        backend = dist.get_backend(self.group)
        if backend != "gloo":
            raise ConfigError(
                f"the pipeline's group runs on {backend}, but messages of any length need gloo; use PipelineStage"
            )
        if codec.capacity_nbytes(1, torch.float32) is not None:
            raise ConfigError(
                f"codec is {codec.name}, but between stages messages have the length they need; leave the capacity out"
            )
        self._codec = codec
        self._arriving: dict[tuple[str, int], list[_Arriving]] = {}

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Encode the activations of a micro-batch and return the sends of their messages."""
        return [self._encoded(op) for op in super().get_fwd_send_ops(fwd_chunk_id)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Encode the gradients of a micro-batch and return the sends of their messages."""
        return [self._encoded(op) for op in super().get_bwd_send_ops(bwd_chunk_id)]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of the messages with a micro-batch's activations."""
        return self._expect("activations", fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of the messages with a micro-batch's gradients."""
        return self._expect("gradients", bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Decode the activations received for a micro-batch (or raise FormatError), then run its forward."""
        self._decode("activations", fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Decode the gradients received for a micro-batch (or raise FormatError), then run its backward."""
        self._decode("gradients", bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def clear_runtime_states(self) -> None:
        """Drop messages that were not decoded, and the state of `PipelineStage`."""
        self._arriving.clear()
        super().clear_runtime_states()

    def _encoded(self, op: dist.P2POp) -> dist.P2POp:
        started = time.perf_counter()
        x = op.tensor.detach().contiguous()
        message = self._codec.encode(x.view(-1))
        seconds = time.perf_counter() - started
        audit.record("send", x.dtype, x.nbytes, message.nbytes, self._codec.name, "pipeline stage", seconds)
        return dist.P2POp(op.op, message, op.peer, op.group)

    def _expect(self, what: str, chunk_id: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Replace `ops` by receives of messages; `_decode` moves their values to the tensors of `ops`."""
        arriving, receives = [], []
        for op in ops:
            buffer = op.tensor
            longest = self._codec.max_nbytes(buffer.numel(), buffer.dtype)
            message = torch.empty(longest, dtype=torch.uint8, device=buffer.device)
            arriving.append((message, buffer, op.peer))
            receives.append(dist.P2POp(op.op, message, op.peer, op.group))
        self._arriving[what, chunk_id] = arriving
        return receives

    @torch.no_grad()
    def _decode(self, what: str, chunk_id: int) -> None:
        for message, buffer, peer in self._arriving.pop((what, chunk_id), []):
            try:
                self._codec.decode_into(self._codec.cut(message), buffer.detach().view(-1))
                torch.autograd.graph.increment_version(buffer)
            except FormatError as error:
                raise FormatError(
                    f"pipeline stage {self.stage_index} got {what} of micro-batch {chunk_id} from rank {peer} that it"
                    f" cannot read: {error}"
                ) from error
