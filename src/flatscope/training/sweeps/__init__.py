"""Many trials, each trained and measured once: a store of results, and engines that fill it and survive kills."""
