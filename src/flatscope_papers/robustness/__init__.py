"""A study of our own: which measures keep their order of networks when measured on other samples or weights."""
