"""Training of a small byte-level mixture-of-experts language model on real text."""
