"""Averages that training does not wait for: equal to single processes, float64, 1e-10."""

import contextlib
import random
import time
from unittest import mock

import keras
import numpy as np

import tfscale
from tests.helpers.cases import engine_only, sizes
from tests.helpers.ranks import float64, shared_folder, values_of
from tests.parallel.backup_runs import interrupt_and_go_on
from tests.parallel.checkpoint_runs import Run, forget_after
from tests.parallel.local_fit_model import StopAt, ends_at
from tests.parallel.local_sgd_reference import (
    ALLREDUCE,
    BATCH,
    STEPS,
    bf16_mean,
    check,
    samples,
    train,
)
from tfscale.callbacks import BroadcastGlobalVariablesCallback, Checkpoint, ModelDistance
from tfscale.files import read_json_lines
from tfscale.testing import require_identical

OUTER = keras.optimizers.SGD(0.7, momentum=0.9)
BF16 = {"compression": tfscale.Compression.bf16}
HALVES = {"interval": 4, "fragments": 2, "overlap": 2}
SHRINKING = tfscale.AdaptiveInterval(initial=8, minimum=2)
GROWING = tfscale.GrowingInterval(initial=3, growth=0.5, maximum=6)


def decaying():
    """The rate falls with the second epoch: groups that wait for it part after that step."""
    return keras.optimizers.SGD(
        keras.optimizers.schedules.PiecewiseConstantDecay([STEPS], [0.05, 0.01]), momentum=0.9
    )


def bad_samples():
    """The last group's part of the third batch of each epoch is not finite."""
    x, y = samples()
    x[3 * BATCH - 1] = np.nan
    return x, y


TABLE = (
    # Options of LocalSGD, the optimizer, epochs, and what else `check` is given.
    ({"interval": 3, "overlap": 2}, "momentum", 2, {}),
    ({"interval": 4, "fragments": 2, "overlap": 1, **ALLREDUCE}, "adam", 2, {}),
    ({"interval": 4, "fragments": 3, "overlap": 3}, "momentum", 2, {}),
    ({"interval": 2, "fragments": 2}, "momentum", 2, {}),
    ({"interval": 3, "overlap": 1, "merge": 0.25, **ALLREDUCE}, "sgd", 2, {}),
    ({**HALVES, "outer": OUTER}, "sgd", 2, {}),
    # Intervals that change, groups that form later, cycles, skipped steps, changes in 16 bits.
    ({"interval": SHRINKING, "fragments": 2, "overlap": 1}, "momentum", 4, {}),
    ({"interval": GROWING, "fragments": 2, "overlap": 2}, "momentum", 3, {}),
    ({**HALVES, "start": 1}, "momentum", 3, {}),
    ({**HALVES, "start": "after_first_decay"}, decaying, 3, {}),
    (
        *(HALVES, "momentum", 4),
        {"passes": 2, "backward_passes_per_step": 2, "average_aggregated_gradients": True},
    ),
    (HALVES, "momentum", 2, {"data": bad_samples(), "nonfinite": "skip"}),
    (HALVES, "momentum", 2, {"mean": bf16_mean, **BF16}),
)


@sizes(2, 3, 4, timeout_s=400)
def case_averages_on_their_way_equal_single_processes():
    with float64():
        for options, rule, epochs, more in TABLE:
            # Within groups of several ranks gradients would have 16 bits, too.
            groups = 2 if tfscale.size() == 4 and "mean" not in more else tfscale.size()
            by_hand = check(options, rule, epochs, groups=groups, **more)
            assert options["interval"] is not SHRINKING or by_hand.interval < 4
            assert options["interval"] is not GROWING or by_hand.interval == 6


@engine_only("ranks ask each other before each step, and stop at once")
@sizes(2, 4, timeout_s=200)
def case_a_stop_in_an_interval_is_sent_with_the_next_average():
    """Sent after steps 4 and 8, merged after 6 and 10; an average on its way is dropped."""
    with float64():
        ends_at(4, 8, StopAt(5), overlap=2)  # known with the merge after step 6, read after 8
        ends_at(4, STEPS, StopAt(6), overlap=2)  # no longer than the epoch


