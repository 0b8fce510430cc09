"""Gradients in, updates out: averaging over ranks, the tape, distributed Keras optimizers, updates of rows."""
