"""From a YAML file to a trained model and its report."""
