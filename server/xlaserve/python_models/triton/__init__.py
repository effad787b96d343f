"""Triton's interface for Python models: `triton_python_backend_utils` and TritonPythonModel.

The names and what they mean are Triton's (triton-inference-server/python_backend, README).
"""
