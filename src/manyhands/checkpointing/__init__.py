"""Fit the training of a model on one device into the bytes there are."""
