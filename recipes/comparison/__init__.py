"""Runs side by side: what differs in their recipes, and what came of it."""
