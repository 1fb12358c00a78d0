"""Data, labels, models and plain training: what the networks to be measured come from."""
