"""Objective `ppo`: proximal policy optimisation of a language model on the rewards of its own completions."""

from .trainer import PPOTrainer

__all__ = ["PPOTrainer"]