class EqualAfterAverages(keras.callbacks.Callback):
    """Compares ranks after each step: those of a group, and what was averaged, of all groups."""

    def __init__(self):
        super().__init__()
        self.n_averages, self._left = 0, []

    def on_train_batch_end(self, batch, logs=None):
        average = self.model.optimizer.bound.average
        now, own = values_of(self.model.trainable_variables), self._averaged(average)
        every = tfscale.allgather_object((now, own))
        for rank in next(g for g in self.model.optimizer.bound.groups.ranks if tfscale.rank() in g):
            require_identical(every[rank][0], now)
        for rank in average.across.ranks:
            require_identical(every[rank][1], own)
        self.n_averages += bool(own)

    def _averaged(self, average):
        """Return the values that this step must have made equal in all groups."""
        since = int(average.since.numpy())
        if not hasattr(average, "fragments"):
            return values_of(average.targets) if since == 0 else []
        before, self._left = self._left, [int(f.left.numpy()) for f in average.fragments]
        n, interval, found = len(average.fragments), int(average.interval.numpy()), []
        for i, fragment in enumerate(average.fragments):
            if int(average.overlap.numpy()) == 0:
                is_merged = since == i * interval // n
            else:
                is_merged = bool(before) and before[i] == 1
            if is_merged:
                for message in fragment.messages:
                    found += values_of([*message.common, message.means])
                    if self.gives_all:
                        found += values_of([average.targets[place] for place in message.places])
        return found


@sizes(2, 4, timeout_s=200)
def case_what_is_equal_after_every_average():
    """Bit by bit: a group's parameters, what has arrived, the common ones that it moves.

    All groups have the same parameters where none were trained meanwhile, or they are replaced.
    """
    parts = {"interval": 4, "fragments": 2}
    for options, more in (
        ({"interval": 3}, {}),
        ({"interval": 3, **ALLREDUCE}, {}),
        (parts, {}),
        ({**parts, "overlap": 3, "merge": 0.0, **ALLREDUCE}, {}),
        ({**parts, "overlap": 2, "outer": OUTER}, {}),
        ({**parts, "overlap": 1, **ALLREDUCE}, BF16),
    ):
        equal = EqualAfterAverages()
        equal.gives_all = not options.get("overlap") or options.get("merge") == 0.0
        train("momentum", tfscale.LocalSGD(2, **options), 2, [equal], **more)
        assert equal.n_averages >= 2 * STEPS // 4 - 1, options


