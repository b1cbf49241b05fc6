"""A program between links and the bridge, for kernels that cannot delay packets.

    python -m tools.cluster.wire SOCKET port0:inner0 port1:inner1 ...

copies packets between the two devices of each pair, both ways, and delays, loses and reorders
them. The socket takes datagrams of three numbers, as `Quality` has them, while packets move.
Only the standard library is imported: the program starts at once.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_ALL_PROTOCOLS = 0x0003  # ETH_P_ALL
# Options of sockets (asm/socket.h, linux/if_packet.h) that Python has no names for.
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_BUFFER_BYTES = 64 << 20
_MAX_FRAME_BYTES = 1 << 17
_MAX_WAITING = 20000  # frames, as netem's limit
_FRAMES_PER_TURN = 64


class Quality(NamedTuple):
    """Properties of all links and both directions.

    Attributes:
        delay_ms: Added to each packet.
        loss_percent: Of the packets is lost.
        reorder_percent: Of the packets is not delayed, and so overtakes those before it.
    """

    delay_ms: float = 0.0
    loss_percent: float = 0.0
    reorder_percent: float = 0.0


class Delays:
    """Frames that wait for their time.

    Args:
        seed: Of the draws: the same frames at the same times have the same fate.
    """

    def __init__(self, seed: int = 0) -> None:
        """Begin with links that neither delay nor lose."""
        self.quality = Quality()
        self._random = random.Random(seed)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._n_accepted = 0

    def accept(self, way: int, frame: bytes, now_s: float) -> None:
        """Lose a frame, or keep it until its time comes."""
        if self._random.random() * 100 < self.quality.loss_percent:
            return
        if len(self._waiting) >= _MAX_WAITING:
            return
        is_late = self._random.random() * 100 >= self.quality.reorder_percent
        due_s = now_s + (self.quality.delay_ms / 1000 if is_late else 0.0)
        self._n_accepted += 1  # frames of one time stay in order
        heapq.heappush(self._waiting, (due_s, self._n_accepted, way, frame))

    def take_due(self, now_s: float) -> Iterator[tuple[int, bytes]]:
        """Yield (way, frame) of those whose time has come, in order."""
        while self._waiting and self._waiting[0][0] <= now_s:
            _, _, way, frame = heapq.heappop(self._waiting)
            yield way, frame

    def pause_s(self, now_s: float) -> float | None:
        """Return the seconds until the next frame is due, or None where none waits."""
        return max(self._waiting[0][0] - now_s, 0.0) if self._waiting else None


def _open_device(name: str) -> socket.socket:
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    # With the header that says what is not done yet, frames of 64 KB pass in one piece, and the
    # kernel cuts them and computes their checksums as if they had passed no program.
    device.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    device.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for option in (_SO_RCVBUFFORCE, _SO_SNDBUFFORCE):
        device.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    device.bind((name, 0))
    device.setblocking(False)
    return device


def _copy(pairs: Sequence[tuple[str, str]], orders: socket.socket) -> None:
    """Copy frames until a signal ends this process; way i leads to device i."""
    devices = [_open_device(name) for pair in pairs for name in pair]
    # Those of a pair are 2k and 2k + 1.
    ways = {device: i ^ 1 for i, device in enumerate(devices)}
    delays = Delays()
    while True:
        pause_s = delays.pause_s(time.monotonic())
        readable, _, _ = select.select([orders, *devices], [], [], pause_s)
        for source in readable:
            if source is orders:
                delays.quality = Quality(*map(float, orders.recv(1024).split()))
                continue
            # OSError: no frame is left, or the link is down.
            with contextlib.suppress(OSError):
                for _ in range(_FRAMES_PER_TURN):
                    frame = source.recv(_MAX_FRAME_BYTES)
                    delays.accept(ways[source], frame, time.monotonic())
        for way, frame in delays.take_due(time.monotonic()):
            # OSError: the link is down, or its queue is full, and the frame is lost.
            with contextlib.suppress(OSError):
                devices[way].send(frame)


def main(arguments: Sequence[str]) -> None:
    """Listen to SOCKET and copy between pairs of devices of this namespace."""
    path, *words = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the program that is run
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as orders:
        orders.bind(path)
        first, _, second = zip(*(word.partition(":") for word in words), strict=True)
        _copy(list(zip(first, second, strict=True)), orders)


if __name__ == "__main__":
    main(sys.argv[1:])
