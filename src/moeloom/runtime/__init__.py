"""Host glue: how ranks of an EP group reach each other."""
