"""DistributedOptimizer: reduce gradients over all ranks for any Keras optimizer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
import wrapt

from tfscale.comm import runtime
from tfscale.comm.compression import Compression
from tfscale.comm.runtime import Average, ProcessSet, global_process_set
from tfscale.config import ConfigError
from tfscale.exchange import batch_shares as shares
from tfscale.exchange.base import Exchange, resolve
from tfscale.exchange.dense import use_of
from tfscale.exchange.executor import Request
from tfscale.exchange.plan import GradientOptions
from tfscale.exchange.shards import name_of
from tfscale.exchange.tables import table_of
from tfscale.internals import optimizers as internals
from tfscale.internals.keras import raw_variable
from tfscale.internals.trace import drop_traces
from tfscale.internals.tracking import Represented
from tfscale.layers.sharded_embedding import sharded_embeddings
from tfscale.optimizer import first_step
from tfscale.optimizer.accumulation import Accumulator, refuse_accumulating, refuse_replicated
from tfscale.optimizer.bound import Bound
from tfscale.optimizer.nonfinite import NonFinite, Policy
from tfscale.optimizer.rules import refuse_bypassed, refuse_outer_scaler, why_uncut
from tfscale.optimizer.state import KeptState, n_bytes
from tfscale.optimizer.table_rules import tables_of
from tfscale.optimizer.table_state import KeptTables
from tfscale.plan.buckets import owner_of

logger = logging.getLogger("tfscale")


class DistributedOptimizer(wrapt.ObjectProxy, Represented):
    """A Keras optimizer that applies gradients reduced over all ranks.

    A transparent proxy: every attribute, including `__class__`, is the wrapped optimizer's, so
    learning rates, schedules, checkpoints and saved models are exactly its own, and a saved model
    loads where tfscale is not installed. Only `apply` differs: it reduces the gradients, then
    calls the wrapped optimizer, so clipping, weight decay and averaging see reduced gradients.

    Mixed precision: `DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner))`. Infinite
    values survive the sum, so all ranks skip the same steps. The opposite order raises an error,
    unless `compile` created it: then `tfscale.prepare` corrects it.

    Examples:
        >>> tfscale.init()
        >>> dense = keras.layers.Dense(1, kernel_initializer="zeros")
        >>> model = keras.Sequential([keras.Input((1,)), dense])
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> history = model.fit(np.ones((4, 1)), np.ones((4, 1)), epochs=3, verbose=0)
        >>> [round(loss, 2) for loss in history.history["loss"]]
        [1.0, 0.36, 0.13]
    """

    # Attributes of the proxy itself begin with _self_; all others are the wrapped optimizer's.
    _self_bound: Bound
    _self_accumulator: Accumulator | None
    _self_tables: KeptTables | None
    _self_watch: Any  # of an exchange that measures steps; None until one is seen

    if TYPE_CHECKING:  # wrapt's types let attributes be read only

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        name: str | None = None,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        op: str = Average,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
        num_groups: int = 0,
        groups: Any = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        exchange: Any = "allreduce",
        nonfinite: Policy = "warn",
        repeated_indices: str = "sum",
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: Any Keras optimizer.
            name: Ignored; the optimizer keeps its own.
            device_dense: Ignored; TensorFlow places the ops.
            device_sparse: Ignored.
            compression: `Compression.none`, `.fp16` or `.bf16`: the dtype on the wire; `.int8` or
                `.int4`: bits per value of large kernels; `.low_rank`: their factors.
            sparse_as_dense: Make sparse gradients dense before they are sent.
            gradient_predivide_factor: Divisor of gradients before the sum; after it the divisor is
                size / factor.
            op: Average or Sum.
            backward_passes_per_step: Batches whose gradients are added up locally before they are
                exchanged and applied. `iterations` advances with every batch. If a rank stops
                within a cycle, or the update is skipped, all ranks return to the beginning of the
                cycle.
            average_aggregated_gradients: Divide that sum by the number of batches.
            num_groups: Number of buckets of an allreduce; 0 chooses by size.
            groups: Number of buckets, or lists of variables that are sent together.
            process_set: The ranks that take part; others apply their own gradients.
            scale_local_gradients: Divide gradients of local variables (see `register_local_var`)
                by the number of ranks.
            exchange: "allreduce", "chunked", "sharded" or "auto", or a strategy such as
                `tfscale.Allreduce(bucket_mb=4)`.
            nonfinite: Policy for gradients that are NaN or infinite on some rank: "warn" once, on
                that rank, with step and parameter; "ignore" them; "raise" an error that names rank,
                step and parameter; or "skip" the step on all ranks. A skipped step leaves weights
                and state unchanged; in `fit` with a tfscale callback, moving statistics stay
                finite.
            repeated_indices: "sum" adds up the rows of a sparse gradient that have one index, as a
                dense gradient does; "keras" hands them to the optimizer apart, as Keras alone does.
                They differ for update rules other than SGD, and with clipping.

        Raises:
            ConfigError: An argument is invalid.
        """
        _check(optimizer, backward_passes_per_step)
        super().__init__(optimizer)
        options = GradientOptions(
            op=op,
            predivide=gradient_predivide_factor,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            repeated_indices=repeated_indices,
            num_groups=num_groups,
            groups=groups,
        )
        strategy = resolve(exchange)
        strategy.refuse(options, nonfinite, f"exchange={exchange!r}")
        request = Request(strategy, options, process_set, scale_local_gradients)
        self._self_bound = Bound.of(optimizer, request, NonFinite(nonfinite))
        self._self_watch = self._self_tables = None
        self._self_accumulator = None
        if backward_passes_per_step > 1:
            refuse_replicated(strategy.within_group())
            self._self_accumulator = Accumulator(
                backward_passes_per_step, average_aggregated_gradients, op
            )

    # The step

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Reduce the gradients over all ranks and update the variables.

        Args:
            grads: This rank's gradients, one per variable.
            trainable_variables: The variables; None uses those given to `build`.

        Raises:
            ConfigError: There are no variables to train.
            ExchangeError: XLA compiles the step, a LossScaleOptimizer wraps this optimizer, or
                communication failed.
        """
        if trainable_variables is None:
            variables = self._ready().variables
        else:
            variables = list(trainable_variables)
        if not self._ready(variables).is_compared and first_step.compare(self, variables):
            self.note_compared()
        if shares.current() is not None:
            # Layers that exchange activations, or rows, have weighted what they sent.
            pairs = zip(grads, variables, strict=True)
            grads = [
                shares.weighted(g) if use_of(v) == "weights" and table_of(v) is None else g
                for g, v in pairs
            ]
        if self._self_bound.executor.process_set.size() > 1:
            refuse_outer_scaler(DistributedOptimizer)
        bound = self._self_bound
        if self._self_accumulator is None:
            bound.step(list(grads), variables)
            return
        rule = internals.update_rule(self.__wrapped__)
        self._self_accumulator.add(grads, variables, rule, lambda sums: bound.step(sums, variables))

    def note_compared(self) -> None:
        """Record that a `fit` has compared the ranks, so that the first step need not."""
        self._self_bound = replace(self._self_bound, is_compared=True)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Reduce and apply pairs of gradient and variable; return `iterations`, as Keras does."""
        self.apply(*map(list, zip(*grads_and_vars, strict=True)))
        return internals.iterations_of(self.__wrapped__)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Set the final values of variables at the end of `fit`, as Keras does. Collective."""
        self._ready().finish(var_list)

    # Binding

    @property
    def bound(self) -> Bound:
        """The exchange that this optimizer is bound to at present."""
        return self._self_bound

    def _bind(
        self,
        strategy: Exchange,
        groups: Any = None,
        variables: Sequence[Any] | None = None,
        may_cut: bool = True,
    ) -> None:
        """Bind the optimizer again; nothing else changes what it exchanges, and how. Collective.

        Parameters that were cut become whole on the way, so each rank briefly holds the complete
        state and its part of it.

        Args:
            strategy: The exchange inside of the groups of ranks.
            groups: Groups that train apart, if they are others than before.
            variables: The model's, to build an optimizer on that is not built yet.
            may_cut: Whether the strategy may cut parameters.
        """
        before, rule, state = self._self_bound, internals.update_rule(self.__wrapped__), None
        if before.kept is not None:
            variables, state = before.variables, before.kept.gather()
            before.close()
        is_same = before.is_ready and groups is None and before.kept is None and may_cut
        bound = before
        if not is_same or strategy != before.strategy:
            bound = before.among(strategy, groups, may_cut)
        if variables is not None and state is None and rule.built and bound.is_cutting:
            with tf.init_scope():  # this may be the first step, for example of a loaded model
                if not self.__wrapped__.built:  # `compile` has put loss scaling around it
                    self.__wrapped__.build(internals.trained_by(rule))
                variables = internals.trained_by(rule)
                state = [v.numpy() for v in self.__wrapped__.variables]
        if variables is not None:
            bound = bound.built_on(variables, state)
            if bound.is_cut:
                internals.set_holder(rule, self)
        self._self_bound = bound

    def _ready(self, variables: Sequence[Any] | None = None) -> Bound:
        """Return the exchange, adapted to the ranks of the job. Collective with local SGD.

        With `variables` the optimizer is built on them first if it is not built.
        """
        bound = self._self_bound
        if not bound.is_ready:
            before = internals.holder_of(internals.update_rule(self.__wrapped__))
            if before is not None and before is not self:
                before.undo_shards()  # it was compiled again, and wrapped in this one
            groups = bound.groups
            if groups is None and not runtime.is_single():
                with tf.init_scope():  # this may be the first step, which is traced
                    groups = bound.strategy.form_groups(bound.executor.request.process_set)
            self._bind(bound.strategy.within_group(), groups)
        if variables is not None and not self._self_bound.is_built:
            self.build(variables)
        return self._self_bound

    def build(self, variables: Sequence[Any]) -> None:
        """Create the optimizer's state, or this rank's part of it, unless it exists.

        Args:
            variables: Variables that it will train; values must be equal on all ranks.
        """
        bound = self._ready()
        if not bound.is_cut:
            self._bind(bound.strategy, variables=variables)

    def wire(self, model: keras.Model, global_batch: int | None = None) -> bool:
        """Let the exchange change the model's layers; return whether to trace functions again.

        `tfscale.prepare` calls this. `global_batch` counts the samples of all ranks together.
        """
        bound, rule = self._ready(), internals.update_rule(self.__wrapped__)
        keeps = bound.executor.options.repeated_indices == "keras"
        layers = sharded_embeddings(model)
        tables = [layer.rows for layer in layers]
        # Not in the first step alone: ranks outside of its process set trace none.
        bound.refuse_tables(model.trainable_variables)
        is_new = any([rows.follow(keeps) for rows in tables])
        has_scaler = rule is not self.__wrapped__
        self._self_tables = KeptTables(layers, tables, rule, has_scaler) if tables else None
        is_alone = internals.trains_all(model)
        may_cut = is_alone and self._self_accumulator is None and bound.groups is None
        has_changed = bound.executor.choose_dense(
            model, lambda v: why_uncut(rule, v), global_batch, may_cut
        )
        if bound.is_cutting and is_alone:
            if has_changed and may_cut and bound.is_cut:
                variables = bound.variables  # some may be frozen by now
                self._bind(bound.strategy)
                drop_traces([raw_variable(v) for v in variables])
            self.build(model.trainable_variables)
            self._self_bound = self._self_bound.attached(model)
        return has_changed or is_new

    # Strategies that change

    def after_step(
        self, make_watch: Callable[..., Any], data: Any = None, callbacks: Sequence[Any] = ()
    ) -> bool:
        """Let an exchange that measures steps see one; see `tfscale.after_step`. Collective.

        Args:
            make_watch: Makes what measures (`measure.auto.watch_for`) from the strategy, the paths
                of the layers that exchange gradients, the model, and a function that returns why
                the parameters of a model cannot be cut.
            data: The data of `fit`.
            callbacks: The callbacks of `fit`.

        Returns:
            Whether the step must be traced again.
        """
        bound = self._ready()
        if self._self_watch is None and bound.strategy.is_measured:
            executor = bound.executor
            shared = [name_of(v) for v in bound.variables if not executor.is_local(v)]
            layers = list(dict.fromkeys(map(owner_of, shared)))
            self._self_watch = make_watch(
                bound.strategy,
                layers,
                executor.dense.model,
                lambda model: self._ready().why_not_cut(model),
            )
        running = self._self_watch
        strategy = None if running is None else running.step(data, callbacks)
        if strategy is None:
            return False
        bound = self._ready()
        if strategy == bound.strategy:  # only its outcome differs
            self._self_bound = bound.with_outcome(strategy)
            return False
        self.undo_shards()
        self._bind(strategy)
        model = bound.executor.dense.model
        if model is not None:
            self.wire(model)
        return True

    def undo_shards(self) -> None:
        """Bind the wrapped optimizer to whole variables, until it is used again. Collective.

        A wrapper around it, or a plan, may let parameters be cut again.
        """
        bound = self._ready()
        if bound.is_cut:
            self._bind(bound.strategy, may_cut=False)
            self._self_bound = replace(self._self_bound, is_ready=False)

    def insert_scaler(self, scaler: keras.optimizers.LossScaleOptimizer) -> None:
        """Wrap a LossScaleOptimizer that holds the wrapped optimizer, in its place. Collective.

        Raises:
            ConfigError: Groups of local SGD have built the optimizer without loss scaling.
        """
        if self._ready().is_cut:  # shards do not handle a loss scale
            if self._self_bound.groups is not None:
                raise ConfigError(
                    "LocalSGD needs loss scaling inside when it is built. Received: an "
                    "optimizer that was built before tfscale.prepare(model). Write "
                    "DistributedOptimizer(LossScaleOptimizer(...))."
                )
            self.undo_shards()
        inner = self.__wrapped__
        scaler.inner_optimizer = inner
        if inner.built and not scaler.built:
            scaler.build(internals.trained_by(inner))
        self.__wrapped__ = scaler
        self._self_bound = replace(self._self_bound, optimizer=scaler)

    # Ranks and groups

    @property
    def strategy(self) -> Exchange:
        """The present strategy, including choices made during training."""
        bound = self._self_bound
        return bound.strategy if bound.groups is None else bound.groups.strategy

    def start_groups(self) -> None:
        """Start local SGD. Collective; the training step must be traced again."""
        bound = self._ready()
        assert bound.groups is not None
        groups, model = bound.groups.apart(), bound.executor.dense.model
        variables = bound.variables if self.__wrapped__.built else None
        self._bind(bound.strategy, groups, variables)
        logger.info("Local SGD starts: %d groups of ranks.", len(groups.members))
        if model is not None:
            self.wire(model)  # dense layers exchange within the group, too

    def register_local_var(self, variable: Any) -> None:
        """Do not exchange the gradient of a variable, which may then differ between ranks."""
        self._self_bound.executor.request.local.add(variable)

    def is_local_var(self, variable: Any) -> bool:
        """Return whether a variable may differ between ranks, as in local layers.

        The answer is known before the optimizer is built.
        """
        return self._self_bound.executor.is_local(variable)

    # Cycles of several batches, and steps that are skipped

    @property
    def accumulator(self) -> Accumulator | None:
        """The sums of gradients of `backward_passes_per_step`; None for 1."""
        return self._self_accumulator

    @property
    def n_skipped_steps(self) -> int:
        """Steps that this rank skipped because of `nonfinite="skip"`."""
        return self._self_bound.nonfinite.n_skipped

    # State, complete wherever Keras or a user reads it

    @property
    def tables(self) -> KeptTables | None:
        """The tables of the model, or among the variables; None without any."""
        rule = internals.update_rule(self.__wrapped__)
        variables = tables_of(internals.trained_by(rule))
        if self._self_tables is None and variables:
            self._self_tables = KeptTables([], variables, rule, rule is not self.__wrapped__)
        return self._self_tables

    @property
    def shares_state(self) -> bool:
        """Whether each rank holds a part of the state, or will once it is built."""
        is_cutting = self._ready().is_cutting
        return is_cutting or (self.tables is not None and not runtime.is_single())

    @property
    def may_share_state(self) -> bool:
        """Whether the exchange may switch to sharded state during a `fit`."""
        watch = self._self_watch
        return self._self_bound.strategy.may_shard_later if watch is None else watch.may_cut

    @property
    def variables(self) -> list[Any]:
        """The wrapped optimizer's variables; where parameters are sharded, this rank's parts."""
        kept = self._self_bound.kept
        return self.__wrapped__.variables if kept is None else kept.variables

    def full_state(self) -> list[np.ndarray]:
        """Return the complete state, in the order of `variables`.

        Collective where parameters are sharded: all ranks must call this. Until the next step the
        first rank keeps the result, so that it can save the model without the others.

        Returns:
            Arrays of the shapes that an optimizer in one process has.

        Raises:
            ExchangeError: Communication failed.
        """
        kept, tables = self._self_bound.kept, self.tables
        variables = self.__wrapped__.variables
        arrays = [variable.numpy() for variable in variables] if kept is None else kept.gather()
        if kept is not None:
            kept.keep_on_first()
        if tables is not None:
            tables.gather()
            arrays = tables.replace(variables, arrays)
            tables.keep_on_first()
        return arrays

    def save_own_variables(self, store: dict[str, Any]) -> None:
        """Write the complete state, as Keras does for an optimizer in one process.

        Collective where parameters are sharded, unless `full_state` was called before.
        """
        kept, tables = self._self_bound.kept, self.tables
        if kept is None and tables is None:
            self.__wrapped__.save_own_variables(store)
            return
        variables = self.__wrapped__.variables
        values = [v.numpy() for v in variables] if kept is None else kept.read("saving")
        values = values if tables is None else tables.replace(variables, values)
        for i, value in enumerate(values):
            store[str(i)] = value

    def load_own_variables(self, store: dict[str, Any]) -> None:
        """Load this rank's part of a complete state."""
        kept, tables = self._self_bound.kept, self.tables
        if tables is not None and len(store) == len(self.__wrapped__.variables):
            store = tables.cut(self.__wrapped__.variables, store)
        if kept is None or len(store) != len(self.__wrapped__.variables):
            self.__wrapped__.load_own_variables(store)
            return
        kept.load([np.asarray(store[str(i)]) for i in range(len(store))])

    def in_checkpoint(self, restores: bool) -> Any:
        """Return the optimizer's complete state as a node of a tf.train.Checkpoint."""
        kept = self._self_bound.kept
        if kept is not None:
            return kept.node
        is_open = restores and not self.__wrapped__.built
        if is_open and runtime.is_initialized() and self.shares_state:
            raise ConfigError(
                "optimizer must be built, being sharded, before it is restored, or its state "
                f"would be lost. Received: {self.__wrapped__.name}, not built. Call "
                "tfscale.prepare(model), or optimizer.build(variables), before restoring."
            )
        return self.__wrapped__

    def memory_report(self) -> dict[str, int]:
        """Return how much memory the optimizer takes.

        Returns:
            Bytes: "state" of the optimizer on this rank, "complete_state" in one process,
            "parameters" that this rank holds besides the model's, "accumulators" of
            `backward_passes_per_step`, "residuals" of lossy compressions.
        """
        accumulator = self._self_accumulator
        sums = n_bytes(accumulator.variables) if accumulator else 0
        return {**self._self_bound.memory_report(), "accumulators": sums}

    # Copies

    def from_config(self, config: dict[str, Any]) -> Any:
        """Return an optimizer made from a config, wrapped as this one."""
        return _wrapped_like(self, self.__wrapped__.from_config(config))

    def __copy__(self) -> Any:
        """Copy the wrapped optimizer and wrap it in the same way."""
        return _wrapped_like(self, self._self_bound.fresh() or copy.copy(self.__wrapped__))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the wrapped optimizer and wrap it in the same way; the copy begins a new cycle."""
        copied = self._self_bound.fresh() or copy.deepcopy(self.__wrapped__, memo)
        return _wrapped_like(self, copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the wrapped optimizer."""
        return (self._self_bound.fresh() or self.__wrapped__).__reduce_ex__(protocol)


