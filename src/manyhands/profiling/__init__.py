"""Measures this device and the links to others."""
