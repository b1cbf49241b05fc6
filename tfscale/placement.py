"""Which backend moves the bytes, and which GPU belongs to a rank. Pure: no TensorFlow here."""

from __future__ import annotations

from dataclasses import dataclass

from tfscale.errors import ConfigError
from tfscale.launcher.launch import Launch


@dataclass(frozen=True)
class Machine:
    """What a choice of backend depends on.

    Attributes:
        n_gpus: GPUs that TensorFlow sees.
        has_horovod: Horovod is installed.
        has_nccl: That Horovod is built with NCCL; asked only where there are GPUs.
    """

    n_gpus: int = 0
    has_horovod: bool = False
    has_nccl: bool = False


def choose_backend(name: str, launch: Launch | None, is_parallel: bool, machine: Machine) -> str:
    """Return the backend of this process.

    Args:
        name: "auto", "engine", "horovod" or "single".
        launch: What the launcher said; None without one.
        is_parallel: There are, or may be, other processes.
        machine: GPUs and libraries.

    Returns:
        `name` unless it is "auto". Then "single" for one process; "horovod" under
        `horovodrun --gloo`, where there is no MPI, and where a host's ranks have GPUs of their
        own and NCCL can connect them; "engine" else.

    Raises:
        ConfigError: `horovodrun --gloo` started this process and Horovod is not installed.
    """
    if name != "auto":
        return name
    if not is_parallel:
        return "single"
    if launch is not None and launch.launcher == "gloo":
        if not machine.has_horovod:
            raise ConfigError(
                "Processes started by `horovodrun --gloo` need Horovod. Received: a Python "
                "without it. Run `python tools/build_horovod.py` in tfscale's sources, or start "
                "with `tfscale run`."
            )
        return "horovod"
    return "horovod" if machine.n_gpus > 1 and machine.has_nccl else "engine"


def own_gpu(local_rank: int, local_size: int, n_gpus: int) -> int | None:
    """Return the GPU of a rank.

    Args:
        local_rank: Number among the ranks of this host.
        local_size: Ranks of this host.
        n_gpus: GPUs that this process sees; a launcher may show each rank its own only.

    Returns:
        The GPU's number, local_rank modulo n_gpus; None where nothing is to be chosen: a rank
        alone on its host keeps all, and one GPU or none leaves no choice.
    """
    return local_rank % n_gpus if local_size > 1 and n_gpus > 1 else None
