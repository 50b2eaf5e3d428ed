"""Presets, recipes and launch files: data only."""
