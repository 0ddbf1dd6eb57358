"""Triton's own host path on a machine without a GPU: a fake driver library that keeps what it is asked to launch."""
