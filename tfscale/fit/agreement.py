"""Compare the ranks of a `fit` when it begins: data, steps, callbacks, model and optimizer."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.comm import objects, runtime
from tfscale.comm.software import versions
from tfscale.config import ConfigError
from tfscale.data.dataset_batches import DatasetBatches
from tfscale.data.global_batches import GlobalBatches
from tfscale.exchange import batch_shares as shares
from tfscale.fit import adapted_layers
from tfscale.fit.session import FitSession
from tfscale.internals.optimizers import config_of, is_wrapped, optimizer_of, scaled_by, update_rule
from tfscale.internals.traits import Traits, given_of, own_of, show_averages, train_apart
from tfscale.optimizer import first_step
from tfscale.optimizer.distributed import distributed_of, distributed_optimizers, process_set_of

logger = logging.getLogger("tfscale")

_SILENT = ("Callback", "RankZero")  # not compared: ranks may have different numbers of these
_LOADING = {"Synchronize", "Checkpoint"}  # these set the learning rate of all ranks
_EQUALISING = {"Synchronize", "ConsistencyCheck", "ParameterAveraging"}  # make equal or compare
_RESTORING = {"Checkpoint", "BackupAndRestore"}  # when the first epoch begins
_PROBED_BYTES = 1 << 16
_COMPARED_OPTIONS = ("op", "predivide", "sparse_as_dense", "repeated_indices")
_HINTS = {
    "tfscale callbacks": first_step.HINT,
    "Batch size": "Give fit the same batch_size on all ranks, or use tfscale.data.GlobalBatches, "
    "which gives them equal parts of each batch.",
    "Vocabularies": "Adapt layers to the same data, or give them one vocabulary, on all ranks.",
    "Versions": "Install the same packages on every host.",
}
_LENGTH = (
    "Give every rank as many batches, for example with tfscale.data.GlobalBatches, and the same "
    "arguments to fit."
)
_BATCHES = (
    "Give GlobalBatches the same samples, batch_size and seed on every rank; it gives each its own "
    "slice."
)
_SAMPLES = (
    "Give GlobalBatches everything, it gives each rank its own slice, made with one "
    "tf.random.set_seed on all ranks; or pass data that was shared out by hand to fit as it is."
)
_HINT = "Run the same code with the same settings on every rank."


def _require_groups_of_one_optimizer(model: keras.Model) -> None:
    first = distributed_of(optimizer_of(model))
    for optimizer in distributed_optimizers(model):
        if optimizer is not first and optimizer.strategy.trains_apart:
            raise ConfigError(
                "exchange=LocalSGD must be that of model.optimizer alone, or groups are not "
                "averaged for validation, files and the end of fit. Received: that of "
                f"{update_rule(optimizer).name}. Pass it to compile(), or use "
                "exchange='allreduce'."
            )


def _require_weights_that_count(session: FitSession) -> None:
    data = session.data
    if train_apart(session.callbacks) and isinstance(data, GlobalBatches) and data.needs_weights:
        raise ConfigError(
            "drop_remainder=False needs gradients that are averaged in each step, or a number of "
            "samples that the ranks divide. Received: ranks that train apart (ParameterAveraging), "
            f"samples={data.samples}, size={runtime.size()}. Use drop_remainder=True."
        )


def begin(session: FitSession, params: dict[str, Any]) -> bool:
    """Compare the ranks' settings; return whether this is the first call of a `fit`. Collective.

    `params` are Keras's: "steps" per epoch (None if unknown) and "epochs". A difference, and data
    that a rank cannot use, is an error on every rank, with the values.
    """
    if session.has_begun or runtime.is_single():
        return False
    model, call = session.model, session.call
    _require_groups_of_one_optimizer(model)
    _require_weights_that_count(session)
    runtime.backend().drain()  # then no rank waits for collectives left by an earlier `fit`
    described: dict[str, Any] = {
        "steps": params.get("steps"),
        "epochs": params.get("epochs"),
        "given_up": runtime.num_given_up(),
        "data": {
            "x": _describe_data(call.data, True),
            "validation_data": _describe_data(call.validation_data, False),
        },
        "training": describe(session),
        "has_adapted": adapted_layers.refresh(model),
    }
    n_epochs = params.get("epochs") or 0
    session.begin(params.get("steps"), n_epochs, train_apart(session.callbacks))
    described["cycles"] = session.cycles()
    names = [type(callback).__name__ for callback in given_of(session.callbacks)]
    described_by_rank = first_step.gather(described, names)
    if described["training"]["first weights"] or _names(own_of(session.callbacks)) & _EQUALISING:
        for distributed in distributed_optimizers(model):
            distributed.note_compared()
    data = [rank["data"] for rank in described_by_rank]
    _require_usable(data)
    lengths = [{key: rank[key] for key in ("steps", "epochs")} for rank in described_by_rank]
    objects.require_equal_values(dict(enumerate(lengths)), "Numbers of steps and epochs", _LENGTH)
    _require_equal_data(call.data, data)
    require_equal([rank["training"] for rank in described_by_rank])
    adapted_layers.trace_together(model, [rank["has_adapted"] for rank in described_by_rank])
    for distributed in distributed_optimizers(model):
        if distributed.bound.executor.residuals is not None:
            n_steps = [
                int(rank["steps"] or 0) * int(rank["epochs"] or 0) for rank in described_by_rank
            ]
            distributed.bound.executor.residuals.expect(min(n_steps))
    if any(rank["given_up"] for rank in described_by_rank):
        runtime.start_incarnation()
    runtime.note_end_of_fit(False)
    session.drop_cycles([rank["cycles"] for rank in described_by_rank])
    if session.has_groups and not show_averages(session.callbacks):
        raise ConfigError(
            "exchange=LocalSGD needs a callback that starts groups alike and averages their "
            "models before validation, saving and the end. Received: none. Pass "
            "tfscale.callbacks.Synchronize() to fit."
        )
    return True


def describe(session: FitSession) -> dict[str, Any]:
    """Describe this rank's part of a `fit` that begins, for `require_equal`.

    "topics": texts that must be equal; None if not known yet.
    "ranks": the ranks that train the same model.
    "first samples": a digest; "" if the data are not arrays.
    "first weights": a digest; empty if they are not compared now.
    """
    model: Any = session.model
    optimizer = optimizer_of(model)
    distributed = distributed_of(optimizer)
    callbacks = [c for c in given_of(session.callbacks) if _name(c) not in _SILENT]
    names = _names(callbacks)
    weights = [
        # Keras numbers layers by process.
        objects.Named(v.path, f"{tuple(v.shape)} {v.dtype} trainable={v.trainable}")
        for v in model.weights
        if not (distributed and distributed.is_local_var(v))
    ]
    topics = {
        "Versions": versions(),
        "tfscale callbacks": [_callback(c) for c in callbacks],
        "Model": weights if model.built else None,
        "Vocabularies": adapted_layers.vocabularies(model),
        "Optimizer": _optimizer(optimizer, names.isdisjoint(_LOADING)),
        "Exchange": _exchange(optimizer),
        "Batch size": _batch_size(session.data, session.call.batch_size),
        "Training step": {
            "run_eagerly": str(model.run_eagerly),
            "steps_per_execution": str(model.steps_per_execution),
        },
    }
    return {
        "topics": topics,
        "ranks": list(process_set_of(model).ranks or range(runtime.size())),
        "first samples": _first_samples(session.data),
        "first weights": _first_weights(model, names),
    }


def require_equal(described_by_rank: Sequence[dict[str, Any]]) -> None:
    """Compare the results of `describe` on ranks that train the same model.

    Warns if ranks were given the same samples.
    """
    for ranks in _ranks_of_models(described_by_rank):
        for topic in described_by_rank[ranks[0]]["topics"]:
            text_by_rank = {rank: described_by_rank[rank]["topics"][topic] for rank in ranks}
            text_by_rank = {rank: text for rank, text in text_by_rank.items() if text is not None}
            objects.require_equal_values(text_by_rank, topic, _HINTS.get(topic, _HINT))
    _warn_of_equal_samples([rank["first samples"] for rank in described_by_rank])
    for ranks in _ranks_of_models(described_by_rank):
        digests = {rank: described_by_rank[rank]["first weights"] for rank in ranks}
        first_step.require_equal_weights({rank: d for rank, d in digests.items() if d})


def _ranks_of_models(described_by_rank: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the ranks that train each model, given the results of `describe`."""
    of_models: dict[tuple[int, ...], list[int]] = {}
    for rank, described in enumerate(described_by_rank):
        # A rank outside of its optimizer's process set trains alone.
        ranks = tuple(described["ranks"]) if rank in described["ranks"] else (rank,)
        of_models.setdefault(ranks, []).append(rank)
    return list(of_models.values())


