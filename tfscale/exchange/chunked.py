"""Two chunks of layers behind back-propagation, and dense layers that send no weight gradients."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import keras
import tensorflow as tf

from tfscale.comm.backends.base import Group
from tfscale.comm.runtime import Average, ProcessSet
from tfscale.config import ConfigError, PlanError
from tfscale.exchange import dense
from tfscale.exchange.base import GradientOptions
from tfscale.exchange.bucketed import reduce_in_buckets
from tfscale.exchange.provenance import require_own
from tfscale.plan.buckets import Bucket, GradientSpec
from tfscale.plan.chunks import build_chunks, is_replicated_cheaper

logger = logging.getLogger("tfscale")


@dataclass(frozen=True)
class Chunked:
    """Gradients travel in few chunks of layers; the first dense layers send none.

    Chunk 1 holds the last layers, whose gradients exist first: it is on the wire during the rest
    of back-propagation. The next chunk is on the wire while the variables of chunk 1 are updated.

    The first dense layers exchange their inputs (during the forward pass) and their errors (during
    back-propagation); every rank computes the gradient of the whole batch from them. Layers that
    cannot, such as subclasses of Dense and those with a regularizer, stay in the chunks, with a
    log line. The result is synchronous SGD in any case.

    Attributes:
        first_chunk_layers: k, the layers in chunk 1, counted among layers that own trainable
            variables. "auto" exchanges each layer alone for ten steps of `fit`, then chooses from
            their times; outside of `fit` it keeps to single layers.
        replicated_dense: f, how many of the first Dense layers exchange activations and errors;
            "auto" takes those for which fewer than half of the values travel that way. Needs
            `tfscale.prepare(model)` or a tfscale callback. Not with backward_passes_per_step.
        global_batch: Samples of all ranks together, for "auto": the batch size is not known when
            a step is traced.
        chunks: Number of chunks, or "per_layer" for the papers' baseline of one allreduce each.
        overlap: False waits for all gradients before any is sent.
        delay_dense_update: When the f layers are updated. "auto" and False do it as soon as their
            errors have been gathered. True does it when a layer is read next: in the next forward
            pass, or by anybody before; with the learning rate, iteration and weight decay of its
            step. Where that cannot be (clipping by global norm, loss scaling, accumulation, moving
            averages, rules with a state of their own) they are updated at once, with a log line.
            See "When replicated layers are updated" in docs/exchanges.md.

    Source: [T] chapter 3, algorithm 2, with its k counted without pooling layers.
    """

    first_chunk_layers: int | Literal["auto"] = "auto"
    replicated_dense: int | Literal["auto"] = 0
    global_batch: int | None = None
    chunks: int | Literal["per_layer"] = 2
    overlap: bool = True
    delay_dense_update: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: A number does not fit.
        """
        if self.delay_dense_update not in ("auto", False, True):
            raise ConfigError(
                "delay_dense_update must be True, False or 'auto'. Received: "
                f"delay_dense_update={self.delay_dense_update!r}."
            )
        for name, least, word in (
            ("first_chunk_layers", 1, "auto"),
            ("replicated_dense", 0, "auto"),
            ("chunks", 1, "per_layer"),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not is_number and value != word:
                raise ConfigError(
                    f"{name} must be {least} or more, or {word!r}. Received: {name}={value!r}."
                )
        if self.replicated_dense == "auto" and not (self.global_batch or 0) > 0:
            raise ConfigError(
                "replicated_dense='auto' needs the batch size of all ranks together. Received: "
                f"global_batch={self.global_batch}. Pass global_batch=data.batch_size."
            )

    def exchange(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        group: Group,
        options: GradientOptions,
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Return the reduced gradients, in order.

        Args:
            gradients: Tensors or IndexedSlices, one per variable; no None.
            variables: The variables they belong to.
            group: Who takes part.
            options: How they are reduced.

        Raises:
            PlanError: A gradient's shape is not known, a dense layer is used in two ways, or its
                gradient is not what its calls have made.
            ExchangeError: Communication failed.
        """
        results: list[Any] = list(gradients)
        shared = [i for i, v in enumerate(variables) if not dense.is_whole(v)]
        for i in set(range(len(variables))).difference(shared):
            require_own(gradients[i], variables[i], variables, options.op == Average)
        reduced = reduce_in_buckets(
            [gradients[i] for i in shared],
            [variables[i] for i in shared],
            group,
            options,
            self._chunks,
            self.overlap,
        )
        for i, gradient in zip(shared, reduced, strict=True):
            results[i] = gradient
        return results

    def _chunks(self, specs: list[GradientSpec]) -> tuple[Bucket, ...]:
        if self.first_chunk_layers == "auto":
            chunks = self.chunks if self.chunks == 1 else "per_layer"
            return build_chunks(specs, 1, chunks)
        return build_chunks(specs, self.first_chunk_layers, self.chunks)

    @property
    def must_probe(self) -> bool:
        """Whether the boundary of the first chunk is still to be measured."""
        return self.first_chunk_layers == "auto" and self.chunks not in (1, "per_layer")

    def wire(
        self, model: keras.Model, options: GradientOptions, process_set: ProcessSet
    ) -> list[str]:
        """Let the first dense layers exchange activations and errors.

        Args:
            model: The model; its Dense layers' `call` is replaced.
            options: How gradients are reduced.
            process_set: Who takes part.

        Returns:
            Names of the layers that do.

        Raises:
            PlanError: The model has fewer Dense layers than asked for.
        """
        layers = [x for x in model._flatten_layers() if isinstance(x, keras.layers.Dense)]
        n_chosen = len(layers) if self.replicated_dense == "auto" else self.replicated_dense
        if len(layers) < n_chosen:
            raise PlanError(
                f"The model must have {n_chosen} Dense layers. Received: {len(layers)}. "
                f"Set replicated_dense to {len(layers)} or less."
            )
        chosen = []
        shared = dense.shared_weights(model)
        for layer in layers[:n_chosen]:
            reason = dense.why_not(layer, shared) or self._why_dear(layer, process_set.size())
            if reason:
                logger.info("%s stays in the chunks: %s.", layer.name, reason)
                continue
            layer.call = dense.ReplicatedCall(layer, options, process_set)
            chosen.append(layer.name)
        return chosen

    def _why_dear(self, layer: keras.layers.Dense, size: int) -> str:
        """Return why "auto" leaves a layer in the chunks, or an empty string."""
        if self.replicated_dense != "auto":
            return ""
        if not layer.built:
            return "its shape is not known yet; build the model first"
        n_in, n_out = layer.kernel.shape
        if is_replicated_cheaper(n_in, n_out, self.global_batch or 0, size):
            return ""
        return f"its kernel has no more than {n_in + n_out} values per sample of the global batch"
