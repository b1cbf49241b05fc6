"""An update whose gradients are exchanged within a group, and whose results are averaged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.runtime import ProcessSet, global_process_set, own_process_set
from tfscale.config import ConfigError
from tfscale.exchange.averaging import GroupAverage
from tfscale.exchange.local_sgd import LocalSGD
from tfscale.exchange.shard_state import slots_of
from tfscale.exchange.strategies import resolve
from tfscale.gradients import GradientReducer, first_exchanged
from tfscale.update.loss_scale import update_rule
from tfscale.update.rebuilding import unbuilt
from tfscale.update.rules import ELEMENTWISE

logger = logging.getLogger("tfscale")


class LocalUpdate:
    """Hands the work to the update of the exchange inside of a group, and averages after it.

    Attributes:
        process_set: All ranks, groups of all kinds together.
        groups: Ranks of each group; of all ranks while they still train together.
        average: Counts steps and averages; None while all ranks train together.
    """

    def __init__(
        self, reducer: GradientReducer, strategy: LocalSGD, choose: Callable[[], Any]
    ) -> None:
        """Form groups, unless they start later. Collective.

        Args:
            reducer: Changed: it reduces within a group from now on.
            strategy: Groups and intervals.
            choose: Returns the update of the exchange that `reducer` has now.

        Raises:
            ConfigError: The groups do not fit the ranks.
        """
        if reducer.process_set is not global_process_set:
            raise ConfigError(
                f"Local SGD forms groups of all ranks. Received: {reducer.process_set!r}. "
                "Leave process_set out."
            )
        self.process_set = global_process_set
        self.strategy = strategy
        self._reducer = reducer
        self._choose = choose
        self._members = strategy.members(runtime.size())
        self.groups: list[list[int]] = [list(range(runtime.size()))]
        self.average: GroupAverage | None = None
        self._variables: list[keras.Variable] = []
        self._model: keras.Model | None = None
        self._own: list[Any] = []  # a gradient of this rank's in the step that is traced
        reducer.strategy = resolve(strategy.within)
        self._is_local = strategy.start == "immediately"
        if self._is_local:
            self._form_groups()
        self._inner = choose()

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded within a group."""
        return self._inner.is_sharded

    @property
    def shards(self) -> Any:
        """The own pieces, if parameters are sharded within a group."""
        return self._inner.shards

    @property
    def state(self) -> Any:
        """The state of the optimizer of this rank's group, if it is sharded."""
        return self._inner.state

    @property
    def kept(self) -> Any:
        """The complete state of that optimizer, when it is gathered."""
        return self._inner.kept

    @property
    def nodes(self) -> Any:
        """That optimizer as tf.train.Checkpoint sees it."""
        return self._inner.nodes

    def _form_groups(self) -> None:
        """Make process sets: a group's ranks, and ranks with the same place in their groups."""
        rank, m = runtime.rank(), len(self._members[0])
        sets = [own_process_set(ranks) for ranks in self._members]
        alike = [[group[i] for group in self._members] for i in range(m)]
        across = [own_process_set(ranks) for ranks in alike]
        self.groups = self._members
        self._reducer.process_set = sets[rank // m]
        self._across: ProcessSet = across[rank % m]

    def build(self, optimizer: Any, variables: Sequence[Any]) -> Any:
        """Build an optimizer for this rank's part of its group's model, and return it."""
        optimizer = self._inner.build(optimizer, variables)
        self._variables = list(variables)
        if self._is_local:
            self._begin_averaging(optimizer)
        return optimizer

    def _begin_averaging(self, optimizer: Any) -> None:
        rule, shards = update_rule(optimizer), self._inner.shards
        self._require_unscaled(optimizer, rule)
        self._require_plain(rule)
        targets = [v for v in rule._trainable_variables if not self._reducer.is_local(v)]
        if shards is not None:
            _require_elementwise(self.strategy.outer)
            targets = [p for i, p in enumerate(shards.pieces) if shards.owned(i)]
        places = self._reducer.process_set.group().rank
        is_counted = shards is not None or places == 0
        across, compression = self._across.group(), self._reducer.options.compression
        self.average = GroupAverage(self.strategy, across, is_counted, compression)
        has_state = self.strategy.average_state
        states = _shared_state(rule, self._reducer.is_local) if has_state else []
        self.average.build(rule, targets, states)
        self._inner.after_update = self._after_update

    def _require_unscaled(self, optimizer: Any, rule: Any) -> None:
        is_scaled = rule is not optimizer or rule.loss_scale_factor is not None
        if is_scaled and self.strategy.average == "gradients":
            raise ConfigError(
                "Gradients are added up over an interval, and a loss scale may change within it. "
                f"Received: average='gradients' with {type(optimizer).__name__} and "
                f"loss_scale_factor={rule.loss_scale_factor}. Use average='parameters', or train "
                "without a loss scale (mixed_bfloat16)."
            )

    def _require_plain(self, rule: Any) -> None:
        named = ("clipnorm", "clipvalue", "global_clipnorm", "weight_decay")
        used = [name for name in (*named, "gradient_accumulation_steps") if getattr(rule, name)]
        if used and self.strategy.average == "gradients":
            raise ConfigError(
                "The common model moves by gradients as the ranks have them: what the optimizer "
                f"makes of them is lost. Received: average='gradients' with {', '.join(used)}. Use "
                "average='parameters', or leave that out."
            )

    def attach(self, model: keras.Model) -> None:
        """Let steps end before the parameters have arrived, if they are sharded."""
        self._model = model
        self._inner.attach(model)

    def apply(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], skips: bool
    ) -> Sequence[Any]:
        """Reduce gradients within the group, apply them, average if it is due.

        Args:
            optimizer: What `build` returned.
            gradients: This rank's, one per variable.
            variables: What they belong to.
            skips: The optimizer skips a step with an infinite gradient.

        Returns:
            What was updated.
        """
        if self._is_local and self.average is None:
            self._begin_averaging(optimizer)
        self._own = first_exchanged(gradients)
        return self._inner.apply(optimizer, gradients, variables, skips)

    def _after_update(self, targets: Sequence[Any], gradients: Sequence[Any]) -> None:
        # Where data ends unannounced, a step begins without a batch, and TensorFlow runs what
        # does not wait for one: on some ranks, steps would be counted that none makes. A gradient
        # of this rank's own needs a batch, and is there without waiting for others.
        assert self.average is not None
        with tf.control_dependencies(self._own):
            self.average.after_update(targets, gradients)

    def finalize(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Let the optimizer set final values, each group its own, and average them. Collective."""
        self._inner.finalize(optimizer, variables)
        if self.average is not None and update_rule(optimizer).use_ema:
            self.average.average_now()
            if self._inner.shards is not None:
                self._inner.shards.publish(waits=True)

    @property
    def is_waiting(self) -> bool:
        """Whether all ranks still train together."""
        return not self._is_local

    def start(self, optimizer: Any) -> Any:
        """Go over from training together to training in groups. Collective.

        The step must be traced anew afterwards.

        Args:
            optimizer: What `build` returned.

        Returns:
            The optimizer to go on with, in the same state.
        """
        logger.info("Local SGD starts: %d groups of ranks.", self.strategy.groups)
        state = self.state.gather() if self.state is not None else None
        self._form_groups()
        self._is_local = True
        model = self._reducer.change_strategy(self._reducer.strategy)
        if model is not None:
            self._reducer.wire(model)  # dense layers exchange within the group, too
        if state is None:
            self._begin_averaging(optimizer)
            return optimizer
        self._inner = self._choose()
        with tf.init_scope():
            optimizer = self._inner.build(unbuilt(optimizer), self._variables)
        if self._inner.state is not None:
            self._inner.state.load(state)
        else:
            for variable, value in zip(optimizer.variables, state, strict=True):
                variable.assign(value)
        self._begin_averaging(optimizer)
        if self._model is not None:
            self._inner.attach(self._model)
        return optimizer


def _shared_state(rule: Any, is_local: Callable[[Any], bool]) -> list[Any]:
    """Return a rule's variables but the slots of local variables, which stay each rank's own."""
    owners, trainable = slots_of(rule), rule._trainable_variables
    of_local = {slot for slot, index in owners.items() if is_local(trainable[index])}
    return [variable for variable in rule.variables if id(variable) not in of_local]


def _require_elementwise(outer: Any) -> None:
    """Raise where an outer optimizer would take a rank's segment for the whole model.

    Raises:
        ConfigError: It looks at norms.
    """
    used = [name for name in ("clipnorm", "global_clipnorm") if getattr(outer, name, None)]
    if outer is not None and (used or type(outer) not in ELEMENTWISE):
        raise ConfigError(
            "With sharded parameters an outer optimizer sees a rank's segment only. Received: "
            f"{' with '.join([type(outer).__name__, *used])}, which looks at more than one value. "
            "Use within='allreduce', or another outer optimizer such as SGD."
        )
