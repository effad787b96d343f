"""Devices that a model can be compiled for on a machine that has none of them.

README.md beside this file says how, and how to add one.
"""
