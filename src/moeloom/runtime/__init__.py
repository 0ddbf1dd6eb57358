"""Host glue: how ranks of an EP group reach each other; memory, arguments and launches of the kernels."""