def _wrapped_like(distributed: DistributedOptimizer, inner: Any) -> DistributedOptimizer:
    """Wrap another optimizer as this one; it begins a new cycle of batches."""
    bound, sums = distributed.bound, distributed.accumulator
    other = DistributedOptimizer(inner)
    other._self_bound = bound.for_another(inner)
    if sums is not None:
        other._self_accumulator = Accumulator(sums.passes, sums.is_mean, sums.op)
    return other


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer, *args: Any, local_layers: Any = None, **options: Any
) -> DistributedOptimizer:
    """Wrap an optimizer; the variables of some layers stay local to each rank.

    Args:
        optimizer: Any Keras optimizer.
        *args: As for `DistributedOptimizer`.
        local_layers: A layer or a list of layers whose gradients are not exchanged; None: all are.
        **options: As for `DistributedOptimizer`.

    Returns:
        The wrapped optimizer.

    Raises:
        ConfigError: `local_layers` has objects that are not Keras layers.

    Examples:
        >>> tfscale.init()
        >>> shared, head = keras.layers.Dense(4), keras.layers.Dense(1)
        >>> model = keras.Sequential([keras.Input((3,)), shared, head])
        >>> optimizer = keras.optimizers.SGD(0.1)
        >>> optimizer = tfscale.PartialDistributedOptimizer(optimizer, local_layers=head)
        >>> model.compile(optimizer, "mse")
        >>> optimizer.is_local_var(shared.kernel), optimizer.is_local_var(head.kernel)
        (False, True)
    """
    wrapped = DistributedOptimizer(optimizer, *args, **options)
    wrapped.bound.executor.request.local.add_layers(local_layers)
    return wrapped


