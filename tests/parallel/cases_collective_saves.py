"""Saves on all ranks work whatever training was between: epochs, stops, saves that were refused."""

from __future__ import annotations

import dataclasses
from unittest import mock

import keras

import tfscale
from tests.helpers.ranks import outcome, shared_folder
from tests.helpers.spawn import sizes
from tests.parallel.cases_equality import float64
from tests.parallel.sharded_model import Adam, compiled, fit, require_near, sharded, state_of
from tfscale.config import settings


class StopAtEpochEnd(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training |= epoch == 1


def save_and_compare(model, path):
    """Save on all ranks; rank 0 compares the file with what all ranks hold. Collective."""
    model.save(path)
    values = [*(v.numpy() for v in model.variables), *model.optimizer.full_state()]
    if tfscale.rank() == 0:
        require_near(state_of(keras.models.load_model(path)), values, path.name)
    tfscale.barrier()


@sizes(2, timeout_s=120)
def case_all_save_after_one_rank_stopped_between_epochs():
    with float64(), shared_folder() as folder:
        for stopping in range(2):
            model = compiled(sharded(Adam(0.01)))
            fit(model, 0, 1)
            save_and_compare(model, folder / f"before-{stopping}.keras")
            callbacks = [StopAtEpochEnd()] if tfscale.rank() == stopping else []
            fit(model, 0, 3, callbacks, epochs=4)
            save_and_compare(model, folder / f"stopped-{stopping}.keras")
            fit(model, 3, 4)
            save_and_compare(model, folder / f"after-{stopping}.keras")


@sizes(2, timeout_s=120)
def case_a_refused_save_stays_open_through_training():
    """Whole training, and training that one rank stops; then all save."""
    short = dataclasses.replace(settings(), save_timeout_s=0.5)
    with float64(), shared_folder() as folder:
        model = compiled(sharded(Adam(0.01)))
        for number, stops in enumerate((False, True, False)):
            fit(model, 0, 2)
            with mock.patch("tfscale.optimizer.state.settings", lambda: short):
                refused = tfscale.rank() == number % 2
                text = outcome(lambda: model.save(folder / "refused.keras")) if refused else ""
            assert ("Call it on every rank" in text) == refused, text
            tfscale.barrier()
            callbacks = [StopAtEpochEnd()] if stops and tfscale.rank() == 0 else []
            fit(model, 2, 4, callbacks, epochs=3)
            fit(model, 4, 6)
            save_and_compare(model, folder / f"{number}.keras")
