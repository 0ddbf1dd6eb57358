"""Benchmarks: one way to measure every backend and every rival, and pictures drawn from the files it writes."""
