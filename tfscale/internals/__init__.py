"""Private parts of Keras and TensorFlow that tfscale reads or replaces, each in one place."""
