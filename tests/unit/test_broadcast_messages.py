"""Variables that are broadcast in one message."""

import tensorflow as tf

from tfscale.comm.objects import messages_of


def test_small_variables_of_a_dtype_share_a_message():
    small = [tf.Variable(tf.zeros([10])) for _ in range(3000)]
    whole = tf.Variable(tf.zeros([3], tf.int64))
    assert [len(m) for m in messages_of([*small[:5], whole, *small[5:]])] == [3000, 1]


def test_a_message_ends_before_it_is_too_large():
    large = tf.Variable(tf.zeros([2 << 20]))  # 8 MiB
    half = [tf.Variable(tf.zeros([1 << 19])) for _ in range(3)]  # 2 MiB
    messages = messages_of([half[0], large, *half[1:]])
    assert [[v.shape[0] for v in m] for m in messages] == [[1 << 19], [2 << 20], [1 << 19] * 2]


def test_a_variable_whose_shape_changes_is_sent_alone():
    changing = tf.Variable([1.0], shape=[None])
    empty = tf.Variable(tf.zeros([0]))
    assert [len(m) for m in messages_of([changing, empty])] == [1, 1]
