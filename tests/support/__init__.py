"""Real processes for the tests: servers, beats, workers, and the network between them."""
