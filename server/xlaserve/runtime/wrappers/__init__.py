"""Models around models: sequences, ragged batches, optional inputs, warm-up."""
