"""Execute exchange plans: reduce gradients, select this rank's updates, publish parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.collectives import allreduce, deduplicate, is_cheaper_dense
from tfscale.comm.compression import Compression, LossyCompressor, SparseCompressor
from tfscale.comm.eager import note_gradients
from tfscale.comm.runtime import ProcessSet, Sum, require_reducible
from tfscale.config import ConfigError, PlanError, require
from tfscale.exchange import batch_shares as shares
from tfscale.exchange.base import Exchange
from tfscale.exchange.dense import DenseCalls, require_own, use_of
from tfscale.exchange.plan import (
    ExchangePlan,
    GradientOptions,
    Parameter,
    Table,
    Wire,
    values_of,
)
from tfscale.exchange.residuals import Residuals, Update
from tfscale.exchange.shards import Shards, name_of
from tfscale.exchange.tables import TableRows
from tfscale.internals.keras import device_of
from tfscale.plan.buckets import GradientSpec, Kind


class Observer(Protocol):
    """Looks at the gradients of each step while they are exchanged."""

    def observe(self, own: Sequence[Any], reduced: Sequence[Any], variables: Sequence[Any]) -> None:
        """Take this rank's gradients, the reduced ones, and their variables, in the step."""


@dataclass
class Reduced:
    """The gradients of one step as this rank applies them."""

    gradients: list[Any]  # one for each target, or None
    targets: list[Any]  # variables or pieces that this rank updates
    variables: list[Any]  # the model's variable of each target
    # The first received tensors; nothing may change before they have arrived.
    arrived: list[tf.Tensor] = field(default_factory=list)
    # Next residuals of compressed gradients, for `residuals.keep` if the step is not skipped.
    residuals: list[Update] = field(default_factory=list)


class LocalVariables:
    """Variables whose gradients stay on their rank: single ones, and those of layers."""

    def __init__(self, variables: Sequence[Any] = (), layers: Sequence[Any] = ()) -> None:
        self._variables, self._layers = list(variables), list(layers)

    def add(self, variable: Any) -> None:
        """Keep a variable local."""
        self._variables.append(variable)

    def add_layers(self, local_layers: Any) -> None:
        """Keep the variables of a layer, or a list of layers, local, built now or later."""
        is_one = isinstance(local_layers, keras.layers.Layer)
        layers = [local_layers] if is_one else local_layers or []
        wrong = [layer for layer in layers if not isinstance(layer, keras.layers.Layer)]
        if wrong:
            raise ConfigError(
                f"local_layers must be Keras layers. Received: {type(wrong[0]).__name__}. "
                "For single variables use register_local_var(variable)."
            )
        self._layers += layers

    def __contains__(self, variable: Any) -> bool:
        """Return whether a variable may differ between ranks."""
        return any(variable is v for v in self._variables) or any(
            variable is v for layer in self._layers for v in layer.weights
        )

    def copy(self) -> LocalVariables:
        """Return a list of its own, with the same variables and layers."""
        return LocalVariables(self._variables, self._layers)


@dataclass(frozen=True)
class Request:
    """The options with which a user asks for the exchange of one optimizer or tape.

    With `scale_local_gradients`, gradients of local variables are divided by the number of ranks.
    """

    strategy: Exchange
    options: GradientOptions
    process_set: ProcessSet  # all other ranks keep their own gradients
    scale_local_gradients: bool = True
    local: LocalVariables = field(default_factory=LocalVariables)

    def __post_init__(self) -> None:
        fits, remedy = isinstance(self.process_set, ProcessSet), "tfscale.add_process_set(ranks)"
        require(fits, "process_set", "a ProcessSet", self.process_set, f"Use {remedy}.")

    def copy(self) -> Request:
        """Return the same request with a list of local variables of its own."""
        return replace(self, local=self.local.copy())


