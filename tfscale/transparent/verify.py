"""Compare a step on shares with the same step on the whole batch: `distribute(verify=...)`.

A step of a script can combine the rows of a batch in ways that no patch sees: a layer that
subtracts the mean over axis 0, a loss with a divisor of its own. The first step of each function is
therefore computed in both ways before it runs:

1. All ranks compute it on their shares, and combine gradients, metrics and outputs.
2. Rank 0 computes it on the whole batch, as one process does, with the same weights and seeds.
3. Rank 0 compares the results, and all ranks raise the same error if they differ.

Both ways put back every variable that they change. In both, optimizers record their gradients and
take a plain step along them: rules such as Adam's would make visible differences of rounding
errors. What the exchange loses by design, as 8 bits do, is therefore not compared.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfscale.callbacks.epoch_measures import MemoryGuard
from tfscale.callbacks.metric_average import metrics_of_all_ranks
from tfscale.checkpoints.variables import distinct
from tfscale.comm import collectives, objects, runtime
from tfscale.config import ConfigError, is_count, require
from tfscale.exchange import batch_shares as shares
from tfscale.exchange.dense import own_calls
from tfscale.fit import steps
from tfscale.fit.metric_updates import flat_items, metrics_of
from tfscale.internals.classes import Patches
from tfscale.internals.datasets import in_own_memory
from tfscale.internals.keras import layers_of, raw_variable, replace_function
from tfscale.internals.optimizers import iterations_of, optimizers_of, trained_by
from tfscale.internals.trace import captured_variables, current_graph, ops_of
from tfscale.layers.sharded_embedding import named, sharded_embeddings
from tfscale.optimizer.distributed import DistributedOptimizer
from tfscale.optimizer.futures import drain
from tfscale.transparent.differences import Difference, Value, explain, find_differences

logger = logging.getLogger("tfscale")

Verify = Literal["off", "first"] | int
StepKind = Literal["train", "test", "predict"]

_METHODS = {"train": "fit", "test": "evaluate", "predict": "predict"}
# Ops that act outside of the step: they would act again.
_OUTSIDE = ("PyFunc", "Print", "Write", "Save", "Enqueue", "TableInsert", "TableImport")
# Ops whose state is no variable, so that their numbers cannot be repeated.
_UNREPEATABLE = (
    *("RandomUniform", "RandomStandardNormal", "TruncatedNormal", "RandomUniformInt"),
    *("RandomShuffle", "Multinomial", "RandomGamma", "RandomPoissonV2"),
    "ParameterizedTruncatedNormal",
)
_STEP_LENGTH = 0.01  # at most, of a step along gradients in place of an optimizer's
# Before a difference is an error: runs with weights that are changed by so many rounding errors.
_N_NUDGED, _NUDGE = 3, 4.0
_COLLECTIVES = ("Tfscale", "Horovod")
_ALONE = {"TfscaleAwait"}  # waits for what has been posted, and sends nothing
_EPSILONS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def require_verify(verify: Any) -> None:
    """Raise a ConfigError unless `verify` is "off", "first" or a number of steps."""
    is_known = verify in ("off", "first") or is_count(verify)
    require(is_known, "verify", "'off', 'first' or a number of steps above 0", verify)


class Verifier:
    """Compares steps of models with those of one process, before they run.

    Args:
        verify: "first" compares the first step of each function, N that and every N-th, "off" none.
        compare_batch: Requires that all ranks were given the same batch, for a model and the name
            of a step. Collective.
    """

    def __init__(
        self, verify: Verify, compare_batch: Callable[[keras.Model, str, Any], None]
    ) -> None:
        self._every = 0 if verify in ("first", "off") else int(verify)
        self._is_on = verify != "off"
        self._compare_batch = compare_batch
        self._trial: _Trial | None = None

    def patch(self, patches: Patches) -> None:
        """Check the functions that models make from now on."""
        if not self._is_on:
            return
        patches.wrap_model(
            make_train_function=functools.partial(self._make_checked, "train"),
            make_test_function=functools.partial(self._make_checked, "test"),
            make_predict_function=functools.partial(self._make_checked, "predict"),
        )
        patches.wrap(DistributedOptimizer, "apply", self.apply_or_record)
        # Sums of scaled 16-bit gradients overflow, more or less early in batches of other sizes.
        patches.wrap(keras.optimizers.LossScaleOptimizer, "scale_loss", self._unscaled)
        patches.wrap_stateful_draws(self._draw_or_repeat)

    def apply_or_record(
        self, apply: Any, optimizer: Any, grads: Any, trainable_variables: Any = None, **kwargs: Any
    ) -> Any:
        """Call the `apply` of an optimizer; while a step is tried, record its gradients instead."""
        if self._trial is None:
            return apply(optimizer, grads, trainable_variables, **kwargs)
        variables = trainable_variables
        if variables is None:
            is_wrapped = type(optimizer) is DistributedOptimizer
            variables = optimizer.bound.variables if is_wrapped else trained_by(optimizer)
        self._trial.record(optimizer, list(grads), list(variables))
        return iterations_of(optimizer)

    def _unscaled(self, scale_loss: Any, optimizer: Any, loss: Any) -> Any:
        return scale_loss(optimizer, loss) if self._trial is None else loss

    def _draw_or_repeat(self, stateless: Any, draw: Any, *args: Any, **kwargs: Any) -> Any:
        """Let draws of both ways to compute a step give the same numbers, and move no state."""
        if self._trial is None:
            return draw(*args, **kwargs)
        kwargs.pop("name", None)
        seeds = kwargs.pop("seed", 0), kwargs.pop("seed2", 0)
        return stateless(*args, seed=seeds, **kwargs)

    def _make_checked(
        self, kind: StepKind, make: Any, model: keras.Model, force: bool = False
    ) -> Any:
        name = f"{kind}_function"
        before = getattr(model, name)
        make(model, force=force)
        function = getattr(model, name)
        if function is not before:
            function = _CheckedFunction(self, model, kind, function)
            replace_function(model, name, function)
        return function

    def is_due(self, n_calls: int) -> bool:
        """Return whether to verify the call of a function after `n_calls` calls."""
        return n_calls == 0 or (self._every > 0 and n_calls % self._every == 0)

    def verify(self, model: keras.Model, kind: StepKind, batch: Any, spec: Any) -> None:
        """Raise a ConfigError on all ranks if a step differs from that of one process. Collective.

        Args:
            model: The model, whose steps are those of `steps.on_share` and `steps.on_all_rows`.
            kind: The step.
            batch: The whole batch, the same on all ranks, or this rank's rows of it.
            spec: Its element spec, with which the step itself will be traced.
        """
        self._compare_batch(model, f"{kind}_step", batch)
        if tables := sharded_embeddings(model):
            _tell_not_compared(model, kind, f"the ranks share the rows of {named(tables)}")
            return
        batch, spec = _whole(batch, spec)
        step = getattr(model, f"{kind}_step")
        plain, share = steps.plain_step(step), shares.share_of(batch)
        if plain is None or share is None:
            return
        seeds = _PythonSeeds()
        try:
            shared = _Trial(self, model, kind, step, spec, is_shared=True)
        except Exception as error:
            if not model.run_eagerly:
                raise
            seeds.restore()
            _tell_not_compared(model, kind, f"it cannot be traced ({error})")
            return
        shared.seeds.restore()
        reason = shared.reason or _why_weights_differ(model)
        if reason:
            shared.seeds.restore(numpy=seeds)
            _tell_not_compared(model, kind, reason)
            return
        total = int(share.total)
        rows, part = total, batch
        while rows:
            verdict = self._compare(shared, plain, spec, part, rows)
            # Python's is kept after building: Keras draws the seeds of layers from it. The step
            # itself draws from NumPy's in as many traces as without this one.
            shared.seeds.restore(numpy=seeds)
            if verdict.rows == rows:
                break
            rows = verdict.rows
            part = shares.cut(batch, shares.Share(0, rows, total, rows))
        if verdict.reason:
            _tell_not_compared(model, kind, verdict.reason)
        elif verdict.differences:
            raise ConfigError(explain(_METHODS[kind], runtime.size(), verdict.differences))

    @property
    def is_trying(self) -> bool:
        """Whether a step is being tried, of which nothing is kept."""
        return self._trial is not None

    @contextlib.contextmanager
    def trying(self, trial: _Trial) -> Iterator[None]:
        """Let optimizers record their gradients in a trial, within a block."""
        self._trial = trial
        try:
            with own_calls(layers_of(trial.model)), _unoptimized():
                yield
        finally:
            self._trial = None

    def _compare(self, shared: _Trial, plain: Any, spec: Any, batch: Any, rows: int) -> _Verdict:
        """Compute both ways on a batch; return rank 0's verdict. Collective."""
        model, kind = shared.model, shared.kind
        guard = MemoryGuard()
        guard.begin_epoch()
        combined = shared.run(batch)
        share = shares.share_of(batch)
        assert share is not None
        n_own = max(1, int(share.rows))
        guard.end_epoch(n_own)
        verdict = _Verdict(rows)
        error: Exception | None = None
        if runtime.rank() == 0:
            fitting = int(min(rows, guard.largest(n_own)))
            fitting = 0 if share.others and fitting < rows else fitting  # cut by numbers of its own
            if fitting < rows:
                logger.warning(_PART, _METHODS[kind], fitting, rows)
                verdict = _Verdict(fitting)
            else:
                try:
                    alone = _Trial(self, model, kind, plain, spec, is_shared=False)
                    verdict = _Verdict(rows, alone.reason)
                    if not alone.reason:
                        verdict = _Verdict(rows, differences=alone.compare(batch, combined))
                except tf.errors.ResourceExhaustedError:
                    fitting = rows // 2 if rows // 2 >= runtime.size() else 0
                    logger.warning(_PART, _METHODS[kind], fitting, rows)
                    reason = "" if fitting else "memory for the whole batch is missing"
                    verdict = _Verdict(fitting, reason)
                except Exception as caught:  # raised here after the others know of it
                    error = caught
                    reason = f"{type(caught).__name__} on the whole batch: {caught}"
                    verdict = _Verdict(rows, reason)
        verdict = objects.broadcast_object(verdict, 0, name="verification of a step")
        if error is not None:
            raise error
        return verdict