class Delays(keras.callbacks.Callback):
    """One rank begins its steps late, by other times in each run."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def on_train_batch_begin(self, batch, logs=None):
        if tfscale.rank() == self.rank:
            time.sleep(random.SystemRandom().uniform(0.0, 0.03))


@sizes(2, 4, timeout_s=200)
def case_a_rank_that_is_late_changes_no_bit():
    """Parameters, what is on its way, and distances."""
    n = tfscale.size()
    for options, more in (
        ({"fragments": 2, "overlap": 1, "outer": OUTER}, {}),
        ({"overlap": 3}, BF16),
    ):
        results = []
        for late in (0, n - 1, n - 1):
            record, strategy = ModelDistance(), tfscale.LocalSGD(2, 4, **options)
            model = train("adam", strategy, 2, [Delays(late), record], **more)
            average = model.optimizer.bound.average
            own = values_of([*model.trainable_variables, *average.variables])
            results.append([*own, np.array(record.distances)])
        for result in results[1:]:
            require_identical(result, results[0])


@sizes(2, timeout_s=200)
def case_what_is_on_its_way_survives_an_interruption():
    """Five steps in an epoch: the third epoch begins with averages on their way."""
    options = {"interval": 4, "fragments": 2, "overlap": 3}
    interrupt_and_go_on(lambda: tfscale.LocalSGD(2, **options, **ALLREDUCE))
    interrupt_and_go_on(lambda: tfscale.LocalSGD(2, **options), **BF16)


@sizes(2, timeout_s=200)
def case_a_longer_run_begins_with_the_average_of_an_ended_one():
    """Averages that were on their way at the end are dropped, as before a second `fit`."""
    options = {"interval": 4, "fragments": 2, "overlap": 3}
    x, y = samples()

    def fit_until(*ends, folder=None):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(y.shape[-1])])
        strategy = tfscale.LocalSGD(2, **options, **ALLREDUCE)
        model.compile(
            tfscale.DistributedOptimizer(keras.optimizers.SGD(0.05), exchange=strategy), "mse"
        )
        data = tfscale.data.GlobalBatches(x, y, batch_size=BATCH * 2, seed=4)
        own = [Checkpoint(folder)] if folder else []
        for begin, end in zip((0, *ends), ends, strict=False):
            callbacks = [*own, BroadcastGlobalVariablesCallback(0)]
            model.fit(data, initial_epoch=begin, epochs=end, verbose=0, callbacks=callbacks)
        return values_of([*model.variables, *model.optimizer.bound.average.variables])

    with float64(), shared_folder() as folder:
        fit_until(2, folder=folder / "saved")
        require_identical(fit_until(4, folder=folder / "saved"), fit_until(2, 4))


@sizes(2, timeout_s=100)
def case_an_overlap_is_measured_once_and_is_the_same_on_all_ranks():
    """Small averages take less than a step.

    In one execution of several steps three averages are over before any step was timed.
    """
    for at_once in (1, STEPS):
        strategy = tfscale.LocalSGD(2, 5 if at_once == 1 else 2, "allreduce", overlap="auto")
        average = train("sgd", strategy, epochs=4, at_once=at_once).optimizer.bound.average
        own = float(average.steps_per_average.numpy()), int(average.overlap.numpy())
        chosen = tfscale.allgather_object(own)
        assert chosen[0] == chosen[1] and chosen[0][0] > 0 and 1 <= chosen[0][1] <= 4, chosen


def averages_take(n_steps):
    """Let averages seem to take so many steps on the last rank, and fewer on the others."""
    own = n_steps * (tfscale.rank() + 1) / tfscale.size()
    choice = "tfscale.callbacks.local_models._OverlapChoice"
    return mock.patch(f"{choice}.steps_per_average", lambda self, n: own)


class Overlaps(keras.callbacks.Callback):
    """Notes the overlap after each step; sets it after a step if that is given."""

    def __init__(self, step=0, n_steps=0):
        super().__init__()
        self.found, self._change = [], (step, n_steps)

    def on_train_batch_end(self, batch, logs=None):
        overlap = self.model.optimizer.bound.average.overlap
        if len(self.found) + 1 == self._change[0]:
            overlap.assign(self._change[1])
        self.found.append(int(overlap.numpy()))


AUTO = {"interval": 3, "fragments": 3, "overlap": "auto", **ALLREDUCE}


@sizes(2, timeout_s=200)
def case_a_measured_overlap_is_recorded_and_survives_a_restart():
    """15 steps: the distances of three averages are known after step 11."""
    run, fixed = (Run(exchange=tfscale.LocalSGD(2, **{**AUTO, "overlap": n})) for n in ("auto", 2))
    with float64(), shared_folder() as folder, contextlib.ExitStack() as stack:
        stack.enter_context(averages_take(0.5))
        record, seen = ModelDistance(folder / "record"), Overlaps()
        whole, _ = run.train(folder / "saved", record, seen, every_n_steps=1, keep=99)
        tfscale.barrier()
        lines = read_json_lines(folder / "record" / "distance.jsonl")
        found = [(line["step"], line["overlap"], line["steps_per_average"]) for line in lines]
        assert found == [(5, 2, None), (8, 2, None), (11, 1, 0.5), (14, 1, 0.5)], found
        assert seen.found == [2] * 10 + [1] * 5
        # The same run without measuring: the number is used from that step on.
        repeated, _ = fixed.train(None, Overlaps(11, 1))
        require_identical(repeated, whole)
        for step, expected in ((12, [1] * 3), (7, [2] * 6 + [1] * 2)):
            forget_after(folder / "saved", step)
            # Later it would be another number; before, it is measured again after three averages.
            stack.enter_context(averages_take(2.0 if step == 12 else 0.5))
            seen = Overlaps()
            rest, _ = run.train(folder / "saved", ModelDistance(), seen, keep=99)
            assert seen.found == expected, (step, seen.found)
            if step == 12:
                require_identical(rest, whole)
        # The number of the program counts, not that of the checkpoint.
        forget_after(folder / "saved", 7)
        seen = Overlaps()
        given = Run(exchange=tfscale.LocalSGD(2, **{**AUTO, "overlap": 1}))
        given.train(folder / "saved", ModelDistance(), seen, keep=99)
        assert seen.found == [1] * 8, seen.found
