"""FedOV: its open-set classifiers."""
