"""Build kernels for GPUs that are not here, and check what came out. No part of it needs a GPU.

``targets`` says which kernels there are, ``build`` compiles one in a process of its own Triton version, ``ptx`` and
``order`` read what the compiler wrote and check the order of stores, barriers and releases, ``inspection`` reads
registers and instructions, ``runner`` starts the processes, ``report`` shows the results.
"""
