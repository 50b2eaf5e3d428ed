"""The architecture: config, modules and models, as they travel to the Hub with the weights."""
