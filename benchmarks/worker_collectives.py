"""Measured program: the allreduce of one system for several sizes.

"tcp" sends the bytes of an allreduce through plain sockets, and adds up nothing: what links carry.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import numpy as np

from benchmarks import worker

# Total payload per size, after which more repeats say nothing more.
_ENOUGH_BYTES = 256 << 20
_MOST_REPEATS = 200


def mpi_allreduce(n_elements: int) -> Callable[[], object]:
    """Return a call of MPI's own allreduce."""
    from mpi4py import MPI

    sent: np.ndarray = np.ones(n_elements, np.float32)
    received = np.empty_like(sent)
    return lambda: MPI.COMM_WORLD.Allreduce(sent, received)


def tfscale_allreduce(n_elements: int) -> Callable[[], object]:
    """Return a call of the engine from a traced function."""
    import tensorflow as tf

    import tfscale

    tensor = tf.ones(n_elements)
    traced = tf.function(lambda x: tfscale.allreduce(x, op=tfscale.Sum, name="bench"))
    return lambda: traced(tensor)


def horovod_allreduce(n_elements: int) -> Callable[[], object]:
    """Return a call of Horovod's op from a traced function."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    tensor = tf.ones(n_elements)
    traced = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="bench"))
    return lambda: traced(tensor)


def tcp_ring(n_elements: int) -> Callable[[], object]:
    """Return a call that sends to the next host, and receives, what an allreduce moves at least.

    Of each host's 2 (h - 1) / h of the bytes each of its ranks sends an equal part.
    """
    from mpi4py import MPI

    from benchmarks.multi_worker import own_address

    comm = MPI.COMM_WORLD
    rank, size, hosts = comm.Get_rank(), comm.Get_size(), worker.n_hosts()
    n_bytes = 2 * (hosts - 1) * 4 * n_elements // size
    with socket.socket() as listener:
        listener.bind((own_address().partition(":")[0], 0))
        listener.listen()
        addresses = comm.allgather(listener.getsockname())
        outgoing = socket.create_connection(addresses[(rank + size // hosts) % size])
        incoming, _ = listener.accept()
    sent, received = bytes(n_bytes), memoryview(bytearray(n_bytes))

    def run() -> None:
        sender = threading.Thread(target=outgoing.sendall, args=(sent,))
        sender.start()
        n_received = 0
        while n_received < n_bytes:
            n_received += incoming.recv_into(received[n_received:])
        sender.join()
        comm.Barrier()

    return run


SYSTEMS = {
    "open-mpi": mpi_allreduce,
    "tcp": tcp_ring,
    "tfscale": tfscale_allreduce,
    "horovod": horovod_allreduce,
}


def start(system: str) -> tuple[int, Callable[[], object]]:
    """Initialise a system; return the rank and what ends it."""
    if system == "tfscale":
        import tfscale

        tfscale.init()
        return tfscale.rank(), tfscale.shutdown
    if system == "horovod":
        import horovod.tensorflow as hvd

        hvd.init()
        return hvd.rank(), hvd.shutdown
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_rank(), lambda: None


def main() -> None:
    """Measure the sizes asked for, smallest first; every call is followed by the next one."""
    parser = worker.parser()
    parser.add_argument("--bytes", type=int, nargs="+", required=True)
    options = parser.parse_args()
    rank, end = start(options.system)
    start_s, samples = 0.0, {}
    for n_bytes in sorted(options.bytes):
        run = SYSTEMS[options.system](n_bytes // 4)
        run()
        start_s = start_s or worker.since_start()
        repeats = max(options.repeats, min(_MOST_REPEATS, _ENOUGH_BYTES // n_bytes // 4))
        samples[str(n_bytes)] = worker.sample(run, options.warmup, repeats)
    worker.write(options.output, rank, samples, start_s=start_s)
    end()


if __name__ == "__main__":
    main()
