"""Servers in processes of their own, asked by real clients."""
