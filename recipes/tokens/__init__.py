"""From rows to the tokens and labels that a model is trained on, and batches of them."""
