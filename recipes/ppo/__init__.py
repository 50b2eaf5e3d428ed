"""Objective `ppo`: proximal policy optimisation of a language model on the rewards of its own completions."""

from .rewards import Reward, RewardModel
from .trainer import PPOTrainer

__all__ = ["PPOTrainer", "Reward", "RewardModel"]
