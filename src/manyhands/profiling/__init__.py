"""Measures this device and the links to others, and fits what a planner can ask."""
