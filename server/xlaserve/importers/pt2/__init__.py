"""Imports PyTorch programs (.pt2 files of torch.export) without PyTorch."""