_PART = (
    "The first step of %s is compared with that of one process on %d of the %d rows of its batch: "
    "memory for all of them is missing on rank 0."
)


@dataclass(frozen=True)
class _Verdict:
    """The findings of rank 0.

    Attributes:
        rows: Rows of the batch that were compared; fewer than asked for if memory is missing.
        reason: Why the step was not compared; empty if it was.
        differences: Largest first, a text for each value that differs.
    """

    rows: int
    reason: str = ""
    differences: tuple[Difference, ...] = ()


def _why_weights_differ(model: keras.Model) -> str:
    """Return why the ranks' weights differ; empty if they are equal. Collective."""
    digest = 0
    for variable in model.trainable_variables:
        digest = zlib.crc32(np.ascontiguousarray(variable.numpy()).view(np.uint8), digest)
    digests = objects.allgather_object(digest, name="weights of a tried step")
    return "" if len(set(digests)) == 1 else "groups of ranks have weights of their own"


def _tell_not_compared(model: keras.Model, kind: StepKind, reason: str) -> None:
    if runtime.rank() == 0:
        logger.warning(
            "The first step of %s of model %r was not compared with that of one process: %s.",
            *(_METHODS[kind], model.name, reason),
        )


class _CheckedFunction:
    """A train, test or predict function of a model that verifies steps before it runs them."""

    def __init__(
        self, verifier: Verifier, model: keras.Model, kind: StepKind, function: Any
    ) -> None:
        self._verifier, self._model, self._kind = verifier, model, kind
        self._function = function
        self._n_calls = 0

    def __call__(self, data: Any) -> Any:
        """Run the function on an iterator; on a list of batches to predict."""
        if self._verifier.is_due(self._n_calls):
            data = self._verify(data)
        self._n_calls += 1
        return self._function(data)

    def _verify(self, data: Any) -> Any:
        """Verify the first batch of the data; return data that still has it."""
        model = self._model
        if self._kind == "predict":
            batch = spec = _without_optionals(data[0])
        elif isinstance(data, tf.data.Iterator):
            following = data.get_next_as_optional()
            if not following.has_value():
                return data
            batch, spec = following.get_value(), data.element_spec
            data = _beginning_with(batch, data, model.steps_per_execution)
            batch, spec = _without_optionals(batch), _without_optionals(spec)
        else:
            batch = next(data)
            data = itertools.chain([batch], data)
            batch = spec = _as_tensors(_without_optionals(batch))
        self._verifier.verify(model, self._kind, batch, spec)
        return data


