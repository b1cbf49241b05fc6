"""What is sent when: pure Python, no TensorFlow, no MPI."""
