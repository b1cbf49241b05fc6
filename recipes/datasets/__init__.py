"""Data sets of the papers as numpy arrays, ready for `tfscale.data.GlobalBatches`."""
