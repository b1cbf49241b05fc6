"""Benchmarks: systems in turn, each in processes of its own, with proof of what the links moved.

`python -m benchmarks step` measures and writes JSON, `python -m benchmarks.report`
makes tables and pictures of it, `tools/compare.py` compares two files.
"""
