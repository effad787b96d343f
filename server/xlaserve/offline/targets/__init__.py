"""Devices that models are compiled for on machines without them.

README.md beside this file says how, and how to add one.
"""
