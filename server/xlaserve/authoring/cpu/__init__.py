"""Forms of operations that the CPU computes sooner."""
