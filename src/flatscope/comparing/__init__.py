"""Several trained networks side by side: which is flatter, and which measures can tell."""
