"""How ranks are started, found, watched and started again: everything around the program.

Nothing here imports TensorFlow: a rank's guardian and `tfscale run` are small processes.
"""
