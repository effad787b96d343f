"""ONNX models, converted once to functions that JAX exports."""
