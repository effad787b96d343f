"""Triton's interface for Python models: `triton_python_backend_utils` and TritonPythonModel.

Names and semantics are Triton's (README of triton-inference-server/python_backend).
"""