def _name(callback: Traits) -> str:
    """Return the name of the tfscale class that the callback is, or derives from."""
    return _classes(callback)[0]


def _names(callbacks: Sequence[Traits]) -> set[str]:
    return {name for callback in callbacks for name in _classes(callback)}


def _classes(callback: Traits) -> list[str]:
    classes = [c for c in type(callback).__mro__ if c.__module__.startswith("tfscale.callbacks.")]
    return [c.__name__ for c in classes] or ["Callback"]


def _callback(callback: Traits) -> str:
    settings = [f"{n.lstrip('_')}={_text(getattr(callback, n))}" for n in callback.compared]
    return _name(callback) + (f"({', '.join(settings)})" if settings else "")


def _optimizer(optimizer: Any, with_rate: bool) -> dict[str, str]:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return {"class": type(optimizer).__name__}
    unwrapped = optimizer.__wrapped__ if is_wrapped(optimizer) else optimizer
    inner = scaled_by(unwrapped)
    config = {k: v for k, v in config_of(unwrapped).items() if k != "name"}
    if not with_rate and not isinstance(config.get("learning_rate"), dict):
        config.pop("learning_rate", None)
    texts = {key: json.dumps(value, default=_text) for key, value in config.items()}
    below = {} if inner is None else _optimizer(inner, with_rate)
    # `__class__`, not `type`: a DistributedOptimizer reports the class of the wrapped optimizer.
    own_texts = {"class": optimizer.__class__.__name__, **texts}
    return {**own_texts, **{f"inner {key}": text for key, text in below.items()}}


