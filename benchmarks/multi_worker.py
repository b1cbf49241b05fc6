"""`tf.distribute.MultiWorkerMirroredStrategy` as one of the measured systems."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
from typing import Any

import keras
import tensorflow as tf

_GET_ADDRESS = 0x8915  # SIOCGIFADDR


class MultiWorker:
    """The strategy in a loop of one's own, as its `fit` fails on Keras 3 (keras#20585).

    Variables are Keras's own; gradients go through the strategy's ring, as its optimizers' would.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        # MPI finds the peers and is silent afterwards: the strategy talks gRPC.
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        workers = self.comm.allgather(own_address())
        task = {"type": "worker", "index": self.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

    def wrap(self, optimizer: keras.optimizers.Optimizer, case: Any) -> tuple[Any, Any]:
        """Return the optimizer and the strategy's allreduce."""

        def in_replica(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
            context = tf.distribute.get_replica_context()
            gradients = [tf.identity(gradient) for gradient in gradients]  # on the replica's device
            return context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)

        return optimizer, lambda gradients: self.strategy.run(in_replica, args=(gradients,))

    def settle(self, step: Any) -> None:
        """Do nothing."""

    def facts(self) -> dict[str, Any]:
        """Return nothing more."""
        return {}

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.comm.Barrier()

    def end(self) -> None:
        """Wait for all: a server that ends before the others' last step is an error to them."""
        self.comm.Barrier()


def own_address() -> str:
    """Return "address:port" under which the other ranks reach this one, by its node's link."""
    link = os.environ.get("FI_TCP_IFACE")  # set on an emulated cluster
    with socket.socket() as probe:
        address = "127.0.0.1"
        if link:
            asked = struct.pack("256s", link.encode())
            address = socket.inet_ntoa(fcntl.ioctl(probe, _GET_ADDRESS, asked)[20:24])
        probe.bind((address, 0))
        return f"{address}:{probe.getsockname()[1]}"
