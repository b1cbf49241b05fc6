"""`transparent/differences.py`: rounding is no difference, a wrong formula is, with its cause."""

import numpy as np
import pytest
import tensorflow as tf

from tfscale.transparent import verify
from tfscale.transparent.differences import Value, explain, find_differences

EPSILON = 2.0**-23
RNG = np.random.default_rng(0)
GRADIENT = RNG.normal(size=(3, 4)).astype(np.float32)


def values(kind, array, name="x", change=None):
    array = np.asarray(array)
    return {(kind, name): Value(kind, name, array, array if change is None else change)}


def texts(alone, combined, epsilon=EPSILON):
    return [difference.text for difference in find_differences(alone, combined, epsilon)]


@pytest.mark.parametrize(
    ("kind", "alone", "combined"),
    [
        ("gradient", GRADIENT, GRADIENT * (1 + 1e-5)),
        ("gradient", np.full(3, np.nan), np.full(3, np.nan)),
        ("gradient", np.array([np.inf, 1.0]), np.array([np.nan, 1.0])),
        ("gradient", np.zeros(0), np.zeros(0)),
        ("output", np.arange(4), np.arange(4)),
        ("loss or metric", np.float32(0.123456), np.float32(0.1234561)),
    ],
)
def test_rounding_is_no_difference(kind, alone, combined):
    assert texts(values(kind, alone), values(kind, combined)) == []


@pytest.mark.parametrize(
    ("kind", "alone", "combined", "text"),
    [
        ("gradient", GRADIENT, GRADIENT / 2, "gradient 'x' is 0.5 times that of one process"),
        ("gradient", GRADIENT, GRADIENT[:2], "shape (2, 4) instead of (3, 4)"),
        ("gradient", GRADIENT, GRADIENT + np.eye(3, 4), "of its largest value"),
        ("gradient", np.array([1.0, np.nan]), np.array([1.0, 2.0]), "of its largest value"),
        ("variable", np.int32(4), np.int32(5), "variable 'x' is 5 instead of 4"),
        ("loss or metric", np.float64(1.0), np.float64(1.001), "is 1.001 instead of 1"),
    ],
)
def test_other_values_are_named(kind, alone, combined, text):
    (found,) = texts(values(kind, alone), values(kind, combined))
    assert text in found


def test_a_gradient_that_cancels_out_is_compared_with_the_largest():
    noise = values("gradient", np.full(3, 1e-9), "bias"), values("gradient", np.zeros(3), "bias")
    assert texts(noise[0], noise[1])
    assert not texts(
        {**values("gradient", GRADIENT), **noise[0]}, {**values("gradient", GRADIENT), **noise[1]}
    )


def test_what_rounding_errors_of_weights_change_as_much_is_no_difference():
    """As a gradient before a ReLU, where a value next to 0 has one sign or the other."""
    alone, combined = values("gradient", GRADIENT), values("gradient", GRADIENT + 0.02)
    nudged = [values("gradient", GRADIENT + jump) for jump in (0.0, 0.01)]
    assert texts(alone, combined)
    assert not find_differences(alone, combined, EPSILON, nudged)
    assert find_differences(alone, values("gradient", GRADIENT + 0.05), EPSILON, nudged)


def test_a_variable_is_compared_by_what_the_step_changes():
    before = np.full(3, 100.0)
    changes = np.full(3, 1e-2), np.full(3, 2e-2)
    pair = [values("variable", before + change, change=change) for change in changes]
    assert texts(*pair, epsilon=2.0**-52) == ["variable 'x' is 2 times that of one process"]
    assert texts(pair[0], {}) and not texts(values("variable", before, change=0 * before), {})


@pytest.mark.parametrize(
    ("kind", "combined", "cause"),
    [
        ("output", GRADIENT + 1, "(1) a layer or loss that combines the rows"),
        ("gradient", GRADIENT / 4, "(1) a sum over the batch"),
        ("gradient", GRADIENT**2, "(1) a layer or loss that combines the rows"),
        ("loss or metric", GRADIENT + 1, "(1) a metric whose state is no sum"),
    ],
)
def test_the_likeliest_cause_comes_first(kind, combined, cause):
    differences = find_differences(values(kind, GRADIENT), values(kind, combined), EPSILON)
    text = explain("fit", 4, differences)
    assert cause in text and "on 4 ranks differs from a step of one process" in text


def test_long_lists_are_cut():
    alone = {k: v for i in range(9) for k, v in values("gradient", GRADIENT, f"w{i}").items()}
    combined = {
        k: v for i in range(9) for k, v in values("gradient", GRADIENT + 1, f"w{i}").items()
    }
    assert "; and 3 more" in explain("fit", 2, find_differences(alone, combined, EPSILON))


def test_trials_run_without_the_graph_optimizer_and_give_back_its_setting():
    """Its time grows with the square of the number of variables; a trial runs a few times only."""
    name = "disable_meta_optimizer"
    options = tf.config.optimizer.get_experimental_options
    for before in (False, True):
        tf.config.optimizer.set_experimental_options({name: before})
        with pytest.raises(RuntimeError), verify._unoptimized():
            assert options()[name]
            raise RuntimeError
        assert options()[name] == before
    tf.config.optimizer.set_experimental_options({name: False})
