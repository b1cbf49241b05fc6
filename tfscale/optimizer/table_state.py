"""Whole tables, and slots of optimizers for them, gathered to be saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfscale.comm import objects
from tfscale.exchange.tables import TableRows, whole
from tfscale.internals.keras import raw_variable, replace_methods, restore_methods
from tfscale.internals.optimizers import iterations_of, slots_of, trained_by
from tfscale.layers import ShardedEmbedding
from tfscale.optimizer.state import Gathered, Version


class KeptTables(Gathered):
    """The whole tables of a model, and the slots for them, while a rank saves."""

    def __init__(
        self,
        layers: Sequence[ShardedEmbedding],
        variables: Sequence[TableRows],
        rule: Any,
        has_scaler: bool = False,
    ) -> None:
        """Keep nothing yet.

        Args:
            layers: The layers whose tables are saved with a model.
            variables: The rows of all tables; there is at least one.
            rule: The optimizer inside loss scaling.
            has_scaler: Whether there is loss scaling: then Keras saves the rule, too.
        """
        self._has_scaler, self._before = has_scaler, None
        self._layers, self._variables, self._rule = layers, variables, rule
        self.process_set = variables[0].table.process_set

    def meet(self, what: str) -> None:
        """Wait for all ranks; `what` names the operation in the error. Collective."""
        self._variables[0].meet(what)

    def slots(self) -> dict[int, tuple[Any, TableRows]]:
        """Map the `id` of each slot for a table to the slot and this rank's rows."""
        trained = trained_by(self._rule)
        owners = slots_of(self._rule) if trained else {}
        variables = {id(v): v for v in self._rule.variables}
        return {
            key: (variables[key], trained[i])
            for key, i in owners.items()
            if isinstance(trained[i], TableRows) and key in variables
        }

    def _version(self) -> Version:
        n_updates = int(iterations_of(self._rule).numpy())
        return n_updates, *(rows.n_loads for rows in self._variables)

    def gather(self, is_kept: bool = True) -> dict[int, np.ndarray]:
        """Gather tables and slots; return slots by `id` where they are kept. Collective.

        At least one rank must keep them (`is_kept`).
        """
        self.forget()
        if self._has_scaler:
            self._serve()
        keeps_by_rank = objects.allgather_object(is_kept, "who keeps tables", self.process_set)
        receivers = [rank for rank, keeps in enumerate(keeps_by_rank) if keeps]
        arrays: dict[int, np.ndarray] = {}
        for key, (slot, rows) in self.slots().items():
            array = whole(rows.table, slot, receivers)
            arrays |= {} if array is None else {key: array}
        for layer in self._layers:
            layer.keep_whole(whole(layer.rows.table, layer.rows, receivers))
        self._keep(arrays if is_kept else None)
        return arrays

    def keep_on_first(self) -> None:
        """Drop the arrays on all ranks but the first of the process set."""
        super().keep_on_first()
        if self.process_set.rank() > 0:
            for layer in self._layers:
                layer.keep_whole(None)

    def forget(self) -> None:
        """Drop gathered arrays, which frees their memory."""
        super().forget()
        for layer in self._layers:
            layer.keep_whole(None)
        if self._has_scaler:
            restore_methods(self._rule, "save_own_variables")
            if self._before is not None:
                replace_methods(self._rule, save_own_variables=self._before)
            self._before = None

    def _serve(self) -> None:
        """Let the optimizer inside loss scaling save whole slots."""
        self._before = vars(self._rule).get("save_own_variables")  # that of `KeptState`
        save = self._rule.save_own_variables

        def save_own_variables(store: Any) -> None:
            own_state: dict[str, Any] = {}
            save(own_state)
            values = [own_state[str(i)] for i in range(len(own_state))]
            for i, value in enumerate(self.replace(self._rule.variables, values)):
                store[str(i)] = value

        replace_methods(self._rule, save_own_variables=save_own_variables)

    def replace(self, variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Return values of an optimizer's variables, with whole slots for tables."""
        if not self.is_here:
            self.meet("saving the optimizer")
            self.gather()
        arrays = self._arrays or {}
        pairs = zip(variables, values, strict=True)
        return [arrays.get(id(variable), value) for variable, value in pairs]

    def cut(self, variables: Sequence[Any], store: dict[str, Any]) -> dict[str, Any]:
        """Return a store of an optimizer's variables with this rank's rows of slots for tables."""
        slots, cut = self.slots(), {}
        for i, variable in enumerate(variables):
            value = store[str(i)]
            if id(variable) in slots:
                slot, rows = slots[id(variable)]
                value = rows.part_of(value, raw_variable(slot).dtype.as_numpy_dtype)
            cut[str(i)] = value
        return cut