def _exchange(optimizer: Any) -> dict[str, str]:
    distributed = distributed_of(optimizer)
    if distributed is None:
        return {"exchange": "none: not a DistributedOptimizer"}
    accumulator, options = distributed.accumulator, distributed.bound.executor.options
    return {
        "exchange": _text(distributed.strategy),
        "nonfinite": distributed.bound.nonfinite.policy,
        "backward_passes_per_step": str(1 if accumulator is None else accumulator.passes),
        "compression": getattr(options.compression, "__name__", None) or _text(options.compression),
        "groups": str(options.num_groups if options.groups is None else len(options.groups)),
        **{key: str(getattr(options, key)) for key in _COMPARED_OPTIONS},
    }


def _text(value: Any) -> str:
    """Return a text that is equal for equal settings, without addresses."""
    if isinstance(value, keras.optimizers.Optimizer):
        return f"{type(value).__name__}({_optimizer(value, True)})"
    if dataclasses.is_dataclass(value):
        fields = (f"{f.name}={_text(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, int | float | str | bool | list | tuple | dict | type(None)):
        return repr(value)
    if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
        # A schedule of the user may lack get_config, which raises: its class is compared, then.
        with contextlib.suppress(NotImplementedError):
            return f"{type(value).__name__}({json.dumps(value.get_config(), default=_text)})"
    return str(getattr(value, "__qualname__", type(value).__name__))


def _batch_size(data: Any, batch_size: int | None) -> str:
    if isinstance(data, tf.data.Dataset):
        specs = tf.nest.flatten(data.element_spec)
        shapes = [spec.shape for spec in specs if hasattr(spec, "shape")]
        first = shapes[0][0] if shapes and shapes[0].rank else None
        return "of a dataset" if first is None else str(first)
    if isinstance(data, DatasetBatches):
        return str(data.batch_size)
    is_array = isinstance(data, np.ndarray | tf.Tensor | list | dict | tuple)
    return str(batch_size or 32) if is_array else f"of {type(data).__name__}"


# The first samples and weights of ranks.


def _first_samples(data: Any) -> str:
    """Return a digest of this rank's first samples; "" if they are not arrays."""
    arrays = tf.nest.flatten(data)
    if not arrays or not all(isinstance(a, np.ndarray) and a.size for a in arrays):
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        rows = max(1, _PROBED_BYTES // max(1, array[0:1].nbytes))
        digest.update(np.ascontiguousarray(array[:rows]).tobytes())
    return digest.hexdigest()


def _first_weights(model: Any, callbacks: set[str]) -> bytes:
    """Return a digest of the weights a model begins with, to be compared between ranks.

    Args:
        model: A compiled model.
        callbacks: Names of the classes of its callbacks.

    Returns:
        The digest; empty without anything to compare: the model trains on one rank, a callback
        makes the weights equal, or the first step creates the weights and compares them itself.
    """
    distributed = distributed_of(optimizer_of(model))
    if distributed is None or callbacks & (_EQUALISING | _RESTORING) or not model.built:
        return b""
    variables = [*model.trainable_variables, *adapted_layers.statistics(model)]
    return first_step.digest_of(distributed, variables)


def _warn_of_equal_samples(digests: list[str]) -> None:
    if shares.are_used():
        return
    for digest in {d for d in digests if d and digests.count(d) > 1}:
        ranks = [rank for rank, other in enumerate(digests) if other == digest]
        if runtime.rank() == ranks[0]:
            logger.warning(
                "Ranks %s were given the same samples. Unless each shuffles them in its own way, "
                "they compute the same gradients, and so many ranks gain nothing. "
                "tfscale.data.GlobalBatches gives every rank its part.",
                ", ".join(map(str, ranks)),
            )


# Global batches.


def _describe_data(data: Any, is_trained_on: bool) -> dict[str, Any] | None:
    if not isinstance(data, GlobalBatches):
        return None
    try:
        state, samples = data.describe()
    except Exception as error:  # of any type: the other ranks wait for this description
        return {"error": f"{type(error).__name__}: {error}"}
    if not is_trained_on:
        state.pop("epoch")  # counted by training only, which may be that of another model
    return {"error": "", "state": state, "samples": samples}


def _require_usable(described_by_rank: Sequence[dict[str, dict[str, Any] | None]]) -> None:
    """Raise on all ranks if one of them cannot use its data."""
    for rank, described in enumerate(described_by_rank):
        for name, one in described.items():
            if one and one["error"]:
                raise ConfigError(
                    f"rank {rank} cannot use {name} of fit. Received: {one['error']}. Give it "
                    "data that it can read, in batches that all can share."
                )


def _require_equal_data(
    data: Any, described_by_rank: Sequence[dict[str, dict[str, Any] | None]]
) -> None:
    """Require the same data on all ranks, and set all to the same epoch.

    Validation data is compared between the ranks that pass GlobalBatches: others may have none, or
    pass their own share.
    """
    trained, validated = (
        [rank[name] for rank in described_by_rank] for name in ("x", "validation_data")
    )
    states = [one["state"] for one in trained if one]
    if len(states) == len(described_by_rank):
        # The latest epoch: a rank that stopped after its last batch has not counted it.
        data.epoch = max(state["epoch"] for state in states)
        for state in states:
            state["epoch"] = data.epoch
    elif states:
        trained = [one or {"state": "no GlobalBatches", "samples": []} for one in trained]
    for name, described in (("x", trained), ("validation_data", validated)):
        state_by_rank = {rank: one["state"] for rank, one in enumerate(described) if one}
        objects.require_equal_values(state_by_rank, f"Global batches of {name} of fit", _BATCHES)
        require_same_samples([one["samples"] if one else None for one in described], name)


def require_same_samples(probes: Sequence[Sequence[Any] | None], name: str = "x") -> None:
    """Raise if each rank was given its own share of the samples: each would use a share of that.

    `probes` are the results of a source's `probe` on each rank; None for ranks without a source.
    """
    probe_by_rank = {rank: probe for rank, probe in enumerate(probes) if probe is not None}
    first = next(iter(probe_by_rank.values()), [])
    alike = {
        rank: len(probe) == len(first) and all(map(_is_alike, probe, first))
        for rank, probe in probe_by_rank.items()
    }
    # Equality to rounding: as digests, which are equal or not.
    digests = {rank: bytes(is_alike) for rank, is_alike in alike.items()}
    objects.require_equal_values(digests, f"Samples of {name} of fit, and their order,", _SAMPLES)


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return bool(one == other)
    return len(one) == len(other) and np.allclose(one, other, 1e-2, 1e-4, equal_nan=True)