def _beginning_with(first: Any, rest: tf.data.Iterator, n_batches: int) -> Any:
    """Return an iterator over `n_batches`, of the type of `rest`, so that nothing is re-traced."""

    def batches() -> Iterator[Any]:
        yield in_own_memory(first)
        yield from map(in_own_memory, itertools.islice(rest, n_batches - 1))

    options = tf.data.Options()
    options.autotune.enabled = False  # fetches no batch before it is asked for
    options.experimental_optimization.apply_default_optimizations = False
    try:
        dataset = tf.data.Dataset.from_generator(batches, output_signature=rest.element_spec)
    except TypeError:  # a spec that generators cannot have
        return batches()
    return iter(dataset.with_options(options))


def _without_optionals(batch: Any) -> Any:
    """Return a batch, or its spec, with None in place of `tf.experimental.Optional`."""
    missing = (tf.experimental.Optional, tf.OptionalSpec)
    return keras.tree.map_structure(lambda leaf: None if isinstance(leaf, missing) else leaf, batch)


def _whole(batch: Any, spec: Any) -> tuple[Any, Any]:
    """Return a batch and its spec, made of the rows of all ranks if they are apart. Collective."""
    if not isinstance(batch, shares.RowsOfBatch):
        return batch, spec
    share = shares.share_of(batch)
    assert share is not None
    # As objects: rows may be texts, which no other collective sends.
    rows_here = [leaf.numpy()[: int(share.rows)] for leaf in tf.nest.flatten(batch.rows)]
    by_rank = objects.allgather_object(rows_here, name="rows of a tried step")
    leaves = [
        tf.convert_to_tensor(np.concatenate(of_ranks)) for of_ranks in zip(*by_rank, strict=True)
    ]
    n_rows = spec.places.shape[0]
    whole_spec = tf.nest.map_structure(
        lambda part: tf.TensorSpec([n_rows, *part.shape[1:]], part.dtype), spec.rows
    )
    return tf.nest.pack_sequence_as(batch.rows, leaves), whole_spec


