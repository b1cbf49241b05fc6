"""Predict the next character of a text with a small transformer, on one process or many.

    python recipes/characters.py
    tfscale run -np 2 python recipes/characters.py --compression int8

The text is Python's own help on its language, `pydoc_data.topics`, so no data set is needed: 465
thousand characters in Python 3.11. The last tenth is for validation; `accuracy` is the share of
characters that were predicted from those before them in sequences of 64.

`runs/<name>/` then holds model.keras, metrics.jsonl, learning_curve.png and run.json.
"""

from pydoc_data import topics

import keras
import numpy as np
from absl import app, flags

import command_line
import tfscale
import tfscale.keras as hvd
import training
from models.transformer import transformer

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(training)
flags.DEFINE_integer("sequences", 0, "Of the training text; 0 means all.", lower_bound=0)
flags.DEFINE_integer("width", 64, "Values per position, a multiple of 4.", lower_bound=4)
training.set_defaults(epochs=6, batch_size=64, learning_rate=3e-3)

BATCH, LENGTH, TOKENS = 64, 64, 128  # all of ASCII
SMOKE = {"sequences": 1280, "epochs": 5}


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """Return training and validation text: codes of shape (sequences, LENGTH + 1)."""
    text = "".join(topics.topics[name] for name in sorted(topics.topics))
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype("int32")
    # The last character of a sequence is the first of the next one.
    starts = np.arange(0, len(codes) - LENGTH, LENGTH)
    sequences = codes[starts[:, None] + np.arange(LENGTH + 1)]
    n = len(sequences) * 9 // 10
    return sequences[:n][: FLAGS.sequences or None], sequences[n:]


def early_stopping() -> keras.callbacks.Callback:
    """Stop training after --patience epochs without a lower validation loss."""
    return keras.callbacks.EarlyStopping("val_loss", patience=FLAGS.patience)


def main(_: list[str]) -> None:
    """Train, and leave the results in the run's folder."""
    is_first = training.start()
    text, held_out = load_text()
    size = {"batch_size": FLAGS.batch_size, "seed": FLAGS.seed}
    train = tfscale.data.GlobalBatches(text[:, :-1], text[:, 1:], **size)
    valid = tfscale.data.GlobalBatches(
        *(held_out[:, :-1], held_out[:, 1:]),
        batch_size=64 * hvd.size(),
        shuffle=False,
    )
    model = training.with_float_outputs(transformer(TOKENS, LENGTH, width=FLAGS.width))
    rate = training.learning_rate(BATCH, len(train))
    model.compile(
        optimizer=training.distributed(keras.optimizers.Adam(rate)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    metrics = training.fit(model, train, valid, BATCH, stop=early_stopping)
    training.save(model)
    if is_first:
        accuracy = metrics["val_accuracy"]
        print(f"Accuracy: {100 * accuracy:.2f} %. Results are in {training.run_folder()}.")


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.flags_parser(SMOKE))
