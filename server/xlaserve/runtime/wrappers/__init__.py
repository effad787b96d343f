"""Models that wrap other models: sequences, ragged batches, optional inputs, warm-up."""
