"""Training of unchanged Keras scripts on all ranks: `tfscale.distribute`."""
