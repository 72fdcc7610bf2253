"""nn.Module -> Graph: what to compute, found without computing it."""
