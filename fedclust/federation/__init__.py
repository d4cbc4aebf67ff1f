"""How server and clients meet: messages, client modules, backends, algorithms and the loop of rounds."""
