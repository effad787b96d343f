"""One engine process with the devices, and front-end processes with the clients."""
