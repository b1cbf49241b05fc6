"""The native library and its host: found, compiled and cached; cores, and files that MPI leaves."""
