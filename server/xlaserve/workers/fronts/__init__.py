"""One engine process, which has the devices, and front ends, which have the clients."""
