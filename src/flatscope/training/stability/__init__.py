"""The edge of stability: update rules with their thresholds, what is recorded against them, where it stands."""
