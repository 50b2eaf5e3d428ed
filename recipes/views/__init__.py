"""Pictures of a model: what its layers are, from the config alone, and where its heads look, from its weights."""
