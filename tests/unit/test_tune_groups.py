"""Choosing the number of groups from distances."""

import dataclasses
import json
import math

import keras
import numpy as np
import pytest

import tfscale
from tests.unit.callback_models import single_job  # noqa: F401
from tfscale.config import ConfigError
from tfscale.measure.groups import (
    GroupProbe,
    advise,
    draw_distances,
    loss_ratio,
    write_report,
)
from tfscale.tune.scripts import (
    FILES_AND_STOPS,
    RATES_AND_SIZES,
    Done,
    GroupsProbe,
    arguments_of,
    enlarge,
    regroup,
)


def probes(*distances):
    """Return probes of 2, 4, 8 ... groups whose settled distances are given."""
    steps = (1.0,) * 24
    return [
        GroupProbe(2 ** (i + 1), 8, 0.1, (0.1 * d, d, d), steps) for i, d in enumerate(distances)
    ]


def test_doubling_is_accepted_while_the_distance_doubles():
    distances = [(1.0, 1.6), (1.0, 1.8, 2.5), (1.0, 2.0, 4.0)]
    # Read off [L]'s curves for CIFAR-10: 0.8 to 0.9, 1.9 to 2.0, 3 to 3.4; published choice: 4.
    distances.append((0.85, 1.95, 3.2))
    assert [advise(probes(*found)).groups for found in distances] == [2, 4, 8, 4]
    assert GroupProbe(2, 8, 0.1, (0.1, 0.2, 1.0, 1.2), (0.0,)).distance == 1.1  # of settled epochs


def test_more_groups_must_learn_nearly_as_much_of_as_many_samples():
    """The loss of one group falls from 4 to 1 in 40 steps; others take more samples for it."""

    def probe(groups, slower):
        losses = tuple(4.0 - 3.0 * min(1.0, i * groups / 40 / slower) for i in range(40))
        return GroupProbe(groups, 8, 0.1, (float(groups),) * 5 if groups > 1 else (), losses)

    measured = [probe(1, 1.0), probe(2, 1.0), probe(4, 1.05), probe(8, 1.5)]
    assert [round(loss_ratio(p, measured[0]), 1) for p in measured] == [1.0, 1.0, 1.2, 1.8]
    assert measured[0].distance == 0.0 and advise(measured).groups == 4
    assert "with 8 groups is 1.8" in advise(measured).reason
    assert advise([measured[0], probe(2, 2.0)]).groups == 1


def test_a_training_that_diverges_is_not_recommended(tmp_path):
    for distance, loss in ((math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan)):
        broken = dataclasses.replace(probes(1.0, distance)[1], losses=(loss,))
        measured = [probes(1.0)[0], broken]
        advice = advise(measured)
        assert advice.groups == 2
        assert "with 4 groups training diverges at a learning rate of 0.1" in advice.reason
        assert advise([dataclasses.replace(broken, groups=2)]).groups == 1
        write_report(measured, tmp_path)
        assert "NaN" not in (tmp_path / "groups.json").read_text()
    for later in (None, 2.0):  # NaN is null in the record of `ModelDistance`
        rows = [
            {"step": i, "distance": distance, "layers": {"dense": distance, "frozen": 0.0}}
            for i, distance in enumerate((1.0, None, later))
        ]
        draw_distances(rows, tmp_path / f"{later}.png")
        assert (tmp_path / f"{later}.png").exists()


def test_a_probe_writes_no_files_and_is_not_ended_by_callbacks(tmp_path, caplog):
    rate = tfscale.callbacks.LearningRateWarmupCallback(0.1)
    files = [
        keras.callbacks.BackupAndRestore(tmp_path),
        tfscale.callbacks.BackupAndRestore(tmp_path),
        tfscale.callbacks.Checkpoint(tmp_path),
        tfscale.callbacks.BestModelCheckpoint("loss", filepath=tmp_path / "m.keras"),
        tfscale.callbacks.RankZero(keras.callbacks.EarlyStopping()),
        tfscale.callbacks.RankZero(keras.callbacks.CSVLogger(tmp_path / "train.csv")),
        keras.callbacks.TensorBoard(tmp_path),
        keras.callbacks.RemoteMonitor(),
        tfscale.callbacks.CommunicationReport(tmp_path),
        tfscale.callbacks.ModelDistance(tmp_path),
    ]
    kept = [tfscale.callbacks.MetricAverageCallback(), keras.callbacks.History()]
    options = {"callbacks": [rate, *files, kept]}
    for left_out, rates in ((FILES_AND_STOPS, [rate]), (FILES_AND_STOPS + RATES_AND_SIZES, [])):
        given = arguments_of(keras.Model.fit, (object(), [1]), options, left_out)
        assert given["callbacks"] == rates + kept and given["x"] == [1]
    assert "without the script's BackupAndRestore, BestModelCheckpoint, Checkpoint" in caplog.text


