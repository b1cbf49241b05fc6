"""Names of Horovod that tfscale does without: using one is an error that says what to do."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from tfscale.config import ConfigError

_COMMAND = (
    "tfscale starts processes by one command and one call",
    "Write `tfscale run -np 4 python train.py`, with `-H host1:2,host2:2` on several hosts or "
    "`--slurm` in an allocation; or tfscale.run(train, np=4) in a program.",
)
_CLUSTER = (
    "tfscale starts processes on hosts that are reserved for the job, by a command",
    "Let the cluster reserve them, and write `tfscale run -np 4 -H host1:2,host2:2 python "
    "train.py`: see 'Unattended jobs' in the documentation.",
)
_SERVICE = (
    "tfscale has no wrapper of tf.data's service",
    "Use tf.data.experimental.service itself, or tfscale.data.GlobalBatches, of which each rank "
    "reads its own part.",
)
# By name in `tfscale`: a requirement and a remedy.
MODULES = {
    "elastic": (
        "tfscale restarts a job from its last checkpoint instead of changing its ranks while it "
        "runs",
        "Give fit a tfscale.callbacks.Checkpoint, or save in a loop of your own (see 'From "
        "Horovod' in the documentation), and start the job by `tfscale run --restarts 3 --min-np "
        "2`.",
    ),
    "runner": _COMMAND,
    "spark": _CLUSTER,
    "data.compute_service": _SERVICE,
    "data.compute_worker": _SERVICE,
}
NAMES = {
    "Adasum": (
        "op must be Average, Sum, Min, Max or Product",
        "Use tfscale.Average; with a learning rate that grows with tfscale.size(), give fit a "
        "LearningRateWarmupCallback.",
    ),
    "broadcast_object_fn": (
        "broadcast_object_fn needs a session of TensorFlow 1",
        "Use tfscale.broadcast_object.",
    ),
    "data.TfDataServiceConfig": _SERVICE,
    "data.compute_worker_fn": _SERVICE,
    "data.send_to_data_service": _SERVICE,
    "data.tf_data_service": _SERVICE,
}


class Missing:
    """Stands for a module or a function of Horovod; its errors name the alternative.

    Examples:
        >>> tfscale.elastic.run
        Traceback (most recent call last):
            ...
        tfscale.config.ConfigError: tfscale restarts a job from its last checkpoint instead of
        changing its ranks while it runs. Received: elastic.run. Give fit a
        tfscale.callbacks.Checkpoint, ...
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # of tools that look into modules
            raise AttributeError(name)
        raise ConfigError(_text(f"{self._name}.{name}", MODULES[self._name]))

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise the error."""
        raise ConfigError(_text(f"{self._name}()", MODULES[self._name]))


def lookup(name: str) -> Any:
    """Return what stands for a name of Horovod in `tfscale`.

    Raises:
        ConfigError: The name stands for a value of Horovod.
        AttributeError: Horovod does not have the name either.
    """
    if name in MODULES:
        return _stand_ins[name]
    if name in NAMES:
        raise ConfigError(_text(name, NAMES[name]))
    raise AttributeError(f"module 'tfscale' has no attribute {name!r}")


def _text(name: str, why: tuple[str, str]) -> str:
    requirement, remedy = why
    return f"{requirement}. Received: {name}. {remedy}"


_stand_ins = {name: Missing(name) for name in MODULES}


class _Finder:
    """Gives `import tfscale.ray` and the like the error that a use of the module gives."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        module = name.removeprefix("tfscale.")
        if module != name and module in MODULES:
            raise ModuleNotFoundError(_text(f"import {name}", MODULES[module]), name=name)


def explain_imports() -> None:
    """Make imports of Horovod's modules that tfscale lacks raise an error with the alternative."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
