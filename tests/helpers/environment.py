"""Environment variables of every test process: quiet TensorFlow, no accelerator, few threads.

A rank waits longer for others that save than by default: ranks may trace for longer on a machine
that is busy. Tests of the limit set it.
"""

QUIET = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "KERAS_BACKEND": "tensorflow",
    "PYTHONFAULTHANDLER": "1",
    "TFSCALE_SAVE_TIMEOUT_S": "60",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
}
