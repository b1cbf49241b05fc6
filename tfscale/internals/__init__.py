"""Private names of Keras and TensorFlow, patches of their objects, and reads of the stack."""
