"""Order between the streams of a CUDA device: what crosses from one to another carries an event.

A tensor that one stream writes and another reads needs two things. The reader waits for an event of the writer:
`Ready`. And the tensor's memory, of which the allocator knows only the stream that it was allocated on, is not given
away while the reader is busy: hold the tensor until its own stream has waited for the reader, or record the reader's
stream (`Tensor.record_stream`).
"""

from __future__ import annotations

import torch


class Ready:
    """The work that the current stream of a device has been given so far. On the CPU there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    @property
    def is_over(self) -> bool:
        """Whether that work has been done."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Make the current stream wait for that work; the host goes on."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        """Wait for that work."""
        if self._event is not None:
            self._event.synchronize()
