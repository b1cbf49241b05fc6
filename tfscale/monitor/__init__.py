"""Numbers of a running training for Prometheus and Kubeflow: without TensorFlow and MPI."""
