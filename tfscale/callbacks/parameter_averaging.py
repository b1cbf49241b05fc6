"""Independent training of the ranks, with periodic averages of their parameters."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfscale.callbacks.base import BeforeValidation
from tfscale.callbacks.synchronize import average_variables
from tfscale.checkpoints import variables as model_state
from tfscale.comm import collectives, runtime
from tfscale.config import ConfigError, is_count, require
from tfscale.internals.optimizers import update_rule
from tfscale.internals.traits import Phase
from tfscale.optimizer.distributed import distributed_of

logger = logging.getLogger("tfscale")


@dataclass(frozen=True)
class DistanceWeights:
    """Weights that fall with a rank's distance from the last common parameters.

    gamma_i = exp(-lam * ||common - w_i|| / (||common|| + ||w_i||)), norms over all trainable
    variables together.

    Attributes:
        lam: Strength, 0 or more; 0 gives all ranks the same weight.

    Raises:
        ConfigError: `lam` is negative.

    Source: [S] eq. 10.

    Examples:
        >>> weights = tfscale.DistanceWeights(lam=2.0)
        >>> common = np.array([3.0, 4.0])
        >>> [round(weights.of(common, own), 2) for own in (common, 2 * common)]
        [1.0, 0.51]
    """

    lam: float = 1.0

    def __post_init__(self) -> None:
        require(self.lam >= 0, "lam", "0 or more", self.lam)

    def of(self, common: np.ndarray, parameters: np.ndarray) -> float:
        """Return a rank's weight, in (0, 1]."""
        scale = np.linalg.norm(common) + np.linalg.norm(parameters)
        return (
            float(np.exp(-self.lam * np.linalg.norm(common - parameters) / scale)) if scale else 1.0
        )


@dataclass(frozen=True)
class Divergence:
    """Average only when the ranks have drifted apart.

    Attributes:
        threshold: Lower limit, 0 or more, of the mean over ranks of
            ||w_i - common|| / ||common||; at or below it no average is taken.

    Raises:
        ConfigError: `threshold` is negative.

    Examples:
        >>> tfscale.init()
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(0.1), "mse")
        >>> when = tfscale.Divergence(threshold=0.01)
        >>> callbacks = [tfscale.callbacks.ParameterAveraging(when=when)]
        >>> history = model.fit(np.zeros((4, 3)), np.ones((4, 1)), callbacks=callbacks, verbose=0)
        >>> history.history["loss"]  # one rank cannot drift apart
        [1.0]
    """

    threshold: float

    def __post_init__(self) -> None:
        require(self.threshold >= 0, "threshold", "0 or more", self.threshold)


