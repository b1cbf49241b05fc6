"""`tfscale.ray.run` and Horovod's `RayExecutor`: ranks on the nodes of a Ray cluster."""

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "tfscale.ray needs Ray. Received: no module ray in this environment. pip install ray, or "
        "start ranks without it: tfscale.run(train, np=4).",
        name="ray",
    ) from error

from tfscale.ray.executor import RayExecutor as RayExecutor
from tfscale.ray.job import run as run