def distributed_of(optimizer: Any) -> DistributedOptimizer | None:
    """Return a DistributedOptimizer, or that inside of a LossScaleOptimizer; None for others."""
    if type(optimizer) is DistributedOptimizer:
        return optimizer
    inner = internals.scaled_by(optimizer)
    return inner if type(inner) is DistributedOptimizer else None


def distributed_optimizers(model: keras.Model | None) -> list[DistributedOptimizer]:
    """List the distributed optimizers of a model, in the order of `optimizers_of`."""
    wrapped = [] if model is None else [distributed_of(o) for o in internals.optimizers_of(model)]
    return [optimizer for optimizer in wrapped if optimizer is not None]


def process_set_of(model: Any) -> ProcessSet:
    """Return the ranks that train the same model as this one."""
    distributed = distributed_of(internals.optimizer_of(model))
    return global_process_set if distributed is None else distributed.bound.process_set


def groups_of(model: keras.Model) -> list[list[int]]:
    """Return the ranks whose models are equal, each rank in one group."""
    size, distributed = runtime.size(), distributed_optimizers(model)
    if size > 1 and not distributed:
        return [[rank] for rank in range(size)]
    if not distributed or distributed[0].bound.process_set is global_process_set:
        groups = distributed[0].bound.groups if distributed else None
        return [list(g) for g in groups.ranks] if groups else [list(range(size))]
    members = list(distributed[0].bound.process_set.group().ranks)
    return [members, *([rank] for rank in range(size) if rank not in members)]


