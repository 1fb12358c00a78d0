"""Neyshabur et al. (2017), Exploring Generalization in Deep Learning."""
