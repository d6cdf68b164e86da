"""What comes after a run: its models as modules, predictions, exported files, a model card, and trackers."""
