"""The client: requests batches from a service, which come through shared memory or over TCP."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from bucketline.loader.prefetch.cuda_copy import CudaCopier
from bucketline.loader.prefetch.delivery import OwnBuffers
from bucketline.loader.service.frame_stream import FrameStream
from bucketline.loader.service.links import Servers
from bucketline.loader.service.ring_stream import RingStream
from bucketline.loader.service.wire import message_of

if TYPE_CHECKING:
    import torch

    from bucketline.loader.plan.cursor import Cursor
    from bucketline.loader.service.links import Link
    from bucketline.loader.service.wire import Request


class ServiceBackend:
    """Requests batches from a service."""

    def __init__(self, link: Link, request: Request, device: torch.device) -> None:
        """Start nothing. `request` is sent with each iteration's own cursor and process id."""
        self.link, self._request, self._device = link, request, device
        self._buffers = OwnBuffers(device)

    def turn_to(self, request: Request) -> None:
        """Request other batches from the same service, from the next iteration on."""
        self._request = request

    def begin(self, cursor: Cursor) -> RingStream | FrameStream:
        """Connect and send the request.

        Raises:
            DeliveryError: if the service cannot be reached.
        """
        request = replace(self._request, cursor=cursor, pid=os.getpid())
        if isinstance(self.link, Servers):
            return FrameStream(self.link, request, self.link.ask(message_of(request)), self._buffers)
        answer = self.link.ask(message_of(request))
        try:
            return RingStream(answer, CudaCopier(self._device) if request.is_pinned else None)
        except BaseException:
            answer.sock.close()
            raise

    def close(self) -> None:
        """End a private service."""
        self.link.close()
