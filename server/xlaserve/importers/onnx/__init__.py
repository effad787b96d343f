"""Converts ONNX models to functions that JAX can export."""
