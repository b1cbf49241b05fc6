"""A `fit` in which some ranks repeat another's samples with weight 0."""

from __future__ import annotations

from typing import Any

import keras

from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.data.active_ranks import use_active_ranks
from tfscale.data.changes import serve_anew
from tfscale.data.global_batches import GlobalBatches
from tfscale.data.keras_pass import argument_of_fit, epochs_of_fit
from tfscale.exchange.local_sgd import LocalSGD
from tfscale.fit.unsynchronised import trains_apart
from tfscale.model_optimizers import symbol_of

MEANS = ("sum_over_batch_size", "mean")


def begin_with_surplus(data: GlobalBatches, model: keras.Model) -> None:
    """Let fewer ranks than there are share the batches of the `fit` that begins.

    Args:
        data: What is trained on.
        model: Compiled and built.

    Raises:
        ConfigError: Weights would not make the loss, or the gradient, that of the active ranks.
    """
    check_exchange(model)
    check_weights(model)
    use_active_ranks(data, weighs_samples=not has_wide_losses(model))
    serve_anew()


def check_exchange(model: keras.Model) -> None:
    """Refuse steps whose gradients are not averaged over all ranks: weights suit only those.

    Raises:
        ConfigError: With the remedy.
    """
    optimizer: Any = model.optimizer
    strategy, process_set = (getattr(optimizer, n, None) for n in ("strategy", "process_set"))
    n_ranks = runtime.size() if process_set is None else process_set.size()
    if trains_apart() or isinstance(strategy, LocalSGD) or n_ranks < runtime.size():
        raise ConfigError(
            'active_ranks="grow" needs gradients that all ranks average in every step: a rank '
            "that rests has weight 0, the others more than 1. Received: "
            f"{'ParameterAveraging' if trains_apart() else f'exchange={strategy}'}, {n_ranks} of "
            f"{runtime.size()} ranks. Use another exchange on all ranks, or active_ranks='all'."
        )


def check_weights(model: keras.Model) -> None:
    """Refuse what does not become the mean over the active ranks by weights.

    Raises:
        ConfigError: A loss is no plain mean of weighted values, or `fit` makes weights of classes.
    """
    if argument_of_fit("class_weight") is not None:
        raise ConfigError(
            'active_ranks="grow" serves sample weights, and Keras takes them or class_weight. '
            "Received: class_weight in fit. Give GlobalBatches(sample_weight=) the weight of each "
            "sample's class, or use active_ranks='all'."
        )
    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", MEANS[0])
        if reduction not in MEANS:
            raise ConfigError(
                'active_ranks="grow" needs losses that are means over samples, whatever their '
                f"weights: those of the ranks that rest are 0. Received: reduction={reduction!r} "
                f"of {loss.name!r}. Use reduction='sum_over_batch_size', or active_ranks='all'."
            )


def has_wide_losses(model: keras.Model) -> bool:
    """Tell whether losses have more than one value per sample, as those of sequences or images."""
    return any(len(output.shape) > 2 for output in keras.tree.flatten(_outputs_of(model)))


def _outputs_of(model: keras.Model) -> Any:
    """Return symbols of the outputs; those of a subclass are told from the data of `fit`."""
    outputs = getattr(model, "outputs", None)
    if outputs:
        return outputs
    batch = epochs_of_fit()._get_iterator().element_spec
    x = batch[0] if isinstance(batch, tuple) else batch
    return model.compute_output_spec(keras.tree.map_structure(symbol_of, x))
