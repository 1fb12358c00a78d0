"""Many trained networks as a frame, measures correlated with how they generalize, and how both are shown."""
