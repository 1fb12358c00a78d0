"""What every command needs: data sets, weights in files, networks of hubs, functions found by name."""
