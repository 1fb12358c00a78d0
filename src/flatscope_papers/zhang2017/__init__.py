"""Zhang et al. (2017), Theory of Deep Learning III."""
