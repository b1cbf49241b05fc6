"""The native libraries: found, compiled and cached; MPI's library and files; cores of the host."""