def test_a_probe_with_growing_batches_keeps_their_record(tmp_path):
    """It trains as the script does, and leaves the lines of the user's last run."""
    record = tmp_path / "adaptive.jsonl"
    record.write_text('{"epoch": 0}\n')
    x = np.linspace(-1, 1, 48, dtype="float32").reshape(16, 3)
    data = tfscale.data.GlobalBatches(x, x[:, :2], batch_size=4)
    adaptive = tfscale.callbacks.AdaptiveBatchSize(data, 8, log_path=record, decay_epochs=(1,))
    model = compiled(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    options = {"epochs": 2, "verbose": 0, "callbacks": [adaptive]}
    given = arguments_of(keras.Model.fit, (model, data), options, FILES_AND_STOPS)
    rates = model.fit(**{key: value for key, value in given.items() if key != "self"})
    assert rates.history["learning_rate"] == pytest.approx([0.1, 0.01])
    assert record.read_text() == '{"epoch": 0}\n'


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_a_probe_counts_steps_and_not_executions(steps_per_execution, tmp_path):
    settings = {"groups": 1, "interval": 2, "steps": 8, "output": str(tmp_path / "found.json")}
    model = compiled(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    model.compile(model.optimizer, "mse", steps_per_execution=steps_per_execution)
    x = np.ones((16, 3), "float32")  # two epochs of four steps
    probe = GroupsProbe(settings, tfscale.callbacks.ModelDistance())
    with pytest.raises(Done):
        model.fit(x, x[:, :2], batch_size=4, epochs=9, verbose=0, callbacks=[probe])
    assert int(model.optimizer.iterations) == 8
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["interval"] == 2 and len(found["losses"]) == 8
    # Two epochs of four steps, in blocks of one execution.
    plain = compiled(keras.optimizers.SGD(0.1))
    means = [plain.train_on_batch(x[:4], x[:4, :2]) for _ in range(8)]
    blocks = np.reshape(means, (-1, steps_per_execution)).mean(1).repeat(steps_per_execution)
    np.testing.assert_allclose(found["losses"], blocks, rtol=1e-5)


def test_each_group_gets_the_batches_of_the_script():
    data = tfscale.data.GlobalBatches(np.zeros((64, 2)), batch_size=8)
    enlarge(data, 4)
    enlarge(np.zeros((64, 2)), 4)  # Keras's own batches are a rank's already
    assert data.batch_size == 32


# The exchange of a script's optimizer is replaced, and nothing else of it


def compiled(optimizer):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer, "mse")
    return model


def regrouped(rule, learning_rate=None, **options):
    """Return a model whose optimizer trains four groups, at twice the rate."""
    model = compiled(tfscale.DistributedOptimizer(rule, **options))
    settings = {"groups": 4, "interval": 3, "rate_rule": "sqrt", "learning_rate": learning_rate}
    regroup(model, settings)
    assert type(model.optimizer) is tfscale.DistributedOptimizer
    assert vars(model.optimizer.strategy).items() >= {"groups": 4, "interval": 3}.items()
    return model


def trained(model, scale=1.0):
    x = np.linspace(-scale, scale, 24, dtype="float32").reshape(8, 3)
    model.fit(x, x[:, :2], batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.3, 2, 0.5)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_rates_are_the_present_one_or_what_is_asked_for(is_scaled):
    for rate, changed, asked in ((0.3, 0.1, None), (0.3, 0.3, 0.1), (SCHEDULE, None, 0.1)):
        rule = keras.optimizers.SGD(rate, momentum=0.5)
        if changed:
            rule.learning_rate = changed
        model = regrouped(keras.optimizers.LossScaleOptimizer(rule) if is_scaled else rule, asked)
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) == is_scaled
        plain = compiled(keras.optimizers.SGD(0.2, momentum=0.5))
        for own, expected in zip(trained(model), trained(plain), strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-7)


def test_variables_excluded_from_weight_decay_stay_excluded():
    rule = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    rule.exclude_from_weight_decay(var_names=["kernel"])
    model = regrouped(rule)
    before = model.get_weights()
    model.layers[-1].bias.assign([1.0, 2.0])
    kernel, bias = trained(model, scale=0.0)
    np.testing.assert_array_equal(kernel, before[0])  # its gradient is 0
    assert np.all(bias < [0.9, 1.9])


def test_other_optimizers_are_refused_and_the_reduction_stays():
    model = regrouped(keras.optimizers.SGD(0.1), op=tfscale.Sum)
    assert model.optimizer.bound.executor.options.op == tfscale.Sum
    with pytest.raises(ConfigError, match="ExponentialDecay. Pass --learning-rate"):
        regrouped(keras.optimizers.SGD(SCHEDULE))
    with pytest.raises(ConfigError, match="SGD. Wrap the optimizer"):
        regroup(compiled(keras.optimizers.SGD(0.1)), {"groups": 2})
