"""Which dense layers of a model are updated when they are read next, and which at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfscale.exchange import dense
from tfscale.exchange.factors import Factors, factors_of
from tfscale.model_optimizers import trains_all
from tfscale.parameters import futures
from tfscale.update.delayed_layer import DelayedLayer
from tfscale.update.loss_scale import update_rule
from tfscale.update.rules import why_not_later

logger = logging.getLogger("tfscale")


@dataclass
class Split:
    """The gradients of one step.

    Attributes:
        now: Positions of those that are applied in the step.
        later: Layers that are updated later, each with the factors of its gradients.
    """

    now: list[int]
    later: list[tuple[DelayedLayer, list[Factors]]] = field(default_factory=list)

    @property
    def arrived(self) -> list[tf.Tensor]:
        """What other ranks have sent in this step: of one layer."""
        return [factors[0].activations for _, factors in self.later[-1:]]

    def keep(self) -> None:
        """Keep what the later updates need."""
        for layer, factors in self.later:
            layer.keep(factors)


class DelayedDense:
    """The layers of one model whose updates are delayed."""

    def __init__(self) -> None:
        self._layers: dict[int, DelayedLayer] = {}  # by the id of the kernel
        self._said = ""

    def attach(self, model: keras.Model, optimizer: Any, why_not: str = "") -> bool:
        """Delay the updates of layers that exchange activations and errors from now on.

        Args:
            model: Compiled; its layers have been given their calls.
            optimizer: The Keras optimizer that trains it.
            why_not: Why they cannot be, or an empty string.

        Returns:
            Whether something is new, so that functions must be traced anew.
        """
        reason = why_not or why_not_later(optimizer)
        if not reason and not trains_all(model):
            reason = "layers are not built yet, or the model has several optimizers"
        if reason:
            self._layers = {}
            self._say(f"Dense layers are updated at once: {reason}.")
            return False
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        has_changed = False
        for layer in dense.replicated_layers(model):
            delayed = self._layer(layer, update_rule(optimizer))
            # Another optimizer may have taken the layer over meanwhile.
            if futures.wait_of(layer.kernel) != delayed.flush:
                futures.release(delayed.waiting)
                futures.attach(model, delayed.waiting, wait=delayed.flush)
                self._say(f"{layer.path} is updated when it is read next.")
                has_changed = True
        return has_changed

    def _layer(self, layer: keras.layers.Dense, rule: Any) -> DelayedLayer:
        known = self._layers.get(id(layer.kernel))
        if known is None or known.rule is not rule:
            known = self._layers[id(layer.kernel)] = DelayedLayer(layer, rule)
        return known

    def _say(self, text: str) -> None:
        if text != self._said:
            logger.info(text)
        self._said = text

    def split(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Split:
        """Decide what is applied in the step that is being traced.

        Args:
            gradients: Reduced, one per variable; None where there is none.
            variables: What they belong to.

        Returns:
            Later comes what is still the product of activations and errors; a gradient that was
            changed on its way here is applied at once.
        """
        places = {id(v): i for i, v in enumerate(variables)}
        result = Split([], [])
        taken: set[int] = set()
        for layer in self._layers.values():
            own = [places[id(v)] for v in layer.variables if id(v) in places]
            found = [factors_of(gradients[i]) for i in own]
            factors = [f for f in found if f is not None]
            if len(factors) == len(layer.variables):
                result.later.append((layer, factors))
                taken.update(own)
        result.now = [i for i in range(len(variables)) if i not in taken]
        return result
