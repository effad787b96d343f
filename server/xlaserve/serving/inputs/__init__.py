"""Special inputs and outputs: images, shared memory, classifications."""
