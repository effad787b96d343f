"""Checks that need a device: answers, memory, copies that overlap, and what it does under load."""
