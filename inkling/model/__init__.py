"""Layers, weights and caches. Knows no requests."""
