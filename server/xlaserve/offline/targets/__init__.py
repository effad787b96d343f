"""Compilation of models for devices that this machine does not have.

README.md in this directory explains how it works and how to add a target.
"""
