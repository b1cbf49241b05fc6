"""Models of the papers as plain Keras 3 functional models; nothing here knows of tfscale."""
