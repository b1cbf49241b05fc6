"""Exchange in few chunks of layers, and dense layers that send no weight gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tfscale.comm.backends.base import Group
from tfscale.config import ConfigError, PlanError, is_count, require
from tfscale.exchange.base import UNKNOWN_BATCH, DenseLayer, Exchange
from tfscale.exchange.plan import ExchangePlan, Table, compile_plan
from tfscale.plan.buckets import Bucket, GradientSpec, Kind, build_chunks, owner_of
from tfscale.plan.layers import is_replicated_cheaper


@dataclass(frozen=True)
class Chunked(Exchange):
    """Gradients are sent in few chunks of layers; the first dense layers send none.

    Chunk 1 has the last layers, whose gradients are ready first: its exchange overlaps with the
    rest of back-propagation. The exchange of the next chunk overlaps with the update of chunk 1.

    The first dense layers exchange their inputs (during the forward pass) and their output
    gradients (during back-propagation); every rank computes the gradient of the whole batch from
    them. Layers that cannot do this, such as subclasses of Dense and layers with a regularizer,
    stay in the chunks; a log line names them. The result is synchronous SGD in any case.

    Attributes:
        first_chunk_layers: k, the layers in chunk 1, counted among layers that own trainable
            variables and are not replicated. "auto" exchanges each layer alone for ten steps of
            `fit`, then chooses from the measured times; outside of `fit` each layer is exchanged
            alone.
        first_chunk_from: Name of the first layer in chunk 1, in place of first_chunk_layers: chunk
            1 has this layer and those after it, whatever layers without variables lie between.
        replicated_dense: f, the number of first Dense layers that exchange activations and output
            gradients; "auto" chooses layers for which this sends less than half of the values, and
            needs the batch size, of the `GlobalBatches` given to `fit` or of
            `tfscale.prepare(model, batch_size=...)`. Either needs `tfscale.prepare(model)` or a
            tfscale callback. Cannot be combined with backward_passes_per_step.
        chunks: Number of chunks, or "per_layer" for the papers' baseline of one allreduce each.
        overlap: False waits for all gradients before any is sent.

    A boundary that leaves chunk 2 empty is a PlanError, as nothing would overlap.

    Source: [T] chapter 3, algorithm 2, with replicated layers updated in their own step. Its k
        counts pooling and replicated layers, too: k = 9 and f = 2 for VGG-A are
        first_chunk_from="conv4_1" (5 layers that send gradients) and replicated_dense=2.

    Examples:
        >>> tfscale.init()
        >>> layers = [keras.layers.Dense(4), keras.layers.Dense(1, name="last")]
        >>> model = keras.Sequential([keras.Input((3,)), *layers])
        >>> exchange = tfscale.Chunked(first_chunk_from="last")
        >>> optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange=exchange)
        >>> model.compile(optimizer, "mse")
        >>> history = model.fit(np.zeros((4, 3)), np.ones((4, 1)), verbose=0)
        >>> history.history["loss"]
        [1.0]
    """

    first_chunk_layers: int | Literal["auto"] = "auto"
    replicated_dense: int | Literal["auto"] = 0
    chunks: int | Literal["per_layer"] = 2
    overlap: bool = True
    first_chunk_from: str | None = None

    def __post_init__(self) -> None:
        for name, least, word in (
            ("first_chunk_layers", 1, "auto"),
            ("replicated_dense", 0, "auto"),
            ("chunks", 1, "per_layer"),
        ):
            value = vars(self)[name]
            fits = value == word or is_count(value, least)
            require(fits, name, f"{least} or more, or {word!r}", value)
        if self.first_chunk_from is not None and self.first_chunk_layers != "auto":
            raise ConfigError(
                "first_chunk_from excludes first_chunk_layers. Received: "
                f"first_chunk_from={self.first_chunk_from!r}, "
                f"first_chunk_layers={self.first_chunk_layers}. Leave one of them out."
            )

    def plan(self, table: Table, group: Group) -> ExchangePlan:
        """Return a plan of chunks; gradients of replicated dense layers are not sent."""
        return compile_plan(table, self._chunks, overlap=self.overlap)

    def _chunks(self, specs: list[GradientSpec]) -> tuple[Bucket, ...]:
        if self.chunks in (1, "per_layer") or self.is_measured:
            return build_chunks(specs, 1, self.chunks if self.chunks == 1 else "per_layer")
        owners = list(dict.fromkeys(owner_of(spec.name) for spec in specs))
        n_first = self._n_first(owners)
        # With "auto" a user cannot know how many layers are left to count.
        if 1 < len(owners) <= n_first and self.replicated_dense != "auto":
            raise PlanError(
                f"first_chunk_layers must leave a layer. Received: first_chunk_layers={n_first} "
                f"of the {len(owners)} layers that send gradients: {', '.join(owners)}. Layers "
                "without variables and replicated layers do not count. Name the first layer of "
                f"chunk 1, for example first_chunk_from={owners[len(owners) // 2]!r}."
            )
        return build_chunks(specs, n_first, self.chunks)

    def _n_first(self, owners: Sequence[str]) -> int:
        """Return the number of layers in chunk 1, of those with the given paths."""
        if isinstance(self.first_chunk_layers, int):
            return self.first_chunk_layers
        name = f"/{self.first_chunk_from}/"
        positions = [i for i, owner in enumerate(owners) if name in f"/{owner}/"]
        if not positions:
            raise PlanError(
                "first_chunk_from must name a layer that sends gradients. Received: "
                f"first_chunk_from={self.first_chunk_from!r}. The layers are {', '.join(owners)}."
            )
        return len(owners) - positions[0]

    @property
    def is_measured(self) -> bool:  # type: ignore[override]
        """Whether steps are measured to find the boundary of the first chunk ("auto")."""
        is_open = self.first_chunk_layers == "auto" and self.first_chunk_from is None
        return is_open and self.chunks not in (1, "per_layer")

    @property
    def needs_prepared(self) -> str:  # type: ignore[override]
        """The option that needs a prepared model, as a program writes it, or an empty text."""
        return f"replicated_dense={self.replicated_dense!r}" if self.replicated_dense else ""

    def dense_kinds(
        self, layers: Sequence[DenseLayer], size: int, global_batch: int | None
    ) -> list[tuple[Kind, str]]:
        """Choose "replicated" for the first layers; see `Exchange.dense_kinds`."""
        n_chosen = len(layers) if self.replicated_dense == "auto" else self.replicated_dense
        if len(layers) < n_chosen:
            raise PlanError(
                f"replicated_dense needs {n_chosen} Dense layers. Received: {len(layers)}. Set "
                f"it to {len(layers)} or less."
            )
        reasons = [x.why_not or self._why_dear(x, size, global_batch) for x in layers[:n_chosen]]
        kinds: list[tuple[Kind, str]] = [
            ("weights", reason) if reason else ("replicated", "") for reason in reasons
        ]
        return kinds + [("weights", "")] * (len(layers) - n_chosen)

    def _why_dear(self, layer: DenseLayer, size: int, global_batch: int | None) -> str:
        """Return why "auto" lets a layer exchange weights, or an empty string."""
        if self.replicated_dense != "auto":
            return ""
        if not layer.n_in:
            return "its shape is not known yet; build the model first"
        if global_batch is None:
            return UNKNOWN_BATCH
        if is_replicated_cheaper(layer.n_in, layer.n_out, global_batch, size):
            return ""
        n = layer.n_in + layer.n_out
        return f"its kernel has no more than {n} values per sample of the global batch"
