"""The nouns: frozen values that every stage shares. Standard library only."""
