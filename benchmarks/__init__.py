"""Speed, memory and the cost of safety, as ratios measured in one run."""
