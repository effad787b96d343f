"""Checks of a device that is new to the project: all figures for an issue report, in minutes."""
