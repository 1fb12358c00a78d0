"""Yi et al. (2019), Positively Scale-Invariant Flatness of ReLU Networks."""
