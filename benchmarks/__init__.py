"""Benchmark results as data, and the tables made from them."""