def broadcast_loaded(model: keras.Model, root_rank: int) -> None:
    """Send all ranks their parts of the sharded state that one rank may have loaded. Collective."""
    for optimizer in distributed_optimizers(model):
        if optimizer.bound.kept is not None:
            optimizer.bound.kept.broadcast_loaded(root_rank, optimizer.bound.process_set)


def differing_variables(optimizer: Any) -> list[Any]:
    """Return an optimizer's variables that differ between ranks with equal models.

    These are slots of which each rank has a part (`tfscale.Sharded`), and Keras's gradient
    accumulators if ranks exchange no gradients.
    """
    distributed = distributed_of(optimizer)
    if distributed is None:
        return internals.gradient_sums(internals.update_rule(optimizer))
    kept = distributed.bound.kept
    return kept.parts if kept else []


def sharded_states(model: keras.Model) -> list[KeptState | KeptTables]:
    """Return the complete state of each optimizer whose state the ranks share, and tables."""
    optimizers = distributed_optimizers(model)
    kept_states = [kept for o in optimizers for kept in (o.bound.kept, o.tables)]
    return [kept for kept in kept_states if kept is not None]


def accumulators(model: keras.Model | None) -> list[Accumulator]:
    """List the sums of the optimizers of a model that add up gradients of several batches."""
    return [o.accumulator for o in distributed_optimizers(model) if o.accumulator is not None]


def passes_per_update(model: keras.Model) -> int:
    """Return the number of batches after which each optimizer of a model has made an update.

    More than 1 with `backward_passes_per_step` or Keras's `gradient_accumulation_steps`.
    """
    passes = [accumulator.passes for accumulator in accumulators(model)]
    rules = map(internals.update_rule, internals.optimizers_of(model))
    return max([1, *passes, *(rule.gradient_accumulation_steps or 1 for rule in rules)])


def _check(optimizer: Any, passes: int) -> None:
    if distributed_of(optimizer) is not None:
        raise ConfigError(
            "optimizer must be wrapped once. Received: a DistributedOptimizer. Pass the Keras "
            "optimizer itself."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            f"optimizer must be a Keras optimizer. Received: {type(optimizer).__name__}. "
            "Build one, for example keras.optimizers.SGD(0.1)."
        )
    refuse_bypassed(optimizer)
    if int(passes) != passes or passes < 1:
        raise ConfigError(f"backward_passes_per_step must be 1 or more. Received: {passes}.")
    if passes > 1:
        refuse_accumulating(internals.update_rule(optimizer))
