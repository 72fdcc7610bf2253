"""Programs -> trained weights: the only stage with side effects."""
