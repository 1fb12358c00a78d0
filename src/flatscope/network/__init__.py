"""What a network is made of: its layers and units, what ties units together, what cannot be rescaled and why."""
