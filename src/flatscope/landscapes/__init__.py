"""Landscapes: loss and error on lines and planes through a network, in weight space and in path space."""
