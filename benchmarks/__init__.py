"""Speed and memory against peers, measured in one run and reported as ratios: `make bench`."""