class ParameterAveraging(BeforeValidation):
    """Average the parameters of models that the ranks train independently.

    For a plain Keras optimizer: gradients are not exchanged. Start all ranks with equal weights by
    `BroadcastGlobalVariablesCallback(0, consistency_check=False, non_trainable="local")`, and give
    each rank its own batches (`tfscale.data.GlobalBatches`). Averages are taken before `fit`
    validates. Moving statistics are averaged with the parameters; each rank keeps its own optimizer
    state. Ranks leave `fit` with equal models only if an average is taken in its last epoch. With
    `DistanceWeights` the logs of an epoch get `averaging_weight`, this rank's weight.

    Collective: all ranks must pass it to `fit`, with the same arguments. Epochs must have as many
    batches on all ranks.

    Args:
        every_n_epochs: Epochs between two averages, 1 or more; "end" averages once, after the last
            epoch, which gives a poor model if the ranks have drifted too far apart.
        weights: "uniform" for the mean, or `DistanceWeights`.
        when: None averages each time; a `Divergence` only if the ranks have drifted apart.

    Raises:
        ConfigError: An argument does not fit, or, when training begins, the optimizer is a
            DistributedOptimizer, which keeps the ranks equal anyway.

    Source: [S] 1.3, 2.2.

    Examples:
        >>> tfscale.init()
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(0.1), "mse")
        >>> weights = tfscale.DistanceWeights(lam=1.0)
        >>> averaging = tfscale.callbacks.ParameterAveraging(every_n_epochs=2, weights=weights)
        >>> options = dict(epochs=2, callbacks=[averaging], verbose=0)
        >>> history = model.fit(np.zeros((4, 3)), np.ones((4, 1)), **options)
        >>> [round(loss, 2) for loss in history.history["loss"]]  # of this rank's samples
        [1.0, 0.64]
    """

    phase = Phase.AVERAGE
    trains_apart = True
    compared = ("every_n_epochs", "weights", "when")

    def __init__(
        self,
        every_n_epochs: int | Literal["end"] = 1,
        *,
        weights: Literal["uniform"] | DistanceWeights = "uniform",
        when: Divergence | None = None,
    ) -> None:
        super().__init__()
        fits = every_n_epochs == "end" or is_count(every_n_epochs)
        require(fits, "every_n_epochs", "1 or more, or 'end'", every_n_epochs)
        fits = weights == "uniform" or isinstance(weights, DistanceWeights)
        require(fits, "weights", "'uniform' or DistanceWeights(lam)", weights)
        self.every_n_epochs = every_n_epochs
        self.weights = DistanceWeights(0.0) if weights == "uniform" else weights
        self.when = when
        self.n_averages = 0
        self._weight: float | None = None  # of this rank, at the last average
        self._averaged_epoch = -1

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuse optimizers that exchange gradients."""
        super().on_train_begin(logs)
        if distributed_of(self.model.optimizer) is not None and not runtime.is_single():
            raise ConfigError(
                "ParameterAveraging needs ranks that train on their own. Received: a "
                "DistributedOptimizer, which keeps the ranks equal. Compile with the Keras "
                "optimizer itself, or remove ParameterAveraging."
            )
        if not runtime.is_single():
            self.session.stop_together()
        backup = self.take_backup()
        self._n_before, self._averaged_epoch = self.n_averages, -1
        self.n_averages += backup.get("n_averages", 0)
        self._common: np.ndarray | None = next(iter(backup.get("arrays", [])), None)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Keep the parameters that all ranks start from."""
        if self._common is None and self._variables():
            self._common = _flat(self._variables())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add this rank's weight of the last average to the logs."""
        super().on_epoch_end(epoch, logs)
        if self._weight is not None and self.weights.lam and logs is not None:
            logs["averaging_weight"] = self._weight

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Average now with "end", if training ended before its last epoch."""
        super().on_train_end(logs)
        if self.every_n_epochs == "end" and self.n_averages == self._n_before:
            self._average_if_apart()
        elif self._averaged_epoch == self.epoch and update_rule(self.model.optimizer).use_ema:
            assert self._weight is not None
            self._average(self._weight)  # Keras has set weights to this rank's moving averages

    def backup_state(self) -> dict[str, Any]:
        """Return the number of averages of this `fit` and the last common parameters."""
        arrays = [] if self._common is None else [self._common]
        return {"n_averages": self.n_averages - self._n_before, "arrays": arrays}

    def act(self) -> None:
        """Average if one is due."""
        if self.every_n_epochs == "end":
            is_due = self.epoch + 1 == int((self.params or {}).get("epochs") or 0)
        else:
            is_due = (self.epoch + 1) % self.every_n_epochs == 0
        if is_due:
            self._average_if_apart()

    def _average_if_apart(self) -> None:
        if not runtime.is_single() and (self.when is None or self._has_diverged()):
            self.average()

    def average(self) -> None:
        """Average now. Collective: all ranks must call this, in the same order."""
        self._weight = self.weights.of(*self._common_and_own())
        self._average(self._weight)
        self.n_averages += 1
        self._averaged_epoch = self.epoch

    def _average(self, weight: float) -> None:
        trained, state = self._variables(), model_state.non_trainable_state(self.model)
        variables = [*trained, *state]
        average_variables(variables, [weight] * len(variables), "parameters")
        self._common = _flat(trained)

    def _common_and_own(self) -> tuple[np.ndarray, np.ndarray]:
        weights_here = _flat(self._variables())
        return weights_here if self._common is None else self._common, weights_here

    def _variables(self) -> list[keras.Variable]:
        return model_state.distinct(self.model.trainable_variables)

    def _has_diverged(self) -> bool:
        assert self.when is not None
        common, weights_here = self._common_and_own()
        drift = np.linalg.norm(weights_here - common) / max(np.linalg.norm(common), 1e-300)
        mean = float(collectives.allreduce(tf.constant(drift), name="divergence"))
        logger.info("The models have drifted %.4g apart, threshold %g.", mean, self.when.threshold)
        return mean > self.when.threshold


def _flat(variables: list[keras.Variable]) -> np.ndarray:
    """Return all values as one float64 vector: the mean of equal float32 values is then exact."""
    parts = [np.asarray(v.numpy(), np.float64).ravel() for v in variables]
    return np.concatenate([np.zeros(0), *parts])
