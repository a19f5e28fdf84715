"""A stand-in; a regular package, so that it is found before the real one wherever that is."""
