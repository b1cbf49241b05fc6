"""Tests of the benchmarks: of numbers and reports, not of speed."""
