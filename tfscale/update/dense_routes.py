"""Which dense layers of a model with sharded parameters exchange what."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Literal

import keras

from tfscale.config import PlanError
from tfscale.data.global_batches import GlobalBatches
from tfscale.exchange import dense
from tfscale.exchange.sharded import Sharded
from tfscale.gradients import GradientReducer
from tfscale.internals.stack import data_of_fit
from tfscale.plan.layers import is_partial_cheaper

logger = logging.getLogger("tfscale")

Route = Literal["weights", "replicated", "partial"]
_CALLS = {"replicated": dense.ReplicatedCall, "partial": dense.PartialCall}
_WORDS = {
    "weights": "weight gradients",
    "replicated": "activations and errors, for whole gradients",
    "partial": "activations and errors, for the gradients of each rank's rows",
}


class DenseRoutes:
    """Chooses for each Dense layer of a model, and replaces the `call` of those that it concerns.

    Chosen anew whenever a model is prepared, so that what was not known before `fit` is taken up;
    "auto" stays with the first batch size that it learns of.

    Attributes:
        rows: Kernel and bias (or None) of each layer whose kernel must be cut between rows.
    """

    def __init__(self, strategy: Sharded, reducer: GradientReducer) -> None:
        """Keep what does not change.

        Args:
            strategy: What is asked for.
            reducer: How gradients are reduced, and between whom.
        """
        self._strategy = strategy
        self._reducer = reducer
        self._global_batch = strategy.global_batch
        self._said: dict[str, str] = {}
        self._is_chosen = False
        self.rows: list[tuple[Any, Any]] = []

    def choose(self, model: keras.Model, why_uncut: Callable[[Any], str]) -> bool:
        """Choose, and replace calls.

        Args:
            model: All its layers are built.
            why_uncut: Returns for a variable why it must not be cut, or an empty string.

        Returns:
            Whether a layer goes another way than before.
        """
        if self._global_batch is None:
            data = data_of_fit()
            self._global_batch = data.batch_size if isinstance(data, GlobalBatches) else None
        shared = dense.shared_weights(model)
        has_changed = False
        for layer in model._flatten_layers():
            if not isinstance(layer, keras.layers.Dense):
                continue
            route, reason = self._route(layer, shared, why_uncut)
            has_changed |= self._set(layer, route)
            self._say(layer, f"{_WORDS[route]}{reason and f': {reason}'}")
        self.rows = dense.cut_by_rows(model)
        self._is_chosen = True
        return has_changed

    def require_chosen(self) -> None:
        """Check that a model was prepared, where the strategy needs that.

        Raises:
            PlanError: It was not.
        """
        if not self._is_chosen and self._strategy.dense in ("partial", "replicated"):
            raise PlanError(
                "Dense layers must be prepared before they exchange activations. Received: "
                f"dense={self._strategy.dense!r} and a step of a model that was not. Call "
                "tfscale.prepare(model) after compile() when all its layers are built, or give fit "
                "a tfscale callback. Within LocalSGD, and in a model with several optimizers, use "
                "dense='weights'."
            )

    def _set(self, layer: keras.layers.Dense, route: Route) -> bool:
        """Give a layer the call of a route; return whether it had another."""
        options, process_set = self._reducer.options, self._reducer.process_set
        make = _CALLS.get(route)
        if make is not None and type(vars(layer).get("call")) is make:
            return False
        has_changed = dense.restore(layer)
        if make is not None:
            layer.call = make(layer, options, process_set)
        return has_changed or make is not None

    def _say(self, layer: keras.layers.Layer, text: str) -> None:
        if self._said.get(layer.path) != text and self._strategy.dense != "weights":
            self._said[layer.path] = text
            logger.info("%s exchanges %s.", layer.path, text)

    def _route(
        self, layer: keras.layers.Dense, shared: frozenset[int], why_uncut: Callable[[Any], str]
    ) -> tuple[Route, str]:
        """Return how a layer goes, and why it does not go as was asked for."""
        asked = self._strategy.dense_of(layer.path)
        if asked == "weights":
            return "weights", ""
        reason = dense.why_not(layer, shared)
        if not reason and any(self._reducer.is_local(v) for v in dense.own_weights(layer)):
            reason = "they are this rank's own"
        if reason:
            return "weights", reason
        if asked == "replicated":
            return "replicated", ""
        reason = why_uncut(layer.kernel) or self._why_not_partial(layer)
        return ("weights", reason) if reason else ("partial", "")

    def _why_not_partial(self, layer: keras.layers.Dense) -> str:
        n_in, n_out = layer.kernel.shape
        size = self._reducer.process_set.size()
        if n_in < size:
            return f"the kernel has {n_in} rows for {size} ranks"
        if self._strategy.dense_of(layer.path) == "partial":
            return ""
        positions = _positions(layer)
        if self._global_batch is None or positions is None:
            return (
                "the batch size is not known; give fit a GlobalBatches, or pass "
                "Sharded(global_batch=...)"
            )
        if is_partial_cheaper(n_in, n_out, self._global_batch * positions, size):
            return ""
        return f"they are fewer values at a global batch of {self._global_batch}"


def _positions(layer: keras.layers.Dense) -> int | None:
    """Return how often the layer is applied to a sample: 1 for inputs of shape [samples, n_in]."""
    config = layer.get_build_config() or {}
    shape = config.get("input_shape") or (None, None)
    inner = tuple(shape)[1:-1]
    return None if None in inner else math.prod(inner)