def _as_tensors(batch: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, batch
    )


class _PythonSeeds:
    """The states of Python's and NumPy's random numbers, which tracing a step may use."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self, numpy: _PythonSeeds | None = None) -> None:
        """Set the states of when this was made; that of NumPy, of when another was made."""
        random.setstate(self._python)
        np.random.set_state((numpy or self)._numpy)


# One way to compute a step


@contextlib.contextmanager
def _unoptimized() -> Iterator[None]:
    """Run functions as they were traced, within a block.

    A trial runs a few times only. TensorFlow's graph optimizer takes longer than that, and its time
    grows with the square of the number of variables.
    """
    options = tf.config.optimizer
    was_disabled = options.get_experimental_options().get("disable_meta_optimizer", False)
    options.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        options.set_experimental_options({"disable_meta_optimizer": was_disabled})


class _Trial:
    """A step that is computed without keeping what it changes.

    Attributes:
        model: The model.
        kind: The step.
        reason: Why it must not run; empty if it may.
        seeds: The states of Python's random numbers when it was traced.
    """

    def __init__(
        self,
        verifier: Verifier,
        model: keras.Model,
        kind: StepKind,
        step: Any,
        spec: Any,
        is_shared: bool,
    ) -> None:
        self.model, self.kind, self.reason = model, kind, ""
        self._verifier, self._is_shared = verifier, is_shared
        # What optimizers are given while the step is traced: variable and gradient.
        self._recorded: list[tuple[Any, tf.Tensor]] = []

        def step_and_gradients(batch: Any) -> Any:
            # A model that is not built is traced twice: what counts is the second time.
            self._graph, self._recorded, self.seeds = current_graph(), [], _PythonSeeds()
            return step(batch), [gradient for _, gradient in self._recorded]

        # Without autograph: Keras does not convert steps either.
        self._function = tf.function(step_and_gradients, autograph=False)
        with verifier.trying(self):
            self._concrete = self._function.get_concrete_function(spec)
        ops = ops_of(self._concrete)
        outside = sorted(op for op in ops if any(word in op for word in _OUTSIDE))
        if outside:
            self.reason = f"its op {outside[0]} acts outside of the step, and would act twice"
        elif drawing := sorted(ops & {*_UNREPEATABLE}):
            self.reason = (
                f"it draws random numbers by {drawing[0]}, which cannot be drawn again; use the "
                "functions of keras.random or tf.random"
            )
        elif not self._is_shared and any(op.startswith(_COLLECTIVES) for op in ops - _ALONE):
            self.reason = "it calls collectives itself"

    def record(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Do in place of an optimizer: add up its gradients, and follow them for a short step."""
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        dense = [tf.convert_to_tensor(gradient) for gradient, _ in pairs]
        if self._is_shared:
            weighted = [shares.weighted(gradient) for gradient in dense]
            dense = collectives.grouped_allreduce(weighted, name="gradients of a tried step")
        norm = tf.linalg.global_norm([tf.cast(gradient, tf.float64) for gradient in dense])
        rate = _STEP_LENGTH / tf.maximum(norm, 1.0)
        for gradient, (_, variable) in zip(dense, pairs, strict=True):
            # Tensors of branches and inner functions cannot be returned: there the change counts.
            if current_graph() is self._graph:
                self._recorded.append((variable, gradient))
            step = tf.cast(rate, variable.dtype) * tf.cast(gradient, variable.dtype)
            raw_variable(variable).assign_sub(step)
        iterations_of(optimizer).assign_add(1)

    def compare(
        self, batch: Any, combined: Mapping[tuple[str, str], Value]
    ) -> tuple[Difference, ...]:
        """Compute the step of one process; return how that of all ranks together differs."""
        epsilon, alone = _precision(self.model), self.run(batch)
        differences = find_differences(alone, combined, epsilon)
        if differences:
            generators = map(np.random.default_rng, range(_N_NUDGED))
            nudged = [self.run(batch, generator) for generator in generators]
            differences = find_differences(alone, combined, epsilon, nudged)
        return differences

    def run(
        self, batch: Any, nudge: np.random.Generator | None = None
    ) -> dict[tuple[str, str], Value]:
        """Compute the step; return its results on rank 0. Collective if it is that on shares.

        With `nudge` the weights differ from those of the model by rounding errors, drawn from it.
        """
        model = self.model
        with self._verifier.trying(self):  # traces again if the batch does not fit the spec
            self._concrete = self._function.get_concrete_function(batch)
        drain(model.variables)
        handles = self._changeable()
        before = [tf.raw_ops.ReadVariableOp(resource=h, dtype=dtype) for h, dtype in handles]
        if self.kind != "predict":
            model.reset_metrics()
        if nudge is not None:
            self._nudge(nudge, handles, before)
        try:
            with _unoptimized():
                results, gradients = self._function(batch)
            values = self._results(results)
            if runtime.rank() == 0:
                values += self._gradients(gradients) + self._variables(handles, before)
        finally:
            for (handle, _), value in zip(handles, before, strict=True):
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        return {(value.kind, value.name): value for value in values}

    def _nudge(
        self, generator: np.random.Generator, handles: Sequence[Any], values: Sequence[tf.Tensor]
    ) -> None:
        """Change the model's weights, whose values are given, by some rounding errors."""
        weights = {id(raw_variable(v).handle) for v in self.model.trainable_variables}
        size = _NUDGE * _precision(self.model)
        for (handle, dtype), value in zip(handles, values, strict=True):
            if id(handle) in weights and dtype.is_floating:
                factors = 1.0 + size * generator.uniform(-1.0, 1.0, value.shape)
                value = tf.cast(tf.cast(value, tf.float64) * factors, dtype)
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    def _changeable(self) -> list[tuple[tf.Tensor, tf.DType]]:
        """Return the variables to put back: those of the step, and the states of metrics."""
        states = [raw_variable(v) for m in metrics_of(self.model) for v in m.variables]
        handles = captured_variables(self._concrete) + [(s.handle, s.dtype) for s in states]
        return list({id(handle): (handle, dtype) for handle, dtype in handles}.values())

    def _results(self, results: Any) -> list[Value]:
        if self.kind == "predict":
            outputs = map(np.asarray, map(_rows_of, keras.tree.flatten(results)))
            return [Value("output", str(i), array, array) for i, array in enumerate(outputs)]
        logs = dict(flat_items(results)) if isinstance(results, dict) else {}
        if self._is_shared:
            step = f"{self.kind}_step"
            logs = metrics_of_all_ranks(self.model, logs, step, is_direct=True)
        arrays = {key: np.asarray(value) for key, value in logs.items() if _is_number(value)}
        return [Value("loss or metric", key, array, array) for key, array in arrays.items()]

    def _gradients(self, gradients: Sequence[tf.Tensor]) -> list[Value]:
        """Return the gradients that optimizers were given, in the order of their updates."""
        values, n_updates = [], Counter[str]()
        for (variable, _), gradient in zip(self._recorded, gradients, strict=True):
            n_updates[variable.path] += 1
            number = n_updates[variable.path]
            name = variable.path if number == 1 else f"{variable.path}, update {number}"
            values.append(Value("gradient", name, gradient.numpy(), gradient.numpy()))
        return values

    def _variables(self, handles: Sequence[Any], before: Sequence[tf.Tensor]) -> list[Value]:
        """Return the variables whose changes neither gradients nor metrics describe."""
        model, values = self.model, []
        skipped = [variable for variable, _ in self._recorded]
        skipped += [v for metric in metrics_of(model) for v in metric.variables]
        skipped_handles = {id(raw_variable(variable).handle) for variable in skipped}
        state = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
        path_by_handle = {
            id(raw_variable(v).handle): v.path for v in distinct([*model.variables, *state])
        }
        others = {id(v.handle): v.name for v in self._concrete.graph.variables}
        for (handle, dtype), old in zip(handles, before, strict=True):
            if id(handle) in skipped_handles or not (dtype.is_floating or dtype.is_integer):
                continue
            name = path_by_handle.get(id(handle), others.get(id(handle), "of the script"))
            new = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype).numpy()
            values.append(Value("variable", name, new, new - old.numpy()))
        return values


def _rows_of(output: Any) -> Any:
    return output.to_tensor() if isinstance(output, tf.RaggedTensor) else output


def _is_number(value: Any) -> bool:
    return np.asarray(value).dtype.kind in "fiu"


def _precision(model: keras.Model) -> float:
    """Return the distance of 1.0 to the next number in the least precise dtype of a model."""
    dtypes = {v.dtype for v in model.variables}
    dtypes |= {layer.compute_dtype for layer in layers_of(model)}
    return max((_EPSILONS[dtype] for dtype in dtypes & _EPSILONS.keys()), default=2.0**-23)
