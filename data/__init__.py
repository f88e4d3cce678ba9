"""The data sets: digits.npz, and what datasets.py makes or downloads."""