@dataclass(frozen=True, eq=False)
class Executor:
    """The exchange of one optimizer or tape, as it runs.

    Another strategy, other ranks or cut parameters need another executor (`dataclasses.replace`,
    `cut`); the first four fields are shared by all executors of an optimizer.

    Attributes:
        request: What the user asked for.
        dense: The calls of Dense layers that exchange activations.
        residuals: What lossy compression has not sent yet; None without one.
        observers: They look at the gradients of each step. One ends with the callback that made it.
        strategy: The exchange that runs: one that does not cut parameters where they must stay
            whole.
        process_set: The ranks that exchange; a group of those in the request with local SGD.
        shards: The cut parameters; None unless `cut` has made this executor.
        table: The variables of `shards`, without gradients of a step.
    """

    request: Request
    dense: DenseCalls
    residuals: Residuals | None
    observers: weakref.WeakSet[Observer]
    strategy: Exchange
    process_set: ProcessSet
    shards: Shards | None = None
    table: tuple[Parameter, ...] = ()

    @staticmethod
    def of(request: Request, strategy: Exchange) -> Executor:
        """Return the first executor of an optimizer or tape, which runs a strategy."""
        options = request.options
        is_lossy = isinstance(options.compression, LossyCompressor)
        is_lossy = is_lossy and not isinstance(options.compression, SparseCompressor)
        return Executor(
            request,
            DenseCalls(options),
            Residuals(options.compression) if is_lossy else None,
            weakref.WeakSet(),
            strategy,
            request.process_set,
        )

    @property
    def options(self) -> GradientOptions:
        """Options of all gradients, as the user gave them."""
        return self.request.options

    def is_local(self, variable: Any) -> bool:
        """Return whether a variable may differ between ranks: also rows of a table."""
        return isinstance(variable, TableRows) or variable in self.request.local

    def has_own_gradients(self, variables: Sequence[Any]) -> bool:
        """Return whether this rank has reduced gradients that other ranks lack.

        These are gradients of its segments (`Sharded`), of its rows of tables, and of local
        variables.
        """
        group = self.process_set.group()
        is_alone = group.size == 1 or group.rank < 0
        return not is_alone and (self.shards is not None or any(map(self.is_local, variables)))

    def choose_dense(
        self,
        model: keras.Model,
        why_uncut: Callable[[Any], str],
        global_batch: int | None,
        may_cut: bool = True,
    ) -> bool:
        """Choose which dense layers exchange activations; return whether to trace functions again.

        With a sharding strategy, all layers exchange weights unless one optimizer updates the whole
        model in every step (`may_cut`).
        """
        if self.strategy.is_sharding and not may_cut:
            return self.dense.choose_none(model)
        return self.dense.choose(
            model, self.strategy, self.process_set, self.is_local, why_uncut, global_batch
        )

    def cut(self, variables: Sequence[Any], why_uncut: Callable[[Any], str]) -> Executor:
        """Return an executor with this rank's parts of variables, by the plan of the strategy.

        `variables` are equal on all ranks; `why_uncut` returns why one rank must own all of one, or
        an empty string.
        """
        position = {id(v): i for i, v in enumerate(variables)}
        kernel_of: dict[int, int] = {}  # kernels that are cut between rows, and their biases
        for kernel, bias in self.dense.rows:
            for v in (kernel, bias):
                if id(v) in position and id(kernel) in position:
                    kernel_of[position[id(v)]] = position[id(kernel)]
        group = self.process_set.group()
        table = tuple(
            Parameter(
                GradientSpec(name_of(v), tuple(v.shape), v.dtype),
                v.dtype,
                is_local=self.is_local(v),
                is_whole=bool(why_uncut(v)),
                device=device_of(v),
                row_bucket=kernel_of.get(i, -1),
            )
            for i, v in enumerate(variables)
        )
        plan = self.strategy.plan(Table(table), group)
        whole = [i for i, parameter in enumerate(table) if parameter.is_whole]
        # Groups that train apart are averaged, so what they hold must not be rounded.
        are_apart = self.request.strategy.trains_apart
        compression = Compression.none if are_apart else self.options.compression
        shards = Shards(variables, plan.segments, whole, group, compression)
        return replace(self, shards=shards, table=table)

    # Without this, AutoGraph would read and convert the code in every traced function.
    @tf.autograph.experimental.do_not_convert
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Reduced:
        """Reduce gradients over the process set. Collective in a step, in the plan's order.

        Takes this rank's tensors, IndexedSlices or None, one per variable. Returns the gradients
        that this rank applies: equal on all ranks, or those of its own pieces. Gradients of local
        variables are this rank's own, divided by the number of ranks with `scale_local_gradients`.
        Those of its rows of tables were added up over the ranks in back-propagation.
        """
        group = self.process_set.group()
        if group.size == 1 or group.rank < 0:
            # Keras's update rules are wrong for repeated indices (Adam adds up squares of parts),
            # and one process must train as several do.
            sums = self.options.repeated_indices == "sum"
            local_gradients = [
                deduplicate(g) if sums and isinstance(g, tf.IndexedSlices) else g for g in gradients
            ]
            updates: list[Update] = []
            if self.residuals is not None:
                for i, gradient in enumerate(local_gradients):
                    if gradient is not None and not isinstance(gradient, tf.IndexedSlices):
                        local_gradients[i], update = self.residuals.alone(
                            variables[i], gradient, group
                        )
                        updates += update
            return Reduced(
                local_gradients,
                list(variables),
                list(variables),
                _last_of(local_gradients),
                updates,
            )
        if not variables:
            raise ConfigError(
                "No variables to train. Received: an empty list. Build the model before "
                "training: call it on a batch, or call tfscale.prepare(model, sample_batch)."
            )
        results = list(gradients)
        positions = [i for i, gradient in enumerate(gradients) if gradient is not None]
        local = {i for i in positions if self.is_local(variables[i])}
        shared = [i for i in positions if i not in local]
        arrived: list[tf.Tensor] = []
        for i in local:
            if isinstance(variables[i], TableRows):
                results[i] = self._of_rows(gradients[i], variables[i])
                arrived += [] if tf.executing_eagerly() else [values_of(results[i])]
            elif self.request.scale_local_gradients:
                results[i] = _changed(gradients[i], lambda values: values / group.size)
        updates = []
        if shared:
            note_gradients()
            local_gradients = [gradients[i] for i in shared]
            chosen = [variables[i] for i in shared]
            reduced, received, updates = self._run(local_gradients, chosen)
            arrived += received
            for i, gradient in zip(shared, reduced, strict=True):
                results[i] = gradient
            for observer in self.observers:
                observer.observe(local_gradients, reduced, chosen)
        if self.shards is None:
            return Reduced(results, list(variables), list(variables), arrived, updates)
        return replace(self._on_pieces(results, variables, arrived), residuals=updates)

    def _of_rows(self, gradient: Any, rows: TableRows) -> Any:
        """Return the reduced gradient of this rank's rows of a table from the sum over ranks."""
        keeps = self.options.repeated_indices == "keras"
        if keeps and not rows.keeps_repeats:
            raise PlanError(
                f"{name_of(rows)} needs a prepared model for repeated_indices='keras'. Received: a "
                "step of a model that was not. Call tfscale.prepare(model), or give fit a tfscale "
                "callback."
            )
        reduction = self.options.reduction(self.process_set.size())
        factor = reduction.prescale * reduction.postscale
        gradient = _changed(gradient, lambda values: values * tf.constant(factor, values.dtype))
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        return deduplicate(gradient) if is_sparse and not keeps else gradient

    def _run(
        self, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> tuple[list[Any], list[tf.Tensor], list[Update]]:
        """Return reduced gradients, the first received tensors, and new residuals."""
        shards = self.shards
        base = list(variables) if shards is None else shards.variables
        positions = list(range(len(variables)))
        if shards is not None:
            positions = [shards.position(v) for v in variables]
        gradient_of = dict(zip(positions, gradients, strict=True))
        wire = Wire(self.process_set.group(), self.options, base, shards, self.residuals)
        rider = shares.take_rider() if wire.group.size == runtime.size() else None
        wire.riders.extend([] if rider is None else [rider])
        contexts: dict[int, Any] = {}
        kinds: dict[int, Kind] = {}
        quantized: set[int] = set()
        for i, gradient in gradient_of.items():
            require_reducible([tf.convert_to_tensor(values_of(gradient))])
            use = use_of(base[i])
            if use != "weights":
                require_own(gradient, base[i])
                kinds[i] = use
            elif self._stays_sparse(i, gradient, wire.group.size):
                kinds[i] = "rows"
            else:
                kinds[i] = "weights"
                tensor = tf.convert_to_tensor(gradient)
                if self._is_quantized(base[i], gradient):
                    quantized.add(i)
                    tensor = tf.ensure_shape(tensor, base[i].shape)
                gradient_of[i], contexts[i] = self.options.compression.compress(tensor)
        plan = self._compile(base, gradient_of, kinds, quantized, wire)
        if not plan.overlap and not tf.executing_eagerly():
            sent = [i for i, kind in kinds.items() if kind in ("weights", "rows")]
            # One op that waits for all: edges from each gradient to each would be their square.
            with tf.control_dependencies([tf.group(*(values_of(gradient_of[i]) for i in sent))]):
                gradient_of |= {i: _changed(gradient_of[i], tf.identity) for i in sent}
        reduced: dict[int, Any] = {}
        for part in plan.parts:
            reduced |= part.reduce(gradient_of, wire)
        for rider in wire.riders:  # no part is a sum: a message by itself
            total = allreduce(rider.signs, op=Sum, name="signs of the batch")
            wire.checks.extend(rider.check(total, wire.group.size, 1.0))
        for i, context in contexts.items():
            reduced[i] = self.options.compression.decompress(reduced[i], context)
        arrived = [] if tf.executing_eagerly() else [values_of(reduced[self._first(plan)])]
        arrived += wire.checks
        updates = list(wire.updates)
        if self.residuals is not None:
            updates += self.residuals.count_step()
        return [reduced[i] for i in positions], arrived, updates

    def _first(self, plan: ExchangePlan) -> int:
        """Return a position in the first part, if possible one that this rank owns a piece of."""
        indices = plan.parts[0].indices
        shards = self.shards
        return next((i for i in indices if shards is None or not shards.is_empty(i)), indices[0])

    def _is_quantized(self, variable: Any, gradient: Any) -> bool:
        if self.residuals is None or isinstance(gradient, tf.IndexedSlices):
            return False
        return self.residuals.compression.fits(tuple(variable.shape), gradient.dtype.name)

    def _compile(
        self,
        base: Sequence[Any],
        gradient_of: dict[int, Any],
        kinds: dict[int, Kind],
        quantized: Collection[int],
        wire: Wire,
    ) -> ExchangePlan:
        """Return the strategy's plan of this step."""
        strategy = self.strategy
        if strategy.needs_prepared and not self.dense.is_chosen:
            raise PlanError(
                f"{strategy.needs_prepared} needs a prepared model. Received: a step of a model "
                "that was not. Call tfscale.prepare(model) after compile() when all its layers "
                "are built, or give fit a tfscale callback. A tape, Sharded within LocalSGD and "
                "a model with several optimizers need dense layers that exchange weights."
            )
        if self.shards is None:
            table = [_parameter(v, gradient_of[i], kinds[i]) for i, v in enumerate(base)]
        else:
            table = list(self.table)
            for i, kind in kinds.items():
                dtype = values_of(gradient_of[i]).dtype.name
                table[i] = replace(table[i], gradient=kind, wire_dtype=dtype)
        for i in quantized:
            assert self.residuals is not None
            table[i] = replace(table[i], wire_dtype=self.residuals.compression.wire_dtype)
        at, messages = {id(v): i for i, v in enumerate(base)}, None
        if self.options.groups is not None:
            messages = tuple(
                tuple(at[id(v)] for v in group if id(v) in at) for group in self.options.groups
            )
        return strategy.plan(Table(tuple(table), messages, self.options.num_groups), wire.group)

    def _on_pieces(
        self, gradients: Sequence[Any], variables: Sequence[Any], arrived: list[tf.Tensor]
    ) -> Reduced:
        """Return the gradients of the pieces that this rank owns."""
        assert self.shards is not None
        pairs = zip(gradients, variables, strict=True)
        chosen = [(g, self.shards.position(v), v) for g, v in pairs if g is not None]
        # Empty pieces cost ops and change nothing; one is kept if a rank owns nothing else.
        useful = [c for c in chosen if not self.shards.is_empty(c[1])] or chosen[:1]
        targets = [self.shards.targets[i] for _, i, _ in useful]
        return Reduced([g for g, _, _ in useful], targets, [v for _, _, v in useful], arrived)

    def publish(self, updated: Collection[int] | None = None, waits: bool = True) -> None:
        """Send the pieces at some positions, or all; with `waits` until they arrive. Collective."""
        if self.shards is not None:
            bits = None if self.residuals is None else self.residuals.bits()
            self.shards.publish(waits, updated, bits)

    def _stays_sparse(self, index: int, gradient: Any, size: int) -> bool:
        if not isinstance(gradient, tf.IndexedSlices) or self.options.sparse_as_dense:
            return False
        is_cut = self.shards is not None and index in self.shards.pieces
        keeps_repeats = self.options.repeated_indices == "keras"
        return not is_cut and (keeps_repeats or not is_cheaper_dense(gradient, size))


def _parameter(variable: Any, gradient: Any, kind: Kind) -> Parameter:
    values = values_of(gradient)
    is_known = kind == "weights" and values.shape.is_fully_defined()
    shape = tuple(values.shape if is_known else variable.shape)
    if any(d is None for d in shape):
        raise PlanError(
            f"{name_of(variable)} needs a gradient of known shape. Received: "
            f"shape={values.shape}. Build the model first."
        )
    dtype = values.dtype.name
    spec = GradientSpec(name_of(variable), tuple(map(int, shape)), dtype)
    return Parameter(spec, dtype, kind, device=device_of(variable))


def _changed(gradient: Any, change: Callable[[Any], Any]) -> Any:
    """Return a gradient with changed values; IndexedSlices stay IndexedSlices."""
    if isinstance(gradient, tf.IndexedSlices):
        values = change(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return change(gradient)


def _last_of(gradients: Sequence[Any]) -> list[tf.Tensor]:
    """Return the gradient that is ready first: that of the last variable."""
    if tf.executing_eagerly():
        return []
    return [values_of(g) for g in gradients if g is not None][-1:]
