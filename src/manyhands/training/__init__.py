"""Training for real: what happens around the exact steps, from the first image to the saved model."""
