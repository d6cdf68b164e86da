"""Use the result of a run: models as modules, predictions, exported files, and a model card."""
