"""Any Transformer from one Hugging Face config."""
