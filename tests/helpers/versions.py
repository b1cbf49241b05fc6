"""What the Keras that is installed lacks."""

import keras

_KERAS = tuple(int(part) for part in keras.__version__.split(".")[:2])
# Until then Keras's own Muon fails on TensorFlow: it asks TensorFlow's variables for `path`.
HAS_MUON = _KERAS >= (3, 13)
