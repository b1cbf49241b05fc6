"""Exchange planning and simulation in pure Python, without TensorFlow and MPI."""
